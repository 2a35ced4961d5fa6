"""The grid of layouts, modules and features under which training must give the numbers of DDP, generated."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric, SumMetric

from lightning_4d import NDStrategy, ParallelLayout
from lightning_4d.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_4d.parallel.gradients import gradient_norms
from tests.comparison import NOISE, Recording, compare
from tests.harness import full_tensors, reference, staged_tensors, train
from tests.modules import TinyGPT, ViT
from tests.pool import Pool

AXES = ("pipeline", "data", "context", "tensor")
SHORT = {"pipeline": "pp", "data": "dp", "context": "cp", "tensor": "tp"}


class GridGPT(TinyGPT):
    """A language model with unequal numbers of targets; logs by every reduction, and the norm of the gradient.

    With an even vocabulary, so that embedding, head and loss are divided too.
    """

    def __init__(self, ragged: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"vocab": 32, "layers": 4, **kwargs})
        self.ragged = ragged
        self.mean_loss = nn.ModuleDict({stage: MeanMetric() for stage in ("fit", "val")})
        self.token_sum = nn.ModuleDict({stage: SumMetric() for stage in ("fit", "val")})

    def loss(self, batch: Any, stage: str) -> Tensor:
        (tokens_BT,) = batch
        targets_BT = tokens_BT[:, 1:].clone()
        if self.ragged:
            length = tokens_BT[:, 0] % (self.length + 1)  # of each sample; one of them has none that counts
            targets_BT[torch.arange(self.length, device=tokens_BT.device) >= length[:, None]] = -100
        logits_BTV = self(tokens_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        valid = (targets_BT != -100).sum().float()
        self.log_dict({f"{stage}_ppl": loss.exp(), f"{stage}_rows": float(len(tokens_BT))}, on_epoch=True)
        for reduction, value in {"sum": valid, "max": loss, "min": loss, "mean": loss}.items():
            self.log(f"{stage}_{reduction}", value, reduce_fx=reduction, on_step=False, on_epoch=True, sync_dist=True)
        which = "fit" if stage == "train" else stage  # "train" is a method of modules
        self.token_sum[which](valid)
        self.mean_loss[which](loss.detach(), weight=valid)
        self.log(f"{stage}_token_sum", self.token_sum[which], on_step=False, on_epoch=True)
        self.log(f"{stage}_mean_loss", self.mean_loss[which], on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log("norm", gradient_norms(self)["grad_2.0_norm_total"])


@dataclass(frozen=True)
class Feature:
    """A way to train, for both sides of the comparison, and what only the layouts do besides."""

    trainer: Mapping[str, Any] = field(default_factory=dict)
    module: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)  # arguments of `train` for the layout alone
    needs: frozenset[str] = frozenset()  # axes
    excludes: frozenset[str] = frozenset()
    rtol: float = 1e-10
    noise: float = NOISE  # of `compare`
    alone: str = "auto"  # of `reference`


def recompute_every_block() -> list[Callback]:
    return [ActivationCheckpointing(policy="full")]


FEATURES = {
    "plain": Feature(trainer={"limit_val_batches": 2, "max_epochs": 1, "steps": -1, "limit_train_batches": 3}),
    "accumulation": Feature(trainer={"accumulate_grad_batches": 3}, module={"samples": 96}),
    "clipping": Feature(trainer={"gradient_clip_val": 0.05}),
    "ragged": Feature(module={"ragged": True}),
    # Under a pipeline each microbatch has numbers of its own, so that masks are equal in distribution only.
    "dropout": Feature(module={"dropout": 0.25}, excludes=frozenset({"pipeline"}), alone="ddp"),
    "recompute": Feature(only={"callbacks": recompute_every_block}),
    "sequence": Feature(strategy={"sequence_parallel": True}, needs=frozenset({"tensor"})),
    # In float32's epsilons: gradients that are zero in exact arithmetic (key biases) hold the rounding noise of bf16.
    "mixed": Feature(trainer={"precision": "bf16-mixed"}, rtol=4e-2, noise=2048.0),
    "zero_bubble": Feature(strategy={"pipeline_schedule": "zbv"}, needs=frozenset({"pipeline"})),
    "ulysses": Feature(strategy={"context_parallel_attention": "ulysses"}, needs=frozenset({"context"})),
}

MODULES: dict[str, Callable[..., LightningModule]] = {
    "gpt": GridGPT,
    "tied": partial(GridGPT, tied=True, fused_qkv=False, rope=True),
    "vit": partial(ViT, layers=4),
}
GPT_ONLY = frozenset({"ragged"})


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    axes: tuple[str, ...]
    module: str
    feature: str

    @property
    def sizes(self) -> dict[str, int]:
        """Arguments of NDStrategy; each axis has size 2, "data" is sharded."""
        size = {axis: 2 if axis in self.axes else 1 for axis in AXES}
        return {
            "pipeline_parallel_size": size["pipeline"],
            "data_parallel_shard_size": size["data"],
            "context_parallel_size": size["context"],
            "tensor_parallel_size": size["tensor"],
        }

    @property
    def world(self) -> int:
        return 2 ** len(self.axes)

    def __str__(self) -> str:
        return f"{'.'.join(SHORT[axis] for axis in self.axes)}-{self.module}-{self.feature}"


def legal(case: Case) -> bool:
    """Whether the feature exists under these axes, for this module."""
    feature, axes = FEATURES[case.feature], set(case.axes)
    return feature.needs <= axes and not feature.excludes & axes and (case.module == "gpt" or _for_all(case))


def _for_all(case: Case) -> bool:
    return case.feature not in GPT_ONLY and not (case.module == "vit" and case.feature in ("dropout", "ulysses"))


COMBINATIONS = [axes for count in (2, 3, 4) for axes in itertools.combinations(AXES, count)]
WHOLE = [
    case
    for axes, module, feature in itertools.product(COMBINATIONS, MODULES, FEATURES)
    if legal(case := Case(axes, module, feature))
]


def pruned() -> list[Case]:
    """Every combination of axes, the rarest features so far first, the modules in turn."""
    chosen: list[Case] = []
    for axes in COMBINATIONS:
        for _ in range(3 if len(axes) == 3 else 1 if "data" in axes else 2):
            features = Counter(case.feature for case in chosen)
            modules = Counter(case.module for case in chosen)
            legal_here = [case for case in WHOLE if case.axes == axes and case not in chosen]
            chosen.append(min(legal_here, key=lambda case: (features[case.feature], modules[case.module])))
    return chosen


def strategy_of(case: Case, **options: Any) -> Callable[[], NDStrategy]:
    return partial(NDStrategy, **case.sizes, **{**FEATURES[case.feature].strategy, **options})


class References:
    """What DDP, or one process, gives: each trained once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: dict[Any, list[Recording]] = {}

    def of(self, case: Case) -> list[Recording]:
        """The record of each data-parallel rank."""
        feature, data = FEATURES[case.feature], 2 if "data" in case.axes else 1
        key = (data, case.module, feature.alone, repr(feature.trainer), repr(feature.module))
        if key not in self._known:
            self._known[key] = reference(self._pool, data, module_of(case), alone=feature.alone, **feature.trainer)
        return self._known[key]


def module_of(case: Case) -> Callable[[], LightningModule]:
    return partial(MODULES[case.module], **FEATURES[case.feature].module)


def recorded(pool: Pool, case: Case, **options: Any) -> list[Recording]:
    """Train under the layout; `options` are the strategy's."""
    feature = FEATURES[case.feature]
    gather = staged_tensors if "pipeline" in case.axes else full_tensors
    arguments = {**feature.trainer, **feature.only}
    return pool.run(case.world, train, module_of(case), strategy_of(case, **options), gather=gather, **arguments)


def check(actual: Sequence[Recording], expected: Sequence[Recording], case: Case) -> None:
    """Compare every rank with the DDP rank that reads the same samples."""
    layout = ParallelLayout.resolve(case.world, **case.sizes)
    feature = FEATURES[case.feature]
    for rank, mine in enumerate(actual):
        theirs = expected[layout.data_parallel_rank(rank)]
        compare(mine, theirs, rtol=feature.rtol, noise=feature.noise, label=f"rank {rank} ")
