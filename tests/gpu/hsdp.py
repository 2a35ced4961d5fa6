"""HSDPStrategy in bf16 at world size 1, against a plain FSDP2 loop: time and peak memory of a training step.

    python -m tests.gpu.hsdp                 # about 1B parameters on one GPU
    python -m tests.gpu.hsdp --tiny          # seconds on a CPU

Prints one JSON line per contender and a last one with the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from lightning_4d import HSDPStrategy
from tests.benchmarks.data_parallel import Benchmarked, language_model_loss

WARM_UP = 3


class Clock(Callback):
    """Notes the time after each step; waits for the device only then."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        """The median step time in seconds."""
        return statistics.median([b - a for a, b in zip(self.ends, self.ends[1:], strict=False)][WARM_UP - 1 :])


def by_strategy(model: Callable[[], Benchmarked], steps: int, precision: str, clock: Clock) -> None:
    """Train through the Trainer."""
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        strategy=HSDPStrategy(),
        precision=precision,
        max_steps=WARM_UP + steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(model())


def by_hand(model: Callable[[], Benchmarked], steps: int, precision: str, clock: Clock) -> None:
    """Train by a loop over FSDP2, with parameters in bf16 or gathered in bf16."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = model()
    if precision == "bf16-true":
        module = module.to(torch.bfloat16)
    dtype = torch.bfloat16 if precision.startswith("bf16") else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    mesh = init_device_mesh(device.type, (1,))
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = module.configure_optimizers()
    for _, batch in zip(range(WARM_UP + steps), endless(module), strict=False):
        loss = language_model_loss(module, [tensor.to(device) for tensor in batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.on_train_batch_end()


def endless(module: Benchmarked) -> Iterator[Any]:
    """The training batches, over and over."""
    loader = DataLoader(module.dataset("train"), batch_size=module.batch_size)
    while True:
        yield from loader


def measure(name: str, contender: Callable[..., None], *args: Any) -> dict[str, Any]:
    """Run one contender; return its median step time and peak memory."""
    seed_everything(0, verbose=False)
    clock = Clock()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    contender(*args, clock)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    result = {"contender": name, "step_seconds": round(clock.seconds(), 5), "peak_memory_gib": peak}
    print(json.dumps(result), flush=True)
    return result


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run both contenders in alternation; return the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--precision", default="bf16-true", choices=["bf16-true", "bf16-mixed", "32-true"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    steps = 2 if options.tiny else options.steps
    size = {"dim": 32, "heads": 4, "layers": 2, "length": 16, "vocab": 64, "batch_size": 2}
    if not options.tiny:  # 30 layers of 8 * 1792^2 and a vocabulary of 32,768: 0.89 billion parameters
        size = {"dim": 1792, "heads": 14, "layers": 30, "length": 1024, "vocab": 32768, "batch_size": 8}
    model = partial(Benchmarked, **size, samples=size["batch_size"] * (WARM_UP + steps))
    join_alone()
    results: dict[str, list[dict[str, Any]]] = {"HSDPStrategy": [], "plain FSDP2": []}
    for _ in range(1 if options.tiny else options.rounds):
        for name, contender in (("HSDPStrategy", by_strategy), ("plain FSDP2", by_hand)):
            results[name].append(measure(name, contender, model, steps, options.precision))
    mine, theirs = (min(r["step_seconds"] for r in results[n]) for n in ("HSDPStrategy", "plain FSDP2"))
    summary = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "precision": options.precision,
        "parameters": sum(p.numel() for p in model().parameters()) if options.tiny else None,
        "plain_over_ours": round(theirs / mine, 4),
    }
    print(json.dumps(summary), flush=True)
    return summary


def join_alone() -> None:
    """Make the process group that a launcher would make, of this process only."""
    if dist.is_initialized():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


if __name__ == "__main__":
    main()
