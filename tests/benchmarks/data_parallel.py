"""HSDPStrategy against a hand-written FSDP2 loop in plain torch, and against Lightning's ModelParallelStrategy.

Four processes, the same GPT, data, layout and optimizer. Every measured run gets fresh processes; contenders alternate
within a round, and ratios are taken within a round, so that a slow minute of the machine slows both sides.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from lightning_4d import HSDPStrategy
from tests.benchmarks.report import machine, write_section
from tests.collectives import CollectiveCounter
from tests.harness import quiet
from tests.modules import TinyGPT
from tests.pool import Pool

RANKS = 4
WARM_UP = 2  # optimizer steps that are run before those that are measured


@dataclass(frozen=True)
class Setting:
    """One configuration that all contenders run."""

    replicate: int
    shard: int
    accumulate: int
    steps: int
    model: partial[TinyGPT]

    @property
    def name(self) -> str:
        accumulated = f", accumulate {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.replicate} x {self.shard}{accumulated}"


@dataclass(frozen=True)
class Measurement:
    """What one rank saw."""

    step_seconds: list[float]
    peak_mib: float
    collectives: dict[str, int]


class Benchmarked(TinyGPT):
    """A GPT without metrics, so that the three contenders do the same work; AdamW, as users train."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return language_model_loss(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Sharded(Benchmarked):
    """The same with what Lightning's ModelParallelStrategy asks users to write."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


def language_model_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean cross-entropy of the next token; `batch` is a tuple of (B, T + 1) token ids."""
    (tokens_BT,) = batch
    logits_BTV = model(tokens_BT[:, :-1])
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


class Clock(Callback):
    """Notes when each optimizer step ended, and counts collectives."""

    def __init__(self, count: bool) -> None:
        self.ends: list[float] = []
        self._counter = CollectiveCounter() if count else None
        self.collectives: dict[str, int] = {}
        self._steps = 0

    def on_train_start(self, *_: Any) -> None:
        if self._counter is not None:
            self._counter.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > self._steps:
            self.step_ended()

    def step_ended(self) -> None:
        self._steps += 1
        self.ends.append(time.perf_counter())
        if self._counter is not None:
            self._counter.part()

    def on_train_end(self, *_: Any) -> None:
        if self._counter is not None:
            self.collectives = dict(self._counter.stop()[WARM_UP])


def ours(setting: Setting, count: bool) -> Measurement:
    strategy = HSDPStrategy(replicate_size=setting.replicate, shard_size=setting.shard)
    return by_trainer(strategy, Benchmarked, setting, count)


def lightnings(setting: Setting, count: bool) -> Measurement:
    strategy = ModelParallelStrategy(data_parallel_size=setting.shard, tensor_parallel_size=1)
    return by_trainer(strategy, Sharded, setting, count)


def by_trainer(strategy: Any, cls: type[TinyGPT], setting: Setting, count: bool) -> Measurement:
    clock = Clock(count)
    before = peak_mib()
    seed_everything(0, verbose=False)
    with quiet():
        fit(cls(**setting.model.keywords), strategy, setting, clock)
    return measurement(clock, before)


def fit(module: TinyGPT, strategy: Any, setting: Setting, clock: Clock) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=WARM_UP + setting.steps,
        accumulate_grad_batches=setting.accumulate,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(module)


def plain(setting: Setting, count: bool) -> Measurement:
    clock = Clock(count)
    before = peak_mib()
    torch.manual_seed(0)
    model = Benchmarked(**setting.model.keywords)
    mesh = init_device_mesh("cpu", (setting.replicate, setting.shard), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if setting.replicate > 1 else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = model.configure_optimizers()
    batches = endless(model)
    clock.on_train_start()
    for _ in range(WARM_UP + setting.steps):
        for micro in range(setting.accumulate):
            last = micro == setting.accumulate - 1
            model.set_requires_gradient_sync(last)
            loss = language_model_loss(model, next(batches))
            if micro == 0:
                optimizer.zero_grad()
            (loss / setting.accumulate).backward()
        optimizer.step()
        clock.step_ended()
    clock.on_train_end()
    return measurement(clock, before)


def endless(model: TinyGPT) -> Iterator[Any]:
    dataset = model.dataset("train")
    loader = DataLoader(dataset, batch_size=model.batch_size, sampler=DistributedSampler(dataset, shuffle=False))
    while True:
        yield from loader


def measurement(clock: Clock, before: float) -> Measurement:
    seconds = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)][WARM_UP - 1 :]
    return Measurement(seconds, peak_mib() - before, clock.collectives)


def peak_mib() -> float:
    """Peak resident memory of this process so far, in MiB (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


Contender = Callable[[Setting, bool], Measurement]


def run(contender: Contender, setting: Setting, count: bool = False) -> list[Measurement]:
    return Pool().run(RANKS, contender, setting, count, timeout=900)  # fresh processes at each call


def compare(setting: Setting, contenders: dict[str, Contender], rounds: int) -> list[dict[str, str]]:
    small = Setting(
        setting.replicate, setting.shard, setting.accumulate, 2, partial(Benchmarked, layers=4, samples=400)
    )
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    memory: dict[str, float] = {}
    order = [(r, name) for r in range(rounds) for name in rotated(list(contenders), r)]
    for _, name in track(order, description=setting.name, transient=True):
        found = run(contenders[name], setting)
        seconds[name].append(statistics.median(found[0].step_seconds))
        memory[name] = max(memory.get(name, 0.0), *(m.peak_mib for m in found))
    rows = []
    for name, contender in contenders.items():
        counts = run(contender, small, count=True)[0].collectives
        ratio = [theirs / mine for mine, theirs in zip(seconds["lightning_4d"], seconds[name], strict=True)]
        rows.append(
            {
                "layout (replicate x shard)": setting.name,
                "contender": name,
                "step, s": f"{statistics.median(seconds[name]):.3f}",
                "its step / ours": f"{statistics.median(ratio):.3f} ({min(ratio):.3f} to {max(ratio):.3f})",
                "peak memory, MiB": f"{memory[name]:.0f}",
                "collectives per optimizer step": ", ".join(f"{n} {c}" for n, c in sorted(counts.items())),
            }
        )
    return rows


def rotated(names: list[str], by: int) -> list[str]:
    return names[by % len(names) :] + names[: by % len(names)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dim", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    options = parser.parse_args(arguments)
    model = partial(
        Benchmarked,
        vocab=256,
        dim=options.dim,
        heads=8,
        layers=options.layers,
        length=options.length,
        batch_size=options.batch_size,
        samples=RANKS * options.batch_size * 4 * (WARM_UP + options.steps),
    )
    all_three: dict[str, Contender] = {"lightning_4d": ours, "plain torch FSDP2": plain, "Lightning": lightnings}
    two = {name: all_three[name] for name in ("lightning_4d", "plain torch FSDP2")}
    rows = [
        *compare(Setting(1, 4, 1, options.steps, model), all_three, options.rounds),
        *compare(Setting(1, 4, 4, max(2, options.steps // 2), model), all_three, options.rounds),
        *compare(Setting(2, 2, 1, options.steps, model), two, options.rounds),
    ]
    table = Table(*rows[0], title=machine())
    for row in rows:
        table.add_row(*row.values())
    Console(width=200).print(table)
    if options.readme:
        write_section("data_parallel", rows)
