"""A checkpoint opens under every layout, and without us: same states, same next step (D1, D4)."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_4d.checkpoint import consolidate
from tests.checkpoint.modules import Portable, TwoOptimizers
from tests.checkpoint.runs import fit, layout, same, states

KINDS = {
    "portable": (Portable, "64-true"),  # tied, frozen, unused, 0-d, uneven, a buffer; two parameter groups
    "two": (TwoOptimizers, "64-true"),
    "bf16": (Portable, "bf16-true"),
}
STEP = 3  # of the checkpoint; two optimizers make two steps each time


class States(Callback):
    """What the Trainer holds when training starts and after each batch; all ranks take part."""

    def __init__(self) -> None:
        self.start: Any = None
        self.after: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = states(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.after.append(states(trainer))


def run(kind: str, strategy: Any, batches: int, **kwargs: Any) -> dict[str, Any]:
    """Train until `batches` batches in all; return the states before and after, and the losses."""
    module, precision = KINDS[kind]
    seen, steps = States(), batches * (2 if kind == "two" else 1)
    _, trained = fit(module, strategy, steps, callbacks=[seen], precision=precision, **kwargs)
    return {"start": seen.start, "after": seen.after, "losses": [loss for *_, loss in trained.trace]}


def write(folder: Path, kind: str, strategy: Any) -> dict[str, Any]:
    """Train 4 batches, a checkpoint after the third."""
    saver = ModelCheckpoint(folder, kind, every_n_train_steps=STEP * (2 if kind == "two" else 1), save_top_k=-1)
    return run(kind, strategy, STEP + 1, checkpoint=saver)


def check(path: Path, kind: str, strategy: Any, written: dict[str, Any]) -> None:
    """Resume from `path`: what was saved is there, and the next step is the one that followed."""
    warnings.filterwarnings("ignore", message=".*was written in mid-epoch by")
    resumed = run(kind, strategy, STEP + 1, ckpt_path=path)
    rtol = 1e-2 if kind == "bf16" else 1e-10
    assert len(resumed["losses"]) == 1
    same(resumed["start"], written["after"][STEP - 1])
    same(resumed["losses"], written["losses"][STEP:], rtol)
    same(resumed["after"][0], written["after"][STEP], rtol)


def across_layouts(folder: Path) -> dict[str, Any]:
    result = {}
    for kind in KINDS:
        result[kind] = write(folder, kind, layout(2, 2))
        for sizes in [(1, 4), (4, 1)]:
            check(folder / f"{kind}.ckpt", kind, layout(*sizes), result[kind])
        write(folder / "file", kind, layout(1, 4, save_distributed_checkpoint=False))
    return result


def on_one_process(folder: Path, written: dict[str, Any]) -> None:
    for kind in KINDS:
        single = folder / "consolidated" / f"{kind}.ckpt"
        consolidate(folder / f"{kind}.ckpt", single)
        for path in (folder / f"{kind}.ckpt", single, folder / "file" / f"{kind}.ckpt"):
            check(path, kind, layout(), written[kind])
        for path in (single, folder / "file" / f"{kind}.ckpt"):
            check(path, kind, "auto", written[kind])
        write(folder / "plain", kind, "auto")


def from_plain_lightning(folder: Path, written: dict[str, Any]) -> None:
    for kind in ("portable", "two"):
        path = folder / "plain" / f"{kind}.ckpt"
        check_closely = partial(check, path, kind, written=written[kind])
        for sizes in [(1, 2), (2, 1)]:
            check_closely(strategy=layout(*sizes, save_distributed_checkpoint=sizes == (1, 2)))
    write(folder / "ddp", "portable", "ddp_find_unused_parameters_true")
    check(folder / "ddp" / "portable.ckpt", "portable", layout(1, 2), written["portable"])


def test_d4_every_layout_one_process_and_plain_lightning(pool, tmp_path):
    written = pool.run(4, across_layouts, tmp_path)[0]
    expected = written["portable"]["after"][STEP - 1]
    assert "unused.weight" in expected["state_dict"]
    assert "unused.weight" not in expected["optimizers"][0]  # D1: it never had a gradient
    assert len(written["two"]["after"][0]["optimizers"]) == 2
    content = torch.load(tmp_path / "file" / "portable.ckpt", weights_only=True)
    same(content["state_dict"], expected["state_dict"], 1e-10)
    assert set(content["optimizer_states"][0]["state"]) <= set(range(12))
    pool.run(1, on_one_process, tmp_path, written)
    pool.run(2, from_plain_lightning, tmp_path, pool.run(1, plain, tmp_path)[0])


def plain(folder: Path) -> dict[str, Any]:
    return {kind: write(folder / "plain again", kind, "auto") for kind in ("portable", "two")}
