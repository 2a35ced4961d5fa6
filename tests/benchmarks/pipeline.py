"""Pipeline stages: how busy ranks are under each schedule, and step time against a hand-written loop.

    python -m tests.benchmarks pipeline [--readme] [--bubble-only | --speed-only]

Busy: four stages whose blocks wait a fixed time, so that few cores do not distort it; the share of a step in which a
rank has work, beside that of the schedule's own actions without any cost of running them. Running and sending costs
milliseconds per action whatever blocks compute, so a stage's forward waits as long as stages of real models compute,
0.1 s, and the last column tells that cost itself, from the most microbatches. Speed: two stages of a GPT under 1F1B
against ``torch.distributed.pipelining`` driven by hand, in the same processes, one step of each after the other.
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
UNIT = 0.1  # seconds of a stage's forward, of its input gradient, and of its weight gradient
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
        self.scale = nn.Parameter(torch.ones(2))  # before the blocks, so that the first of them has an input gradient
        self.blocks = nn.ModuleList(Waiting(UNIT * STAGES / blocks) for _ in range(blocks))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        x = x * self.scale
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
    """On one rank: seconds of the shortest step, without the first two, which also check what they were given."""
    stages = STAGES * find_schedule(schedule).default_stages_per_rank
    steps, clock = 5, Clock()
    strategy = NDStrategy(
        pipeline_parallel_size=STAGES,
        pipeline_schedule=schedule,
        num_microbatches=microbatches,
        pipeline_split=list(range(stages)),
    )
    module = WaitingModule(stages, microbatches, steps)
    fit(module, strategy, STAGES, clock, max_epochs=1)
    return min(clock.seconds[2:])


def theory(schedule: str, microbatches: int) -> tuple[float, int]:
    """Which part of a step is work by the schedule's actions alone, and how many of them a rank has."""
    kind = find_schedule(schedule)
    stages = STAGES * kind.default_stages_per_rank
    one = {"forward": 1.0, "backward": 2.0, "input_gradient": 1.0, "weight_gradient": 1.0}
    spans = simulate(action_list(kind, STAGES, stages, microbatches), one)
    return efficiency(spans), len(spans) // STAGES


def measure_busy() -> list[dict[str, str]]:
    rows = []
    found: dict[str, list[tuple[int, float, float]]] = {}
    for schedule, counts in BUSY:
        cells, cost = {"schedule": schedule}, 0.0
        for count in track((1, 4, 8, 16), description=schedule, transient=True):
            if count not in counts or not find_schedule(schedule).allows_microbatches(count, STAGES):
                cells[f"{count} microbatches"] = "–"
                continue
            seconds, work = max(Pool().run(STAGES, busy, schedule, count, timeout=300)), 3 * UNIT * count
            expected, actions = theory(schedule, count)
            found.setdefault(schedule, []).append((count, work / seconds, expected))
            cells[f"{count} microbatches"] = f"{work / seconds:.1%} ({expected:.1%})"
            cost = (seconds - work / expected) / actions
        rows.append(cells | {"beyond theory, per action": f"{1e3 * cost:.1f} ms"})
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


class HandWritten:
    """The loop that one would write, on this rank: calling it runs one step."""

    def __init__(self, whole: TinyGPT, microbatches: int, split: int) -> None:
        self._rank = dist.get_rank()
        half = FirstHalf(whole, split) if self._rank == 0 else SecondHalf(whole, split)
        stage = PipelineStage(half, self._rank, 2, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, microbatches, loss_fn=_cross_entropy)
        self._optimizer = torch.optim.SGD(half.parameters(), lr=whole.lr)
        self._loader = iter(whole.train_dataloader())

    def __call__(self) -> None:
        (tokens_BT,) = next(self._loader)
        self._optimizer.zero_grad()
        if self._rank == 0:
            self._schedule.step(tokens_BT[:, :-1].contiguous())
        else:
            self._schedule.step(target=tokens_BT[:, 1:].contiguous())
        self._optimizer.step()


def _cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class Alternately(Callback):
    """After each step of the Trainer one of another loop; the duration of both, the Trainer's own work included."""

    def __init__(self, other: HandWritten) -> None:
        self._other, self._start = other, 0.0
        self.ours: list[float] = []
        self.by_hand: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ours.append(time.perf_counter() - self._start)
        dist.barrier()
        start = time.perf_counter()
        self._other()
        self.by_hand.append(time.perf_counter() - start)
        dist.barrier()
        self._start = time.perf_counter()


def pairs(
    model: partial[TinyGPT], microbatches: int, split: int, steps: int, *, ours_first: bool
) -> list[tuple[float, float]]:
    """On one rank: seconds of steps, ours and the one by hand that followed; the first three of each left out.

    What is made first in a process has the better memory, 1 to 2 % of a backward: ``ours_first`` says which it is.
    """
    torch.set_num_threads(1)  # a core for each
    seed_everything(0, verbose=False)
    first, second = model(), model()
    module, whole = (first, second) if ours_first else (second, first)
    alternately = Alternately(HandWritten(whole, microbatches, split))
    strategy = NDStrategy(
        pipeline_parallel_size=2, num_microbatches=microbatches, pipeline_split=[0, split], pipeline_schedule="1f1b"
    )
    fit(module, strategy, 2, alternately, max_steps=steps + 3)
    return list(zip(alternately.ours, alternately.by_hand, strict=True))[3:]


def measure_speed(rounds: int, steps: int) -> list[dict[str, str]]:
    rows = []
    for dim, layers, microbatches in ((256, 8, 4), (512, 8, 4)):
        batch = 2 * microbatches
        model = partial(
            Benchmarked, vocab=256, dim=dim, heads=8, layers=layers, length=128, batch_size=batch,
            samples=batch * (steps + 4),
        )  # fmt: skip
        rounds_of_pairs: list[list[tuple[float, float]]] = []
        for number in track(range(rounds), description=f"{dim}, {microbatches} microbatches", transient=True):
            ranks = Pool().run(
                2, pairs, model, microbatches, layers // 2, steps, ours_first=number % 2 == 0, timeout=600
            )
            rounds_of_pairs.append([(max(a[0], b[0]), max(a[1], b[1])) for a, b in zip(*ranks, strict=True)])
        both = [pair for found in rounds_of_pairs for pair in found]
        own, hand = zip(*both, strict=True)
        ratio = statistics.median(hand / own for own, hand in both)
        of_rounds = [statistics.median(hand / own for own, hand in found) for found in rounds_of_pairs]
        rows.append(
            {
                "GPT": f"{layers} blocks of {dim}, {microbatches} microbatches of 2 x 128",
                "step, s": f"{statistics.median(own):.3f}",
                "by hand, s": f"{statistics.median(hand):.3f}",
                "more a microbatch": f"{1e3 * statistics.median(a - b for a, b in both) / microbatches:.1f} ms",
                "by hand / ours": f"{ratio:.3f} ({min(of_rounds):.3f} to {max(of_rounds):.3f})",
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="even: which side is made first alternates")
    parser.add_argument("--steps", type=int, default=12)
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
