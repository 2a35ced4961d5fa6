"""Bad input is refused by name: what was given, the rule, the nearest thing that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torchmetrics import MeanMetric

from lightning_4d import HSDPStrategy, NDStrategy
from lightning_4d.errors import LayoutError
from tests.modules import MLP, TinyGPT
from tests.strategies.scenarios import error_of, quiet, sharded, trainer_with


def test_a_layout_that_does_not_fit_is_refused_when_the_trainer_is_made():
    with pytest.raises(LayoutError) as too_few:
        trainer_with(lambda: NDStrategy(data_parallel_replicate_size=2, data_parallel_shard_size=2))()
    message = str(too_few.value)
    assert "data_parallel_replicate_size=2" in message
    assert "data_parallel_shard_size=2" in message
    assert "4" in message
    with pytest.raises(LayoutError, match="replicate_size=3"):
        trainer_with(lambda: HSDPStrategy(replicate_size=3))()


class CapturedEarly(MLP):
    """B7: takes its parameters in __init__."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Optimizer:
        return self.captured


class Stranger(MLP):
    def configure_optimizers(self) -> Optimizer:
        return SGD([*self.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)


class ReachesIntoABlock(TinyGPT):
    """Uses a block's parameter without calling the block."""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT) + self.blocks[0].norm1.weight.sum()


class CallsPartOfABlock(TinyGPT):
    def __init__(self) -> None:
        super().__init__(layers=2)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.blocks[0].mlp(self.embedding(tokens_BT)))


class Gain(nn.Module):
    """A layer with a parameter, but without reset_parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class OnMeta(MLP):
    """Builds its layers on the meta device, initialised or made in a way that cannot be repeated."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.built = False

    def configure_model(self) -> None:
        if self.built:
            return
        self.built = True
        with torch.device("meta"):
            self.input = nn.Linear(8, 24)
            self.output = nn.Linear(24, 1)
            if self.kind == "custom":
                nn.init.normal_(self.input.weight, std=0.02)
            if self.kind == "metric":
                self.mean = MeanMetric()
            if self.kind == "no_reset":
                self.norm = Gain(24)


def refusals() -> dict[str, str]:
    quiet()
    cases: dict[str, Any] = {
        "captured": lambda: sharded()(max_steps=1).fit(CapturedEarly()),
        "stranger": lambda: sharded()(max_steps=1).fit(Stranger()),
        "blocks": lambda: sharded(blocks="block")(max_steps=1).fit(TinyGPT()),
        "reach": lambda: sharded()(max_steps=1).fit(ReachesIntoABlock()),
        "part": lambda: sharded()(max_steps=1).fit(CallsPartOfABlock()),
        "custom": lambda: sharded()(max_steps=1).fit(OnMeta("custom")),
        "no_reset": lambda: sharded()(max_steps=1).fit(OnMeta("no_reset")),
        "metric": lambda: sharded()(max_steps=1).fit(OnMeta("metric")),
    }
    return {name: error_of(run) for name, run in cases.items()}


def test_what_would_train_wrongly_is_refused_by_name_at_set_up(pool):
    for seen in pool.run(2, refusals, timeout=60):
        assert all(message.startswith("UnsupportedError") for message in seen.values()), seen
        assert "SGD holds the parameter 'input.weight' as it was before sharding" in seen["captured"]
        assert "take parameters from self.parameters() inside configure_optimizers()" in seen["captured"]
        assert "a parameter that is not the module's, of shape (3,)" in seen["stranger"]
        assert "blocks='block': there is no such module" in seen["blocks"]
        assert "'blocks'" in seen["blocks"]
        assert "without calling the block itself" in seen["reach"]
        assert "without calling the block itself" in seen["part"]
        assert "'input.weight' were initialised by custom code while on the meta device" in seen["custom"]
        assert "the metric 'mean' (MeanMetric) was built on the meta device" in seen["metric"]
        assert "Gain has parameters or buffers on the meta device, but no reset_parameters()" in seen["no_reset"]
