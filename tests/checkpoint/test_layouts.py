"""A checkpoint opens under every layout, and without us: same states, same next step (D1, D4)."""

from __future__ import annotations

import warnings
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
    # A plain Trainer with 64-true loads into a float32 module, which it converts afterwards.
    rtol = 1e-2 if kind == "bf16" else 1e-5 if strategy == "auto" else 1e-10
    assert len(resumed["losses"]) == 1
    same(resumed["start"], written["after"][STEP - 1], 1e-6 if strategy == "auto" else 0.0)
    same(resumed["losses"], written["losses"][STEP:], rtol)
    same(resumed["after"][0], written["after"][STEP], rtol)


def across_layouts(folder: Path) -> dict[str, Any]:
    written = {}
    for kind in KINDS:
        written[kind] = write(folder, kind, layout(2, 2))
        for sizes in [(1, 4), (4, 1)][: 1 if kind == "bf16" else 2]:
            check(folder / f"{kind}.ckpt", kind, layout(*sizes), written[kind])
        written[f"{kind} file"] = write(folder / "file", kind, layout(1, 4, save_distributed_checkpoint=False))
    return written


def on_one_process(folder: Path, written: dict[str, Any]) -> dict[str, Any]:
    by_plain = {}
    for kind in KINDS:
        consolidated, single = folder / "consolidated" / f"{kind}.ckpt", folder / "file" / f"{kind}.ckpt"
        consolidate(folder / f"{kind}.ckpt", consolidated)
        check(folder / f"{kind}.ckpt", kind, layout(), written[kind])
        for plain in (False, True):
            check(consolidated, kind, "auto" if plain else layout(), written[kind])
            check(single, kind, "auto" if plain else layout(), written[f"{kind} file"])
        by_plain[kind] = write(folder / "plain", kind, "auto")
    return by_plain


def from_plain_lightning(folder: Path, plain: dict[str, Any]) -> None:
    check(folder / "plain" / "portable.ckpt", "portable", layout(1, 2), plain["portable"])
    check(folder / "plain" / "two.ckpt", "two", layout(2, 1, save_distributed_checkpoint=False), plain["two"])
    written = write(folder / "ddp", "portable", "ddp_find_unused_parameters_true")
    check(folder / "ddp" / "portable.ckpt", "portable", layout(1, 2), written)


def test_d4_every_layout_one_process_and_plain_lightning(pool, tmp_path):
    written = pool.run(4, across_layouts, tmp_path)[0]
    expected = written["portable file"]["after"][STEP - 1]
    assert "unused.weight" in expected["state_dict"]
    assert "unused.weight" not in expected["optimizers"][0]  # D1: it never had a gradient
    assert len(written["two"]["after"][0]["optimizers"]) == 2
    content = torch.load(tmp_path / "file" / "portable.ckpt", weights_only=True)
    same(content["state_dict"], expected["state_dict"])
    names = set(expected["state_dict"])
    assert {"input.weight", "output.weight", "frozen.weight", "scale", "seen", "layers.0.linear.bias"} <= names
    plain = pool.run(1, on_one_process, tmp_path, written)[0]
    pool.run(2, from_plain_lightning, tmp_path, plain)
