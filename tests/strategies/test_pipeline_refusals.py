"""What pipeline stages cannot do is refused at set-up or in the first step, by name, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_4d import NDStrategy
from lightning_4d.errors import UnsupportedError
from tests import staged_modules as staged
from tests.modules import GAN, MLP, TinyGPT
from tests.staged_modules import Staged
from tests.strategies.scenarios import error_of, quiet, trainer_with


class PenalisedGradients(Staged):
    """Gradients of gradients: the step differentiates by its input."""

    def loss(self, batch: Any, stage: str) -> Tensor:
        x_BTC = batch[0].clone().requires_grad_()
        out = self(x_BTC)
        (gradient,) = torch.autograd.grad(out.sum(), x_BTC, create_graph=True)
        return out.square().mean() + gradient.square().mean()


class OwnBackward(Staged):
    def loss(self, batch: Any, stage: str) -> Tensor:
        loss = super().loss(batch, stage)
        loss.backward(retain_graph=True)
        return loss


class SkipsABlock(Staged):
    def through(self, x_BTC: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x_BTC = block(x_BTC)
        return x_BTC


class SkipsInValidation(Staged):
    def through(self, x_BTC: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if self.training or number != 1:
                x_BTC = block(x_BTC)
        return x_BTC


class OtherOrderInValidation(Staged):
    def through(self, x_BTC: Tensor) -> Tensor:
        for block in self.blocks if self.training else [self.blocks[i] for i in (0, 2, 1, 3)]:
            x_BTC = block(x_BTC)
        return x_BTC


class ReturnsNone(Staged):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "train")


class TakesIterator(Staged):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        return self.loss(next(dataloader_iter)[0], "train")


class InnerValues(Staged):
    """The loss uses what a block computed inside and did not return."""

    class Leaking(nn.Linear):
        kept: list[Tensor]

        def forward(self, x: Tensor) -> Tensor:
            self.kept = [super().forward(x).tanh()]
            return x + self.kept[0]

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(self.Leaking(self.dim, self.dim) for _ in range(self.blocks_count))

    def loss(self, batch: Any, stage: str) -> Tensor:
        return super().loss(batch, stage) + self.blocks[0].kept[0].square().mean()


class MixedLog(Staged):
    """Logs values that do not follow from those of microbatches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        value = {
            "median": lambda: out.median(),
            "rank": lambda: (out.mean((1, 2)) > out.mean()).double().mean(),
        }[self.kind]()
        self.log("strange", value)
        return F.mse_loss(out, batch[1])


class MetricOfMicrobatch(Staged):
    """Computes with what a metric said of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, "train")
        self.log("twice", 2 * self.mean(loss))
        return loss


class ReplacesList(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, "train")
        self.kept = [loss.detach()]
        return loss


class ClipsByHand(Staged):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Variance(Staged):
    def loss(self, batch: Any, stage: str) -> Tensor:
        return (self(batch[0]) - batch[1]).flatten(1).mean(1).var()


@dataclass
class Case:
    """A module and strategy options, and what the message says."""

    module: Callable[[], LightningModule]
    says: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


VALIDATING = {"limit_val_batches": 1, "num_sanity_val_steps": 1}

CASES = {
    "manual optimization": Case(GAN, ("manual optimization", "automatic")),
    "gradients of gradients": Case(PenalisedGradients, ("computes gradients itself",)),
    "own backward": Case(OwnBackward, ("computes gradients itself",)),
    "fewer blocks than stages": Case(partial(TinyGPT, layers=1), ("1 blocks for 2 pipeline",), {"blocks": "blocks"}),
    "no blocks": Case(MLP, ("block",)),
    "fewer blocks than stages of a V": Case(partial(TinyGPT, layers=3), ("block", "3"), {"pipeline_schedule": "zbv"}),
    "several passes": Case(staged.Twice, ("'blocks.0'", "more than once")),
    "in-place writes to inputs": Case(staged.WritesInput, ("'blocks.0'", "in place")),
    "conditions on values": Case(staged.ReadsValues, ("does not run without values", "isnan")),
    "batch norm": Case(staged.WithBatchNorm, ("'norm.", "num_microbatches=1")),
    "a buffer that counts steps": Case(
        staged.CountingBuffer,
        ("the buffer 'steps'", "plain attribute"),
        {"num_microbatches": 1, "pipeline_schedule": "gpipe"},
    ),
    "contrastive": Case(staged.Contrastive, ("the loss", "num_microbatches=1")),
    "norm over the batch": Case(staged.NormOverBatch, ("the loss", "num_microbatches=1")),
    "variance": Case(Variance, ("the loss", "num_microbatches=1")),
    "balance loss": Case(staged.WithAuxiliaryLoss, ("'balance_loss'", "num_microbatches=1")),
    "median": Case(partial(MixedLog, "median"), ("'strange'", "num_microbatches=1")),
    "compared with the batch's mean": Case(partial(MixedLog, "rank"), ("'strange'", "whole batch")),
    "computes with a metric": Case(MetricOfMicrobatch, ("'twice'",)),
    "clips by hand": Case(ClipsByHand, ("clip_grad_norm_", "gradient_clip_val")),
    "skips a block": Case(SkipsABlock, ("does not call the block 'blocks.3'",)),
    "skips one in validation": Case(SkipsInValidation, ("block",), trainer=VALIDATING),
    "other order in validation": Case(OtherOrderInValidation, ("validation_step", "another order"), trainer=VALIDATING),
    "no loss": Case(ReturnsNone, ("returned NoneType",)),
    "an iterator": Case(TakesIterator, ("dataloader_iter",)),
    "values inside blocks": Case(InnerValues, ("made inside block 'blocks.0'",)),
    "another list": Case(ReplacesList, ("self.kept",)),
    "unknown block": Case(Staged, ("pipeline_split", "'blocks.9'", "blocks.0"), {"pipeline_split": ["blocks.9"]}),
    "too many first blocks": Case(Staged, ("pipeline_split", "stages"), {"pipeline_split": ["blocks.1", "blocks.2"]}),
    "falling order": Case(Staged, ("pipeline_split",), {"pipeline_split": [3, 1]}),
    "too few microbatches": Case(Staged, ("num_microbatches",), {"num_microbatches": 1}),
    "microbatches of dualpipev": Case(
        Staged, ("num_microbatches", "dualpipev"), {"pipeline_schedule": "dualpipev", "num_microbatches": 3}
    ),
    "microbatches of interleaved": Case(
        Staged, ("num_microbatches",), {"pipeline_schedule": "interleaved_1f1b", "num_microbatches": 5}
    ),
    "no microbatch": Case(Staged, ("num_microbatches",), {"num_microbatches": 0}),
}


def refuse_each(names: list[str]) -> dict[str, str]:
    quiet()
    found = {}
    for name in names:
        case = CASES[name]

        def run(case: Case = case) -> None:
            strategy = NDStrategy(pipeline_parallel_size=2, **case.options)
            settings = {"max_steps": 1, "limit_val_batches": 0} | case.trainer
            trainer_with(lambda: strategy)(**settings).fit(case.module())

        try:
            found[name] = error_of(run)
        except AssertionError as error:
            found[name] = f"AssertionError: {error}"
    return found


def test_refused_by_name_on_every_rank(pool):
    results = pool.run(2, refuse_each, list(CASES), timeout=300)
    wrong = [
        f"{name}, rank {rank}: {found[name]}"
        for rank, found in enumerate(results)
        for name, case in CASES.items()
        if not found[name].split(":")[0].endswith("Error")
        or found[name].startswith(("AssertionError", "RuntimeError", "MisconfigurationException"))
        or not all(part in found[name] for part in case.says)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["pipedream", "1f1b2", ""])
def test_unknown_schedules_are_refused_at_once(name):
    with pytest.raises(UnsupportedError, match="the schedules are gpipe, 1f1b"):
        NDStrategy(pipeline_schedule=name)
