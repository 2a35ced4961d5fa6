"""Several axes at once against what one would write with plain torch: FSDP2, parallelize_module and pipelining.

    python -m tests.benchmarks nd [--readme]

Four processes, 2 x 2, and eight, 2 x 2 x 2. Ours and the loop by hand take turns, step by step, in the same processes;
ratios are of such pairs, the Trainer's own work included. Before any clock runs, both train some steps with SGD from
the same weights on the same samples, and the mean over ranks of every loss has to be equal: different work is not
compared. Memory and processor are shared by all, so only the ratios mean something.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from lightning_4d import NDStrategy
from tests.benchmarks import tensor
from tests.benchmarks.pipeline import Alternately, Benchmarked, FirstHalf, SecondHalf, _cross_entropy, fit
from tests.benchmarks.report import machine, write_section
from tests.pool import Pool

SEED = 0
WARM_UP = 3  # steps that make plans and compare batches
ROWS, LENGTH, LAYERS = 8, 128, 8  # of a data-parallel rank
MICROBATCHES = 4
TOLERANCE = 1e-5  # relative, of losses in float32: a gradient that is 10 % too large makes 5e-5 in six steps

MakeOptimizer = Callable[[Any], Optimizer]


def sgd(parameters: Any) -> Optimizer:
    """For the comparison of losses: Adam would hide a gradient that is wrong by a factor."""
    return SGD(parameters, lr=0.3)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-3)


# ----------------------------------------------------------------------------------------------------------------- ours


class Layers(tensor.Benchmarked):
    """The example's GPT with data of its own."""

    def __init__(self, steps: int, optimizer: MakeOptimizer) -> None:
        super().__init__(**tensor.SIZES)
        self._steps, self._optimizer = steps, optimizer

    def train_dataloader(self) -> DataLoader:
        return tensor.batches(2 * (self._steps + 1))

    def configure_optimizers(self) -> Optimizer:  # type: ignore[override]
        return self._optimizer(self.parameters())


class Stages(Benchmarked):
    """A deeper GPT, for stages."""

    def __init__(self, steps: int, optimizer: MakeOptimizer) -> None:
        super().__init__(
            vocab=256, dim=256, heads=8, layers=LAYERS, length=LENGTH, batch_size=ROWS, samples=2 * ROWS * (steps + 1)
        )
        self._optimizer = optimizer

    def configure_optimizers(self) -> Optimizer:
        return self._optimizer(self.parameters())


# -------------------------------------------------------------------------------------------------------------- by hand


class ByHand:
    """A loop on this rank: calling it runs one step."""

    def __init__(self, whole: LightningModule, model: nn.Module, mesh: DeviceMesh, optimizer: MakeOptimizer) -> None:
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        self._optimizer = optimizer([{"params": group} for group in by_mesh.values()])
        loader: DataLoader = whole.train_dataloader()
        # As Lightning samples: it shuffles training data.
        sampler = DistributedSampler(loader.dataset, mesh.size(), mesh.get_local_rank(), seed=SEED)  # type: ignore[arg-type]
        self._batches = iter(DataLoader(loader.dataset, loader.batch_size, sampler=sampler))
        self.losses: list[float] = []

    def __call__(self) -> None:
        self.losses.append(self._step(next(self._batches)))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _step(self, batch: Any) -> float:
        """Forward and backward; the loss, where this rank has one."""
        raise NotImplementedError


def shard(blocks: Iterable[nn.Module], root: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> None:
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(root, mesh=mesh, reshard_after_forward=False)


class LayersByHand(ByHand):
    """FSDP2 over two ranks, of layers that parallelize_module divided over two."""

    def __init__(self, steps: int, optimizer: MakeOptimizer) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self._model: Any = tensor.by_hand(mesh["tp"])
        shard(self._model.blocks, self._model, mesh["dp"], reshard=True)
        super().__init__(Layers(steps, optimizer), self._model, mesh["dp"], optimizer)

    def _step(self, batch: Any) -> float:
        with loss_parallel():
            loss = tensor.loss_of(self._model, batch)
            loss.backward()
        return local(loss).item()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class StagesByHand(ByHand):
    """Two stages under 1F1B, each sharded by FSDP2 over two ranks."""

    def __init__(self, steps: int, optimizer: MakeOptimizer) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        whole = Stages(steps, optimizer)
        half: Any = FirstHalf(whole, LAYERS // 2) if mesh.get_local_rank("pp") == 0 else SecondHalf(whole, LAYERS // 2)
        self._build(whole, half, mesh, optimizer)

    def _build(self, whole: Any, half: Any, mesh: DeviceMesh, optimizer: MakeOptimizer) -> None:
        self._rank = mesh.get_local_rank("pp")
        shard(half.blocks, half, mesh["dp"], reshard=False)
        stage = PipelineStage(half, self._rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        self._schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=_cross_entropy)
        super().__init__(whole, half, mesh["dp"], optimizer)

    def _step(self, batch: Any) -> float:
        (tokens_BT,) = batch
        return self._run(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())

    def _run(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        if self._rank == 0:
            self._schedule.step(tokens_BT, return_outputs=False)
            return math.nan
        losses: list[Tensor] = []
        self._schedule.step(target=targets_BT, losses=losses, return_outputs=False)
        return sum(local(loss).item() for loss in losses) / len(losses)


class Embedded(nn.Module):
    """The first stage of the example's GPT."""

    def __init__(self, model: Any, stop: int) -> None:
        super().__init__()
        self.embedding, self.blocks = model.embedding, model.blocks[:stop]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return x_BTC


class StagesOfLayersByHand(StagesByHand):
    """Two stages under 1F1B of layers that parallelize_module divided over two, sharded by FSDP2 over two ranks."""

    def __init__(self, steps: int, optimizer: MakeOptimizer) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        model, split = tensor.by_hand(mesh["tp"]), tensor.SIZES["n_layers"] // 2
        half = Embedded(model, split) if mesh.get_local_rank("pp") == 0 else SecondHalf(model, split)  # type: ignore[arg-type]
        self._build(Layers(steps, optimizer), half, mesh, optimizer)

    def _step(self, batch: Any) -> float:
        with loss_parallel():
            return self._run(*batch)


# ------------------------------------------------------------------------------------------------------------ comparing


class Other(Protocol):
    """The other side: calling it runs one step."""

    losses: list[float]

    def __call__(self) -> None: ...


@dataclass(frozen=True)
class Contest:
    """Both sides of one comparison; what makes them takes the number of steps and what makes the optimizer."""

    name: str
    ours: Callable[[int, MakeOptimizer], LightningModule]
    other: Callable[[int, MakeOptimizer], Other]
    sizes: dict[str, Any]  # of NDStrategy
    ranks: int = 4


class WithLosses(Alternately):
    """Takes turns, and keeps the losses of ours."""

    def __init__(self, other: Any) -> None:
        super().__init__(other)
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, module, outputs, *rest)
        self.losses.append(outputs["loss"].item())


def in_turns(contest: Contest, steps: int, optimizer: MakeOptimizer) -> tuple[list[tuple[float, float]], Tensor]:
    """On one rank: seconds of steps, ours and the other's that followed; and all losses, (2, steps)."""
    torch.set_num_threads(1)
    seed_everything(SEED, verbose=False)
    other = contest.other(steps + WARM_UP, optimizer)
    seed_everything(SEED, verbose=False)
    turns = WithLosses(other)
    module, strategy = contest.ours(steps + WARM_UP, optimizer), NDStrategy(**contest.sizes)
    fit(module, strategy, contest.ranks, turns, max_steps=steps + WARM_UP)
    dist.barrier()
    pairs = list(zip(turns.ours, turns.by_hand, strict=True))[WARM_UP:]
    return pairs, torch.tensor([turns.losses, other.losses], dtype=torch.float64)


def prove(contest: Contest, steps: int = 3) -> float:
    """The largest relative difference between losses of both, under plain SGD; refuses to compare different work."""
    ranks = Pool().run(contest.ranks, in_turns, contest, steps, sgd, timeout=600)
    ours, other = torch.stack([losses for _, losses in ranks]).nanmean(dim=0)  # a rank without a loss says NaN
    worst = ((ours - other).abs() / other.abs()).max().item()
    if not worst < TOLERANCE:
        raise SystemExit(f"{contest.name}: not the same training; losses of ours {ours}, of the other {other}")
    return worst


def measure(contest: Contest, other: str, rounds: int, steps: int) -> dict[str, str]:
    """The cells on speed, and on how equal both trained."""
    worst = prove(contest)
    found: list[list[tuple[float, float]]] = []
    for _ in track(range(rounds), description=contest.name, transient=True):
        ranks = [pairs for pairs, _ in Pool().run(contest.ranks, in_turns, contest, steps, adamw, timeout=600)]
        found.append([(max(a for a, _ in both), max(b for _, b in both)) for both in zip(*ranks, strict=True)])
    ratios = [statistics.median(theirs / own for own, theirs in one) for one in found]
    own, theirs = zip(*(pair for one in found for pair in one), strict=True)
    return {
        "step, s": f"{statistics.median(own):.3f}",
        f"{other}, s": f"{statistics.median(theirs):.3f}",
        f"{other} / ours": f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        "losses differ by": f"{worst:.0e}",
    }


DP, TP = {"data_parallel_shard_size": 2}, {"tensor_parallel_size": 2}
PP: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": MICROBATCHES}
CONTESTS = [
    Contest("dp 2 x tp 2: FSDP2 + parallelize_module", Layers, LayersByHand, DP | TP),
    Contest(
        "pp 2 x dp 2: pipelining (1F1B, 4 microbatches) + FSDP2",
        Stages,
        StagesByHand,
        PP | DP | {"pipeline_split": [0, LAYERS // 2]},
    ),
    Contest(
        "pp 2 x dp 2 x tp 2: all three",
        Layers,
        StagesOfLayersByHand,
        PP | DP | TP | {"pipeline_split": [0, tensor.SIZES["n_layers"] // 2]},
        ranks=8,
    ),
]


def report(section: str, rows: Iterable[dict[str, str]], *, write: bool) -> None:
    """Print each row when it is there, then the table, and write that into README.md if asked to."""
    found: list[dict[str, str]] = []
    for row in rows:
        found.append(row)
        print(", ".join(f"{name}: {cell}" for name, cell in row.items()), flush=True)
    table = Table(*found[0], title=machine())
    for row in found:
        table.add_row(*row.values())
    Console(width=180).print(table)
    if write:
        write_section(section, found)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print; with --readme write the table into README.md."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks nd", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", type=int, choices=range(len(CONTESTS)), help="one of the comparisons, by position")
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args(arguments)
    contests = CONTESTS if options.only is None else [CONTESTS[options.only]]
    rounds, steps = options.rounds, options.steps
    rows = ({"layout: by hand": each.name} | measure(each, "by hand", rounds, steps) for each in contests)
    report("nd", rows, write=options.readme)
