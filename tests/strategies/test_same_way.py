"""Steps whose way depends on the rank, on ranks that share activations: refused, or the same numbers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from lightning_4d import NDStrategy
from tests.harness import compare, reference, train
from tests.modules import TinyGPT
from tests.pool import WorkerError
from tests.strategies.scenarios import quiet, trainer_with


class Branching(TinyGPT):
    """Its step does something on one rank only."""

    def __init__(self, place: str, rank: int = 0) -> None:
        super().__init__()
        self.place, self.rank = place, rank

    def at(self, place: str) -> bool:
        return self.place == place and self.global_rank == self.rank

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT) + self.positions[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        if self.at("block"):
            self.blocks[0](x_BTC.detach())
        if self.at("hidden"):
            x_BTC.detach().mean()
        return self.head(self.norm(x_BTC))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.at("print"):
            self.print(f"{batch_idx}: {loss.detach():.3f}")
        return loss


def fit(module: Any, **sizes: int) -> None:
    quiet()
    trainer_with(lambda: NDStrategy(**sizes), max_steps=4, limit_val_batches=0)().fit(module())


CONTEXT = {"context_parallel_size": 2}
REFUSED = [
    ("hidden", CONTEXT),
    ("block", CONTEXT),
    ("block", CONTEXT | {"data_parallel_shard_size": 2}),
    ("hidden", CONTEXT | {"tensor_parallel_size": 2}),
    ("block", {"tensor_parallel_size": 2}),
    ("hidden", CONTEXT | {"pipeline_parallel_size": 2}),
]


def _id(value: Any) -> str:
    return value if isinstance(value, str) else ".".join(name.split("_")[0] for name in value)


@pytest.mark.parametrize(("place", "sizes"), REFUSED, ids=_id)
def test_an_operation_on_the_first_rank_alone_is_refused_by_its_line(pool, place, sizes):
    rank = 2 if "pipeline_parallel_size" in sizes else 0  # of the last stage
    with pytest.raises(WorkerError, match="asked for its rank") as caught:
        pool.run(math.prod(sizes.values()), fit, partial(Branching, place, rank), **sizes, timeout=60)
    refused = [line for line in caught.value.failures.values() if line.startswith("UnsupportedError")]
    assert len(refused) >= 2
    assert __file__ in str(caught.value)


@pytest.mark.parametrize("sizes", [CONTEXT, {"tensor_parallel_size": 2}], ids=["cp", "tp"])
def test_what_needs_no_other_rank_may_depend_on_the_rank(pool, sizes):
    module = partial(Branching, "print")
    expected = reference(pool, 1, module, steps=2)
    for mine in pool.run(2, train, module, partial(NDStrategy, **sizes), steps=2):
        compare(mine, expected[0], rtol=1e-10)
