"""TPStrategy against a hand-written parallelize_module loop with the ideal plan, on the model of the examples.

Two processes share each layer. The hand-written side changes what its kind of loop has to change: head counts, an
input layout for each attention and MLP, a loss on divided logits. Both sides run in the same processes, in turns, and
ratios are taken within a round. Collectives are counted on both sides in a run of their own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer, seed_everything
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from examples.train_gpt import GPT
from lightning_4d import TPStrategy
from tests.benchmarks.report import write_section
from tests.collectives import CollectiveCounter
from tests.harness import quiet
from tests.pool import Pool

SIZES = {"dim": 256, "n_layers": 4, "n_heads": 8}
LENGTH, BATCH, WARM_UP = 128, 4, 2


class Benchmarked(GPT):
    """The example's model and loss with plain AdamW, and no logging: both sides do the same work."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss_of(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def batches(count: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (count * BATCH, LENGTH + 1), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=BATCH)


def by_hand() -> nn.Module:
    """The model divided by hand, with one reduction of the gradient at each norm."""
    model = Benchmarked(**SIZES)
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    for index, block in enumerate(model.blocks):
        block.attention.n_heads //= size  # type: ignore[union-attr, operator]
        plan |= {f"blocks.{index}.attention": whole, f"blocks.{index}.mlp": whole}
        plan |= {f"blocks.{index}.attention.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"blocks.{index}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"blocks.{index}.{name}": RowwiseParallel() for name in ("attention.o_proj", "mlp.down_proj")}
    return parallelize_module(model, mesh, plan)


def run_by_hand(steps: int, count: bool) -> dict[str, Any]:
    seed_everything(0, verbose=False)
    model = by_hand()
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    divided = [p for p in model.parameters() if isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": divided}, {"params": plain}], lr=1e-3)
    clock = Clock(count)
    clock.begin()
    for batch in batches(steps):
        with loss_parallel():
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ended()
    return clock.result(model)


class Clock(Callback):
    """Notes how long each step takes, and counts collectives."""

    def __init__(self, count: bool) -> None:
        self._counter = CollectiveCounter() if count else None
        self._ends: list[float] = []
        self._used: list[float] = []  # processor seconds, which other work on the machine does not touch
        self._counts: list[Counter[str]] = []

    def begin(self) -> None:
        if self._counter is not None:
            self._counter.start()

    def on_train_start(self, *_: Any) -> None:
        self.begin()

    def on_train_batch_end(self, *_: Any) -> None:
        self.step_ended()

    def step_ended(self) -> None:
        self._ends.append(time.perf_counter())
        self._used.append(time.process_time())
        if self._counter is not None:
            self._counter.part()

    def result(self, model: nn.Module) -> dict[str, Any]:
        counts = self._counter.stop()[1] if self._counter is not None else Counter()
        local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        seconds = [b - a for a, b in zip(self._ends[WARM_UP - 1 : -1], self._ends[WARM_UP:])]
        return {
            "processor": statistics.median(b - a for a, b in zip(self._used[WARM_UP - 1 : -1], self._used[WARM_UP:])),
            "seconds": min(seconds, default=0.0),  # the least disturbed step
            "collectives": dict(counts),
            "parameters": sum(p.numel() for p in local),
        }


def run_strategy(steps: int, count: bool) -> dict[str, Any]:
    clock, model = Clock(count), Benchmarked(**SIZES)
    with quiet():
        seed_everything(0, verbose=False)
        trainer = Trainer(
            strategy=TPStrategy(),
            accelerator="cpu",
            devices=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 2,
            max_steps=steps,
            logger=False,
            callbacks=[clock],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, batches(steps))
    return clock.result(model)


def in_turns(rounds: int, steps: int) -> dict[str, Any]:
    """On each rank: counts of both sides, then their times in alternating order."""
    torch.set_num_threads(1)
    ours, theirs = run_strategy(3, True), run_by_hand(3, True)
    ratios, seconds, processor = [], [], []
    for index in range(rounds):
        order = (run_strategy, run_by_hand) if index % 2 == 0 else (run_by_hand, run_strategy)
        results = {run.__name__: run(steps, False) for run in order}
        times = {name: result["seconds"] for name, result in results.items()}
        processor.append(results["run_by_hand"]["processor"] / results["run_strategy"]["processor"])
        ratios.append(times["run_by_hand"] / times["run_strategy"])
        seconds.append((times["run_strategy"], times["run_by_hand"]))
    return {"ours": ours, "theirs": theirs, "ratios": ratios, "seconds": seconds, "processor": processor}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and put the table into README.md with --write."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks tensor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--write", action="store_true", help="into README.md")
    options = parser.parse_args(arguments)
    result = Pool().run(2, in_turns, options.rounds, options.steps, timeout=3600.0)[0]
    total = sum(p.numel() for p in Benchmarked(**SIZES).parameters())
    rows = []
    for name, key, column in (("TPStrategy", "ours", 0), ("parallelize_module by hand", "theirs", 1)):
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(result[key]["collectives"].items()))
        rows.append(
            {
                "tensor parallel over 2 processes": name,
                "step": f"{statistics.median(pair[column] for pair in result['seconds']) * 1000:.0f} ms",
                "collectives in a step": counts,
                "parameters on a rank": f"{result[key]['parameters'] / total:.3f} of all",
            }
        )
    ratio = statistics.median(result["ratios"])
    table = Table(*rows[0], title=f"speed of TPStrategy relative to the loop by hand: {ratio:.2f}")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
    for what, key in (("time", "ratios"), ("processor time", "processor")):
        Console().print(f"ratios of {what} by round: {', '.join(f'{r:.2f}' for r in result[key])}")
    if options.write:
        write_section("tensor", rows)


if __name__ == "__main__":
    main()
