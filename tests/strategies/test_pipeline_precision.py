"""Precisions and random numbers in pipeline stages: as DDP's, and equal from run to run and schedule to schedule."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_4d import NDStrategy
from tests.harness import compare, staged_tensors, train
from tests.modules import TinyGPT
from tests.staged_modules import Staged
from tests.strategies.test_pipeline import train_each

FOUR = partial(TinyGPT, layers=4)
PIPELINE = partial(NDStrategy, pipeline_parallel_size=2)
NUMBERS = ("losses", "gradients", "clipped", "parameters", "metrics")

# With its relative error. Half precision rounds the gradient of each microbatch by itself, so that sums over the batch
# differ in the last bits of bfloat16 (2^-8) or float16 (2^-11).
PRECISIONS = {"64-true": 1e-10, "32-true": 1e-5, "bf16-mixed": 2e-2, "bf16-true": 4e-2}


def test_precisions(pool):
    cases = [{"module": FOUR, "precision": precision, "limit_val_batches": 2} for precision in PRECISIONS]
    (expected,) = pool.run(1, train_each, cases, "auto", timeout=300)
    for one in pool.run(2, train_each, cases, PIPELINE, gather=staged_tensors, timeout=300):
        for (name, rtol), mine, other in zip(PRECISIONS.items(), one, expected, strict=True):
            compare(mine, other, rtol=rtol, what=NUMBERS, label=f"{name}: ")
            assert {t.dtype for t in mine.parameters.values()} == {t.dtype for t in other.parameters.values()}


def test_bf16_mixed_of_one_microbatch_is_autocast_itself(pool):
    case = [{"module": FOUR, "precision": "bf16-mixed"}]
    ((expected,),) = pool.run(1, train_each, case, "auto")
    strategy = partial(PIPELINE, pipeline_schedule="gpipe", num_microbatches=1)
    for (mine,) in pool.run(2, train_each, case, strategy, gather=staged_tensors):
        compare(mine, expected, rtol=1e-6, what=NUMBERS)


class Overflowing(Staged):
    """In the second batch the gradient overflows float16, on the first stage or on the last."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.batch = where, 0

    def forward(self, x_BTC: Tensor) -> Tensor:
        factor = 1e38 if self.batch == 1 and self.training else 1.0
        x = self.input(x_BTC)
        if self.where == "first":
            x = _Huge.apply(x, factor)
        x = self.through(x)
        return self.head(_Huge.apply(x, factor) if self.where == "last" else x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch = batch_idx


class _Huge(torch.autograd.Function):
    """Multiplies the gradient only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Scales(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        self.seen += [float(trainer.precision_plugin.scaler.get_scale()), optimizer.param_groups[0]["lr"]]


def overflows(strategy: Any, where: str) -> Any:
    scales = Scales()
    settings: dict[str, Any] = {"steps": -1, "max_epochs": 1, "limit_train_batches": 4, "gradient_clip_val": 0.5}
    module = partial(Overflowing, where)
    # Trainer(precision="16-mixed") becomes bf16-mixed on a CPU; the plugin itself does not.
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
    recording = train(
        module,
        strategy,
        precision=None,
        plugins=plugin,
        callbacks=lambda: [scales],
        gather=staged_tensors,
        **settings,
    )
    return scales.seen, recording


@pytest.mark.parametrize("where", ["first", "last"])
def test_an_overflow_on_one_stage_skips_the_step_on_all(pool, where):
    ((scales, expected),) = pool.run(1, overflows, "auto", where)
    assert scales[2] == scales[0] / 2  # the second step was skipped
    for mine, recording in pool.run(2, overflows, PIPELINE, where):
        assert mine == scales
        assert len(recording.clipped) == len(expected.clipped) == 3
        compare(recording, expected, rtol=5e-3, what=("losses", "clipped", "parameters"))


# ------------------------------------------------------------------------------------------------------------- dropout


class Dropping(Staged):
    """Blocks keep what dropout made of ones, and the step what it drew outside blocks."""

    class Drop(torch.nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(dim, dim)
            self.masks: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
            if type(mask) is Tensor and self.training:
                self.masks.append(mask.detach().clone())
            return x + self.linear(x) * mask

    def __init__(self, probability: float = 0.5) -> None:
        super().__init__()
        self.order: list[float] = []
        self.drop = torch.nn.Dropout(probability)

    def make_blocks(self) -> torch.nn.Module:
        return torch.nn.ModuleList(self.Drop(self.dim) for _ in range(self.blocks_count))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.head(self.drop(self.through(self.drop(self.input(x_BTC)))))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset("train"), batch_size=4, shuffle=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.order.append(float(batch[0].sum()))


class Masks(Callback):
    """What each block dropped, and the samples of each batch."""

    def __init__(self) -> None:
        self.found: dict[str, list[Tensor]] = {}
        self.order: list[float] = []

    def on_train_end(self, trainer: Trainer, pl_module: Dropping) -> None:
        self.order = pl_module.order
        self.found = {name: block.masks for name, block in pl_module.blocks.named_children()}


def drops(schedule: str, seed: int, microbatches: int | str = 2, module: Any = Dropping) -> Any:
    masks = Masks()
    strategy = partial(PIPELINE, pipeline_schedule=schedule, num_microbatches=microbatches)
    recording = train(
        module, strategy, seed=seed, callbacks=lambda: [masks], gather=staged_tensors, limit_val_batches=1
    )
    return recording, masks.found, masks.order


def many_drops() -> Any:
    return {
        "one": drops("1f1b", 0),
        "again": drops("1f1b", 0),
        "gpipe": drops("gpipe", 0),
        "zbv": drops("zbv", 0),
        "other seed": drops("1f1b", 1),
        "without": drops("1f1b", 0, module=partial(Dropping, 0.0)),
    }


def test_dropout(pool):
    first, second = pool.run(2, many_drops, timeout=300)
    same = ("losses", "gradients", "parameters")
    for runs in (first, second):
        for name in ("again", "gpipe", "zbv"):
            compare(runs[name][0], runs["one"][0], rtol=1e-10, what=same, label=f"{name}: ")
            assert runs[name][2] == runs["one"][2]
        assert runs["other seed"][0].losses != runs["one"][0].losses
        assert runs["without"][2] == runs["one"][2]  # dropout does not disturb the order of samples
        assert runs["without"][0].losses != runs["one"][0].losses
    masks = [mask for runs in (first, second) for block in runs["one"][1].values() for mask in block]
    assert len(masks) == 3 * 2 * 4  # steps, microbatches, blocks: none is drawn twice
    for place, mask in enumerate(masks):
        assert mask.unique().tolist() == [0.0, 2.0]
        assert not any(torch.equal(mask, other) for other in masks[place + 1 :])
