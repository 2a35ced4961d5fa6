"""A checkpoint of tensor-parallel ranks holds the whole model: it opens under every layout, and on one process (D4)."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD

from lightning_4d import NDStrategy
from lightning_4d.checkpoint import consolidate
from tests.checkpoint.runs import fit, same, states
from tests.checkpoint.test_layouts import States
from tests.modules import TinyGPT

STEP = 2


class Fused(TinyGPT):
    """One weight and one bias for queries, keys and values; a tied vocabulary; momentum."""

    def __init__(self) -> None:
        super().__init__(vocab=32, layers=2, tied=True)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def strategy(tp: int, dp: int = 1, **kwargs: Any) -> NDStrategy:
    return NDStrategy(data_parallel_shard_size=dp, tensor_parallel_size=tp, **kwargs)


def run(chosen: Any, **kwargs: Any) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message=".*was written in mid-epoch by")
    seen = States()
    fitted, _ = fit(Fused, chosen, STEP + 1, callbacks=[seen], **kwargs)
    return {"start": seen.start, "after": seen.after, "end": states(fitted)}


def write(folder: Path, chosen: Any) -> dict[str, Any]:
    return run(chosen, checkpoint=ModelCheckpoint(folder, "last", every_n_train_steps=STEP, save_top_k=-1))


def write_and_read(folder: Path) -> dict[str, Any]:
    """Each rank: write under tp 2 x dp 2, read under the same and under two others."""
    written = write(folder / "folder", strategy(2, 2))
    for tp, dp in ((2, 2), (4, 1), (1, 4)):
        resumed = run(strategy(tp, dp), ckpt_path=folder / "folder" / "last.ckpt")
        same(resumed["start"], written["after"][STEP - 1])
        if dp == 2:
            same(resumed["end"], written["end"], 1e-10)
    single = write(folder / "file", strategy(4, save_distributed_checkpoint=False))
    resumed = run(strategy(2, 2), ckpt_path=folder / "file" / "last.ckpt")
    same(resumed["start"], single["after"][STEP - 1])
    return {"folder": written, "file": single}


def read_on_one(folder: Path, written: dict[str, Any]) -> None:
    same(run(strategy(1), ckpt_path=folder / "folder" / "last.ckpt")["start"], written["folder"]["after"][STEP - 1])
    consolidate(folder / "folder" / "last.ckpt", folder / "whole.ckpt")
    for path, kind in ((folder / "whole.ckpt", "folder"), (folder / "file" / "last.ckpt", "file")):
        same(run("auto", ckpt_path=path)["start"], written[kind]["after"][STEP - 1], 1e-6)


def test_tensor_parallel_checkpoints_hold_whole_tensors(pool, tmp_path):
    written = pool.run(4, write_and_read, tmp_path)[0]
    pool.run(1, read_on_one, tmp_path, written)
    content = torch.load(tmp_path / "file" / "last.ckpt", weights_only=True)["state_dict"]
    expected = {name: tensor.shape for name, tensor in Fused().state_dict().items()}
    assert {name: tensor.shape for name, tensor in content.items()} == expected
    # The numbers are those of one process that trains on the same batches, not only consistent with themselves.
    alone = pool.run(1, partial(run, "auto"))[0]
    same(content, alone["after"][STEP - 1]["state_dict"], 1e-9)
