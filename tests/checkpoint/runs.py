"""Fit, save, resume: what the checkpoint tests do on each rank, and what they compare."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_4d import NDStrategy

ADVICE = (
    "does not have many workers",
    "LeafSpec",
    "exists and is not empty",
    "callbacks used to create the checkpoint",
    "Using ModelCheckpoint with manual optimization",
)


def layout(replicate: int = 1, shard: int = 1, **kwargs: Any) -> NDStrategy:
    return NDStrategy(data_parallel_replicate_size=replicate, data_parallel_shard_size=shard, **kwargs)


def trainer(strategy: Any, *, checkpoint: ModelCheckpoint | None = None, callbacks: Any = (), **kwargs: Any) -> Trainer:
    """A quiet Trainer over the ranks of the pool, or one process outside it."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for advice in ADVICE:
        warnings.filterwarnings("ignore", message=f".*{advice}")
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "max_epochs": -1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "precision": "64-true",
    }
    return Trainer(
        strategy=strategy,
        callbacks=[*callbacks, *([checkpoint] if checkpoint else [])],
        enable_checkpointing=checkpoint is not None or any(isinstance(c, Checkpoint) for c in callbacks),
        **(settings | kwargs),
    )


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Full copies of tensors by name; all ranks call."""
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tensors.items()}
    return {k: v.detach().clone() for k, v in full.items()}


def states(fitted: Trainer) -> dict[str, Any]:
    """The whole state_dict, and every optimizer's state by name, whole; all ranks call."""
    module = fitted.lightning_module
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizers = [{names[p]: whole(values) for p, values in optimizer.state.items()} for optimizer in fitted.optimizers]
    groups = [
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in fitted.optimizers
    ]
    return {"state_dict": whole(module.state_dict()), "optimizers": optimizers, "groups": groups}


def fit(
    module: Callable[[], LightningModule],
    strategy: Any,
    steps: int,
    *,
    ckpt_path: str | Path | None = None,
    seed: int = 0,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> tuple[Trainer, LightningModule]:
    """Fit a new module in a new Trainer up to `steps` optimizer steps in all."""
    seed_everything(seed, verbose=False)
    fitted, built = trainer(strategy, max_steps=steps, **kwargs), module()
    fitted.fit(built, ckpt_path=ckpt_path, weights_only=weights_only)
    return fitted, built


def differences(actual: Any, expected: Any, rtol: float = 0.0, where: str = "") -> list[str]:
    """Where two nested structures of numbers and tensors differ; bit for bit with rtol=0."""
    if isinstance(expected, dict):
        if set(actual) != set(expected):
            return [f"{where}: keys differ in {sorted(map(str, set(actual) ^ set(expected)))}"]
        return [d for key in expected for d in differences(actual[key], expected[key], rtol, f"{where}.{key}")]
    if isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            return [f"{where}: {len(actual)} items, expected {len(expected)}"]
        pairs = enumerate(zip(actual, expected, strict=True))
        return [d for i, (a, e) in pairs for d in differences(a, e, rtol, f"{where}[{i}]")]
    if isinstance(expected, Tensor):
        same_kind = actual.shape == expected.shape and actual.dtype == expected.dtype
        if same_kind and (
            torch.equal(actual, expected) if rtol == 0 else torch.allclose(actual, expected, rtol, 1e-3 * rtol)
        ):
            return []
        return [f"{where}: {actual.flatten()[:3]}, expected {expected.flatten()[:3]}"]
    if isinstance(expected, float) and rtol:
        return [] if abs(actual - expected) <= rtol * abs(expected) else [f"{where}: {actual}, expected {expected}"]
    return [] if actual == expected else [f"{where}: {actual}, expected {expected}"]


def same(actual: Any, expected: Any, rtol: float = 0.0) -> None:
    found = differences(actual, expected, rtol)
    if found:
        raise AssertionError("\n".join(found[:20]))
