"""Two axes at once against what one would write with plain torch: FSDP2 with parallelize_module, pipelining with FSDP2.

    python -m tests.benchmarks nd [--readme]

Four processes, 2 x 2. Ours and the loop by hand take turns, step by step, in the same processes; ratios are of such
pairs, the Trainer's own work included. Memory and processor are shared by all, so only the ratios mean something.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from lightning_4d import NDStrategy
from tests.benchmarks import tensor
from tests.benchmarks.pipeline import (
    Alternately,
    Benchmarked,
    FirstHalf,
    HandWritten,
    SecondHalf,
    _cross_entropy,
    fit,
)
from tests.benchmarks.report import machine, write_section
from tests.pool import Pool

WARM_UP = 3  # steps that make plans and compare batches
ROWS, LENGTH, LAYERS = 8, 128, 8  # of a data-parallel rank
GPT_ARGUMENTS: dict[str, Any] = {"vocab": 256, "dim": 256, "heads": 8, "layers": LAYERS, "length": LENGTH}


class FromData(tensor.Benchmarked):
    """The example's GPT with data of its own."""

    def __init__(self, steps: int) -> None:
        super().__init__(**tensor.SIZES)
        self._steps = steps

    def train_dataloader(self) -> Any:
        return tensor.batches(2 * (self._steps + WARM_UP + 1))


def shard(blocks: nn.ModuleList, root: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> None:
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(root, mesh=mesh, reshard_after_forward=False)


class LayersByHand:
    """FSDP2 over two ranks, of layers that parallelize_module divided over two."""

    def __init__(self, steps: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self._model: Any = tensor.by_hand(mesh["tp"])
        shard(self._model.blocks, self._model, mesh["dp"], reshard=True)
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in self._model.parameters():
            by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        self._optimizer = torch.optim.AdamW([{"params": group} for group in by_mesh.values()], lr=1e-3)
        self._batches = iter(tensor.batches(steps + WARM_UP + 1))

    def __call__(self) -> None:
        with loss_parallel():
            tensor.loss_of(self._model, next(self._batches)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class StagesByHand(HandWritten):
    """Two stages under 1F1B, each sharded by FSDP2 over two ranks."""

    def __init__(self, whole: Benchmarked) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        self._rank = mesh.get_local_rank("pp")
        split = LAYERS // 2
        half: Any = FirstHalf(whole, split) if self._rank == 0 else SecondHalf(whole, split)
        shard(half.blocks, half, mesh["dp"], reshard=False)
        stage = PipelineStage(half, self._rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        self._schedule = Schedule1F1B(stage, 4, loss_fn=_cross_entropy)
        self._optimizer = torch.optim.SGD(half.parameters(), lr=whole.lr)
        self._loader = iter(whole.train_dataloader())


def stages_model(steps: int) -> Benchmarked:
    return Benchmarked(**GPT_ARGUMENTS, batch_size=ROWS, samples=2 * ROWS * (steps + WARM_UP + 1))


CONTENDERS: dict[str, tuple[Callable[[int], LightningModule], Callable[[int], Any], dict[str, Any]]] = {
    "dp 2 x tp 2: FSDP2 + parallelize_module": (
        FromData,
        LayersByHand,
        {"data_parallel_shard_size": 2, "tensor_parallel_size": 2},
    ),
    "pp 2 x dp 2: pipelining (1F1B, 4 microbatches) + FSDP2": (
        stages_model,
        lambda steps: StagesByHand(stages_model(steps)),
        {
            "pipeline_parallel_size": 2,
            "data_parallel_shard_size": 2,
            "num_microbatches": 4,
            "pipeline_split": [0, LAYERS // 2],
        },
    ),
}


def pairs(name: str, steps: int) -> list[tuple[float, float]]:
    """On one rank: seconds of steps, ours and the one by hand that followed."""
    torch.set_num_threads(1)
    model, by_hand, sizes = CONTENDERS[name]
    seed_everything(0, verbose=False)
    alternately = Alternately(by_hand(steps))
    fit(model(steps), NDStrategy(**sizes), 4, alternately, max_steps=steps + WARM_UP)
    return list(zip(alternately.ours, alternately.by_hand, strict=True))[WARM_UP:]


def measure(rounds: int, steps: int) -> list[dict[str, str]]:
    rows = []
    for name in CONTENDERS:
        found: list[list[tuple[float, float]]] = []
        for _ in track(range(rounds), description=name, transient=True):
            ranks = Pool().run(4, pairs, name, steps, timeout=600)
            found.append([(max(a for a, _ in both), max(b for _, b in both)) for both in zip(*ranks, strict=True)])
        ratios = [statistics.median(hand / own for own, hand in one) for one in found]
        own, hand = zip(*(pair for one in found for pair in one), strict=True)
        rows.append(
            {
                "layout: by hand": name,
                "step, s": f"{statistics.median(own):.3f}",
                "by hand, s": f"{statistics.median(hand):.3f}",
                "by hand / ours": f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure and print; with --readme write the table into README.md."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks nd", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args(arguments)
    rows = measure(options.rounds, options.steps)
    table = Table(*rows[0], title=machine())
    for row in rows:
        table.add_row(*row.values())
    Console(width=160).print(table)
    if options.readme:
        write_section("nd", rows)
