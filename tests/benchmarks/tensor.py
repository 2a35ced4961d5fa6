"""TPStrategy against a hand-written parallelize_module loop with the ideal plan, on the model of the examples.

Two processes share each layer. The hand-written side changes what its kind of loop has to change: head counts, an
input layout for each attention and MLP, a loss on divided logits. Both sides run in the same processes, in turns, and
ratios are taken within a round. Collectives and their bytes are counted on both sides in a run of their own. A second
table holds the bytes that one rank keeps of parameters, gradients, optimizer states and activations of blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer, seed_everything
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from lightning_4d import NDStrategy, TPStrategy
from tests.benchmarks.report import write_section
from tests.collectives import CollectiveBytes
from tests.harness import quiet
from tests.parallel.tensor.memory import KINDS, Held, held
from tests.pool import Pool

SIZES = {"dim": 256, "n_layers": 4, "n_heads": 8}
LENGTH, BATCH, WARM_UP = 128, 4, 2
COUNTED = 4  # steps of a run that counts: the first two also compare the ranks' batches


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


def by_hand(mesh: DeviceMesh | None = None) -> nn.Module:
    """The model divided by hand over ``mesh``, or all ranks, with one reduction of the gradient at each norm."""
    model = Benchmarked(**SIZES)
    if mesh is None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    size = mesh.size()
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
    for batch in batches(steps):
        clock.step_begins()
        with loss_parallel():
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ended()
    return clock.result(model)


class Clock(Callback):
    """Notes how long each step takes; or counts collectives and their bytes, of the last step."""

    def __init__(self, count: bool) -> None:
        self._counts = count
        self._counter = CollectiveBytes()
        self._ends: list[float] = []
        self._used: list[float] = []  # processor seconds, which other work on the machine does not touch

    def step_begins(self) -> None:
        if self._counts:
            self._counter = CollectiveBytes()
            self._counter.__enter__()

    def on_train_batch_start(self, *_: Any) -> None:
        self.step_begins()

    def on_train_batch_end(self, *_: Any) -> None:
        self.step_ended()

    def step_ended(self) -> None:
        self._ends.append(time.perf_counter())
        self._used.append(time.process_time())
        if self._counts:
            self._counter.__exit__(None, None, None)

    def result(self, model: nn.Module) -> dict[str, Any]:
        local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        seconds = [b - a for a, b in zip(self._ends[WARM_UP - 1 : -1], self._ends[WARM_UP:])]
        processor = [b - a for a, b in zip(self._used[WARM_UP - 1 : -1], self._used[WARM_UP:])]
        return {
            "processor": statistics.median(processor) if processor else 0.0,
            "seconds": min(seconds, default=0.0),  # the least disturbed step
            "collectives": dict(self._counter.counts),
            "bytes": dict(self._counter.bytes),
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
    ours, theirs = run_strategy(COUNTED, True), run_by_hand(COUNTED, True)
    ratios, seconds, processor = [], [], []
    for index in range(rounds):
        order = (run_strategy, run_by_hand) if index % 2 == 0 else (run_by_hand, run_strategy)
        results = {run.__name__: run(steps, False) for run in order}
        times = {name: result["seconds"] for name, result in results.items()}
        processor.append(results["run_by_hand"]["processor"] / results["run_strategy"]["processor"])
        ratios.append(times["run_by_hand"] / times["run_strategy"])
        seconds.append((times["run_strategy"], times["run_by_hand"]))
    return {"ours": ours, "theirs": theirs, "ratios": ratios, "seconds": seconds, "processor": processor}


def compared(result: dict[str, Any]) -> list[dict[str, str]]:
    """The rows on speed and communication."""
    total = sum(p.numel() for p in Benchmarked(**SIZES).parameters())
    rows = []
    for name, key, column in (("TPStrategy", "ours", 0), ("parallelize_module by hand", "theirs", 1)):
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(result[key]["collectives"].items()))
        rows.append(
            {
                "tensor parallel over 2 processes": name,
                "step": f"{statistics.median(pair[column] for pair in result['seconds']) * 1000:.0f} ms",
                "collectives in a step": counts,
                "their bytes": f"{sum(result[key]['bytes'].values()):,}",
                "parameters on a rank": f"{result[key]['parameters'] / total:.3f} of all",
            }
        )
    return rows


def memory_rows(pool: Pool) -> list[dict[str, str]]:
    """What a rank holds under 1, 2 and 4 ranks, and with the residual stream in parts too."""
    cases = [(1, False), (2, False), (4, False), (2, True), (4, True)]
    model, rows = partial(GPT, **SIZES), []
    whole: Held | None = None
    for tp, sequence in cases:
        strategy = partial(NDStrategy, tensor_parallel_size=tp, sequence_parallel=sequence)
        mine = pool.run(tp, held, model, strategy, LENGTH, BATCH, timeout=600.0)[0]
        whole = mine if whole is None else whole
        divided = {name for name in whole.tensors["parameters"] if "norm" not in name}
        row = {"ranks": f"{tp}, sequence parallel" if sequence else str(tp)}
        for kind in KINDS:
            row[kind] = shares(mine.of(kind, divided), whole.of(kind, divided), tp)
        row["activations inside attention and MLP"] = shares(mine.inside, whole.inside, tp)
        row["activations between them"] = mebibytes(mine.between)
        rows.append(row)
    return rows


def shares(bytes_: int, whole: int, ranks: int) -> str:
    """Bytes, and how far they are from an equal share."""
    return f"{mebibytes(bytes_)} ({100 * (bytes_ * ranks / whole - 1):+.1f} %)"


def mebibytes(bytes_: int) -> str:
    return f"{bytes_ / 2**20:.2f} MiB"


def show(title: str, rows: list[dict[str, str]]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and put the tables into README.md with --write."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks tensor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=["speed", "memory"], help="measure one of the two")
    parser.add_argument("--write", action="store_true", help="into README.md")
    options = parser.parse_args(arguments)
    pool = Pool()
    if options.only != "speed":
        rows = memory_rows(pool)
        show("bytes of divided tensors on a rank, and how far from an equal share", rows)
        if options.write:
            write_section("tensor_memory", rows)
    if options.only != "memory":
        result = pool.run(2, in_turns, options.rounds, options.steps, timeout=3600.0)[0]
        rows, ratio = compared(result), statistics.median(result["ratios"])
        show(f"speed of TPStrategy relative to the loop by hand: {ratio:.2f}", rows)
        for what, key in (("time", "ratios"), ("processor time", "processor")):
            Console().print(f"ratios of {what} by round: {', '.join(f'{r:.2f}' for r in result[key])}")
        if options.write:
            write_section("tensor", rows)


if __name__ == "__main__":
    main()
