"""Runs one scenario, an ordinary use of a Trainer, first under Lightning's own DDP and then under a sharded layout.

A scenario is a module-level function `scenario(make, *args)`: it calls `make(**trainer_settings)` for each Trainer it
needs and returns nested dicts and lists of numbers and tensors, which must be equal under both strategies.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch.distributed.tensor import DTensor

from lightning_4d import NDStrategy
from tests.pool import Pool

MakeTrainer = Callable[..., Trainer]
SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "precision": "64-true",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def trainer_with(strategy: Callable[[], Strategy] | str, **defaults: Any) -> MakeTrainer:
    """Return a function that makes a quiet CPU Trainer over all ranks of the task."""

    def make(**settings: Any) -> Trainer:
        chosen = strategy if isinstance(strategy, str) else strategy()
        devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return Trainer(strategy=chosen, devices=devices, **(SETTINGS | defaults | settings))

    return make


def sharded(replicate: int = 1, **kwargs: Any) -> MakeTrainer:
    """Trainers with NDStrategy: `replicate` copies, sharded over the ranks that remain."""
    return trainer_with(lambda: NDStrategy(data_parallel_replicate_size=replicate, **kwargs))


def both(scenario: Callable[..., Any], *args: Any, ddp: str = "ddp", replicate: int = 1) -> tuple[Any, Any]:
    """On one rank: what the scenario gives under DDP, and under NDStrategy."""
    quiet()
    results = []
    for name, make in (("ddp", trainer_with(ddp)), ("sharded", sharded(replicate))):
        folder = Path(name)  # the working directory is new and shared by all ranks
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        seed_everything(0, workers=True, verbose=False)
        results.append(scenario(make, *args))
        os.chdir("..")
    return results[0], results[1]


def check_same(
    pool: Pool, world: int, scenario: Callable[..., Any], *args: Any, rtol: float = 1e-10, **kwargs: Any
) -> list[Any]:
    """Compare the scenario rank by rank; return what each rank got under NDStrategy.

    `kwargs` are those of `both` and of `Pool.run`.
    """
    pairs = pool.run(world, both, scenario, *args, **kwargs)
    for rank, (expected, actual) in enumerate(pairs):
        assert expected, "a scenario that returns nothing shows nothing"
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=rtol, msg=lambda text, rank=rank: f"rank {rank}: {text}"
        )
    return [actual for _, actual in pairs]


def quiet() -> None:
    """Without Lightning's advice about workers; each rank is a process of its own, so nothing needs restoring."""
    import logging

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")


def whole_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full copies by name; all ranks must call."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in module.named_parameters()
    }


def numbers(metrics: Any) -> dict[str, float]:
    """Logged metrics as floats."""
    return {name: float(value) for name, value in metrics.items()}


def error_of(run: Callable[[], Any], kind: type[BaseException] = Exception) -> str:
    """The class name and message of what `run` raises."""
    try:
        run()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")
