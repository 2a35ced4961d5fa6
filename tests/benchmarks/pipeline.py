"""Pipeline stages: how busy ranks are under each schedule, and step time against a hand-written loop.

    python -m tests.benchmarks pipeline [--readme] [--bubble-only | --speed-only]

Busy: four stages whose blocks wait a fixed time, so that few cores do not distort it; the share of a step in which a
rank has work, beside that of the schedule's own actions without any cost of running them. Speed: two stages of a GPT
under 1F1B, against ``torch.distributed.pipelining`` driven by hand, alternately in one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

from lightning_4d import NDStrategy
from lightning_4d.parallel.pipeline.schedule import action_list, find_schedule
from lightning_4d.parallel.pipeline.timeline import efficiency, simulate
from tests.benchmarks.report import machine, write_section
from tests.harness import quiet
from tests.modules import TinyGPT
from tests.pool import Pool

STAGES = 4
UNIT = 0.03  # seconds of a stage's forward, of its input gradient, and of its weight gradient
BUSY = [("gpipe", (1, 4, 8, 16)), ("1f1b", (4, 8, 16)), ("interleaved_1f1b", (4, 8, 16)), ("zbv", (4, 8, 16))]
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "pipeline.png"


# ----------------------------------------------------------------------------------------------------------------- busy


class _WaitInput(torch.autograd.Function):
    """Takes its time in forward, and again when the gradient of its input is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class _WaitWeight(torch.autograd.Function):
    """Takes its time when the gradient of a weight is asked for."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Waiting(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return _WaitInput.apply(x, self.seconds) * _WaitWeight.apply(self.weight, self.seconds)


class WaitingModule(LightningModule):
    def __init__(self, blocks: int, rows: int, steps: int) -> None:
        super().__init__()
        self.rows, self.steps = rows, steps
        self.blocks = nn.ModuleList(Waiting(UNIT * STAGES / blocks) for _ in range(blocks))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.mean()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(self.rows * self.steps, 2)), batch_size=self.rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(Callback):
    """The duration of each step, from a barrier on."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        dist.barrier()
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def fit(module: LightningModule, strategy: Any, devices: int, clock: Clock, **settings: Any) -> None:
    with quiet():
        trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            **settings,
        )
        trainer.fit(module)


def busy(schedule: str, microbatches: int) -> float:
    """On one rank: which part of the shortest step is its work."""
    stages = STAGES * find_schedule(schedule).default_stages_per_rank
    steps, clock = 4, Clock()
    strategy = NDStrategy(
        pipeline_parallel_size=STAGES,
        pipeline_schedule=schedule,
        num_microbatches=microbatches,
        pipeline_split=list(range(stages)),
    )
    module = WaitingModule(stages, microbatches, steps)
    fit(module, strategy, STAGES, clock, max_epochs=1)
    return 3 * UNIT * microbatches / min(clock.seconds[1:])


def theory(schedule: str, microbatches: int) -> float:
    kind = find_schedule(schedule)
    stages = STAGES * kind.default_stages_per_rank
    one = {"forward": 1.0, "backward": 2.0, "input_gradient": 1.0, "weight_gradient": 1.0}
    return efficiency(simulate(action_list(kind, STAGES, stages, microbatches), one))


def measure_busy() -> list[dict[str, str]]:
    rows = []
    found: dict[str, list[tuple[int, float, float]]] = {}
    for schedule, counts in BUSY:
        cells = {"schedule": schedule}
        for count in track((1, 4, 8, 16), description=schedule, transient=True):
            if count not in counts or not find_schedule(schedule).allows_microbatches(count, STAGES):
                cells[f"{count} microbatches"] = "–"
                continue
            measured = min(Pool().run(STAGES, busy, schedule, count, timeout=300))
            expected = theory(schedule, count)
            found.setdefault(schedule, []).append((count, measured, expected))
            cells[f"{count} microbatches"] = f"{measured:.1%} ({expected:.1%})"
        rows.append(cells)
    draw(found)
    return rows


def draw(found: dict[str, list[tuple[int, float, float]]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    for schedule, points in found.items():
        counts = [count for count, _, _ in points]
        (line,) = axes.plot(counts, [100 * measured for _, measured, _ in points], "o", label=schedule)
        axes.plot(counts, [100 * expected for _, _, expected in points], "-", color=line.get_color(), linewidth=1)
    axes.set(xlabel="microbatches", ylabel="busy, %", ylim=(0, 100), xticks=[1, 4, 8, 16])
    axes.set_title("Four stages: measured (dots) and the schedule's own limit (lines)")
    axes.grid(alpha=0.3)
    axes.legend()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=150)


# ---------------------------------------------------------------------------------------------------------------- speed


class Benchmarked(TinyGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return language_model_loss(self, batch)


def language_model_loss(model: nn.Module, batch: Any) -> Tensor:
    (tokens_BT,) = batch
    logits_BTV = model(tokens_BT[:, :-1])
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


class FirstHalf(nn.Module):
    def __init__(self, model: TinyGPT, stop: int) -> None:
        super().__init__()
        self.embedding, self.positions, self.blocks = model.embedding, model.positions, model.blocks[:stop]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT) + self.positions[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return x_BTC


class SecondHalf(nn.Module):
    def __init__(self, model: TinyGPT, start: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[start:], model.norm, model.head

    def forward(self, x_BTC: Tensor) -> Tensor:
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))


def ours(model: partial[TinyGPT], microbatches: int, split: int, steps: int) -> list[float]:
    clock = Clock()
    seed_everything(0, verbose=False)
    strategy = NDStrategy(
        pipeline_parallel_size=2, num_microbatches=microbatches, pipeline_split=[0, split], pipeline_schedule="1f1b"
    )
    fit(model(), strategy, 2, clock, max_steps=steps + 2)
    return clock.seconds[2:]


def by_hand(model: partial[TinyGPT], microbatches: int, split: int, steps: int) -> list[float]:
    seed_everything(0, verbose=False)
    whole, rank = model(), dist.get_rank()
    half = FirstHalf(whole, split) if rank == 0 else SecondHalf(whole, split)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))

    def loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)
    optimizer = torch.optim.SGD(half.parameters(), lr=whole.lr)
    seconds = []
    loader = iter(whole.train_dataloader())
    for _ in range(steps + 2):
        dist.barrier()
        start = time.perf_counter()
        (tokens_BT,) = next(loader)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens_BT[:, :-1].contiguous())
        else:
            schedule.step(target=tokens_BT[:, 1:].contiguous())
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def measure_speed(rounds: int, steps: int) -> list[dict[str, str]]:
    rows = []
    for dim, layers, microbatches in ((256, 8, 4), (256, 8, 8)):
        batch = 2 * microbatches
        model = partial(
            Benchmarked, vocab=256, dim=dim, heads=8, layers=layers, length=128, batch_size=batch,
            samples=batch * (steps + 4),
        )  # fmt: skip
        taken: dict[str, list[float]] = {"ours": [], "by hand": []}
        for number in track(range(rounds), description=f"{microbatches} microbatches", transient=True):
            order = [("ours", ours), ("by hand", by_hand)]
            for name, contender in order if number % 2 == 0 else reversed(order):
                ranks = Pool().run(2, contender, model, microbatches, layers // 2, steps, timeout=600)
                taken[name].append(statistics.median(max(pair) for pair in zip(*ranks, strict=True)))
        ratios = [hand / own for hand, own in zip(taken["by hand"], taken["ours"], strict=True)]
        rows.append(
            {
                "GPT": f"{layers} blocks of {dim}, {microbatches} microbatches of 2 x 128",
                "step, s": f"{statistics.median(taken['ours']):.3f}",
                "by hand, s": f"{statistics.median(taken['by hand']):.3f}",
                "by hand / ours": f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--readme", action="store_true", help="write the tables into README.md")
    parser.add_argument("--bubble-only", action="store_true")
    parser.add_argument("--speed-only", action="store_true")
    options = parser.parse_args(arguments)
    tables: dict[str, list[dict[str, str]]] = {}
    if not options.speed_only:
        tables["pipeline_busy"] = measure_busy()
    if not options.bubble_only:
        tables["pipeline_speed"] = measure_speed(options.rounds, options.steps)
    for name, rows in tables.items():
        table = Table(*rows[0], title=machine())
        for row in rows:
            table.add_row(*row.values())
        Console(width=160).print(table)
        if options.readme:
            write_section(name, rows)
