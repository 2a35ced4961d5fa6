"""What MFUMonitor costs: the time of its hooks per step, as a share of the step, and that of one count.

One process, a small GPT on the CPU. Hooks are timed where the Trainer calls them, so that the noise of the steps, many
times what is measured, does not enter.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import defaultdict
from typing import Any

from lightning.pytorch import Callback, Trainer
from rich.console import Console
from rich.table import Table

from lightning_4d.callbacks import MFUMonitor
from tests.benchmarks.report import machine
from tests.modules import TinyGPT

HOOKS = ("on_train_batch_start", "on_train_batch_end")


class Timed(MFUMonitor):
    """Keeps how long its hooks took, by hook."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def on_train_batch_start(self, *args: Any) -> None:
        start = time.perf_counter()
        super().on_train_batch_start(*args)
        self.seconds["on_train_batch_start"].append(time.perf_counter() - start)

    def on_train_batch_end(self, *args: Any) -> None:
        start = time.perf_counter()
        super().on_train_batch_end(*args)
        self.seconds["on_train_batch_end"].append(time.perf_counter() - start)


class StepTimes(Callback):
    """Keeps how long whole steps took."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def median(self) -> float:
        """The median over the steps after the first five."""
        return statistics.median(b - a for a, b in zip(self.ends[5:], self.ends[6:]))


def main(options: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks mfu_monitor", description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="log_every_n_steps")
    chosen = parser.parse_args(options)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    monitor, steps = Timed(log_every_n_steps=chosen.every, peak_tflops=1.0), StepTimes()
    module = TinyGPT(dim=256, layers=4, heads=4, length=128, batch_size=8, samples=8 * chosen.steps)
    Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=chosen.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[monitor, steps],
    ).fit(module)
    Console().print(_table(monitor, steps, chosen.steps))


def _table(monitor: Timed, steps: StepTimes, count: int) -> Table:
    step = steps.median()
    table = Table("part", "ms per step", "share of a step", title=f"MFUMonitor, {count} steps; {machine()}")
    first = monitor.seconds["on_train_batch_start"][0]
    total = 0.0
    for hook in HOOKS:
        mean = statistics.fmean(monitor.seconds[hook][5:])
        total += mean
        table.add_row(hook, f"{1e3 * mean:.3f}", f"{mean / step:.2%}")
    table.add_row("both", f"{1e3 * total:.3f}", f"{total / step:.2%}")
    table.add_row("the step", f"{1e3 * step:.1f}", "100%")
    table.add_row("the count, once per batch shape", f"{1e3 * first:.0f} in all", "")
    return table
