"""Callbacks, counters and copies of parameters are the same on every rank of any combination of axes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_4d import NDStrategy
from lightning_4d.callbacks.mfu_monitor import MFUMonitor
from tests.grid import GridGPT
from tests.harness import quiet
from tests.strategies.scenarios import quiet as no_advice

LAYOUTS = {
    "pp.cp": {"pipeline_parallel_size": 2, "context_parallel_size": 2},
    "pp.tp": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "cp.tp": {"context_parallel_size": 2, "tensor_parallel_size": 2},
}
THREE = {"pipeline_parallel_size": 2, "context_parallel_size": 2, "tensor_parallel_size": 2}


def fit(strategy: Any, model: Any = GridGPT, **settings: Any) -> Trainer:
    no_advice()
    with quiet():
        seed_everything(0, verbose=False)
        trainer = Trainer(
            accelerator="cpu",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            strategy=strategy,
            precision="64-true",
            **{
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "num_sanity_val_steps": 0,
                **settings,
            },
        )
        trainer.fit(model())
    return trainer


def nd(sizes: dict[str, int] | None) -> Any:
    return "auto" if sizes is None else NDStrategy(data_parallel_shard_size=1, **sizes)


def decisions(folder: Path, sizes: dict[str, int] | None) -> dict[str, Any]:
    """When training stops, and what the best checkpoint is, as this rank sees it."""
    stop = EarlyStopping("val_mean_loss", patience=1)
    save = ModelCheckpoint(folder, "{epoch}", monitor="val_mean_loss", save_top_k=1)
    trainer = fit(
        nd(sizes),
        partial(GridGPT, lr=4.0),  # soon worse
        max_epochs=8,
        limit_train_batches=2,
        limit_val_batches=2,
        callbacks=[stop, save],
        enable_checkpointing=True,
    )
    best = save.best_model_score
    assert best is not None
    return {
        "stopped": stop.stopped_epoch,
        "steps": trainer.global_step,
        "best": float(best),
        "path": save.best_model_path,
    }


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n == "pp.tp" else []) for n in LAYOUTS])
def test_callbacks_decide_as_on_one_process(pool, tmp_path, name):
    (expected,) = pool.run(1, decisions, tmp_path / "one", None)
    assert 0 < expected["stopped"] < 7
    for found in pool.run(4, decisions, tmp_path / "four", LAYOUTS[name]):
        assert {**found, "path": Path(found["path"]).name} == {
            **expected,
            "path": Path(expected["path"]).name,
            "best": pytest.approx(expected["best"], rel=1e-6),
        }


def throughput(sizes: dict[str, int] | None) -> dict[str, float]:
    """Samples and tokens of a step, by the monitor's rates."""
    trainer = fit(
        nd(sizes), max_steps=4, limit_val_batches=0, log_every_n_steps=1, callbacks=[MFUMonitor(warmup_steps=1)]
    )
    metrics = trainer.callback_metrics
    seconds = float(metrics["perf/step_seconds"])
    return {kind: float(metrics[f"perf/{kind}_per_second"]) * seconds for kind in ("samples", "tokens")}


def test_throughput_counts_samples_and_tokens_once(pool):
    for found in pool.run(8, throughput, THREE, timeout=240):
        assert found == {"samples": pytest.approx(4, rel=1e-4), "tokens": pytest.approx(4 * 13, rel=1e-4)}


def copies(sizes: dict[str, int]) -> dict[str, Tensor]:
    """What this rank holds of the norms, which tensor-parallel ranks hold alike, after steps with dropout."""
    trainer = fit(nd(sizes), partial(GridGPT, dropout=0.3, fused_qkv=False), max_steps=3, limit_val_batches=0)
    strategy: Any = trainer.strategy
    elsewhere = strategy.saved_elsewhere()
    named = trainer.lightning_module.named_parameters()
    own = {name: p.detach() for name, p in named if "norm" in name and name not in elsewhere}
    return {name: (p.to_local() if isinstance(p, DTensor) else p).clone() for name, p in own.items()}


@pytest.mark.parametrize("name", ["pp.tp", "cp.tp"])
def test_dropout_leaves_copies_of_parameters_equal(pool, name):
    """Ranks that share a layer draw the same masks for what they hold together, different ones for microbatches."""
    ranks = pool.run(4, copies, LAYOUTS[name])
    for first, second in ((0, 1), (2, 3)):  # tensor-parallel neighbours
        assert ranks[first].keys() == ranks[second].keys() != set()
        for key, value in ranks[first].items():
            assert torch.equal(value, ranks[second][key]), key
