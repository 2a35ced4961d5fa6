"""Faults that are put in turn the comparisons red; failures on one rank reach all; Lightning's own folders load."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_4d.checkpoint import files, locate, save
from lightning_4d.errors import CheckpointError
from lightning_4d.strategies import random_state
from tests.checkpoint.modules import Portable
from tests.checkpoint.runs import fit, layout
from tests.checkpoint.test_layouts import check, write
from tests.checkpoint.test_resume import EVERY_2_STEPS, resumed_equals_straight
from tests.checkpoint.test_trainer import raised, saved


def other_ranks_rows(value: Any) -> Any:
    """What this rank would write if it took the other rank's part of an even tensor for its own."""
    if isinstance(value, dict):
        return {key: other_ranks_rows(item) for key, item in value.items()}
    if not isinstance(value, DTensor) or value.ndim == 0 or value.shape[0] % 2:
        return value
    rows = value.full_tensor().chunk(2)[1 - int(os.environ["RANK"])].clone()
    return DTensor.from_local(rows, value.device_mesh, value.placements)


def faults(folder: Path) -> None:
    write_tensors = save._write_tensors
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(save, "_write_tensors", lambda path, state: write_tensors(path, other_ranks_rows(state)))
        written = write(folder / "swapped", "two", layout(1, 2))
    with pytest.raises(AssertionError, match=r"discriminator|generator"):
        check(folder / "swapped" / "two.ckpt", "two", layout(2, 1), written)

    def without_one_key(path: Path, state: Any) -> None:
        del state["optimizer_0"]["state"]["scale"]["exp_avg_sq"]
        write_tensors(path, state)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(save, "_write_tensors", without_one_key)
        written = write(folder / "dropped", "portable", layout(1, 2))
    with pytest.raises((AssertionError, KeyError), match=r"exp_avg_sq"):
        check(folder / "dropped" / "portable.ckpt", "portable", layout(2, 1), written)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(random_state, "restore", lambda state: None)
        case = partial(resumed_equals_straight, save=EVERY_2_STEPS, module={}, strategy={})
        with pytest.raises(AssertionError, match=r"\[0\]\[2\]"):  # the first loss: its dropout
            case(folder / "random", (1, 2), 5)


def failures_on_one_rank(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    path = saved(folder)
    for victim, name in ((0, "_write_file"), (0, "_finish")):
        with pytest.MonkeyPatch.context() as patched:
            if rank == victim:
                patched.setattr(save, name, disk_full)
            message = raised(CheckpointError, saved, folder, steps=3)
            assert "No space left on device" in message
            assert "rank 0 failed" in message or rank == 0
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(os, "fsync", disk_full)
        message = raised(CheckpointError, saved, folder, steps=3)
        assert "No space left on device" in message
    assert locate(path) == path
    assert not files.partial(path).exists()
    resumed, _ = fit(Portable, layout(1, 2), 3, ckpt_path=path)
    assert resumed.global_step == 3
    single = partial(layout, 1, 2, save_distributed_checkpoint=False)
    with pytest.MonkeyPatch.context() as patched:
        if rank == 0:
            patched.setattr(save, "_write_file", disk_full)
        message = raised(CheckpointError, saved, folder / "file", strategy=single())
        assert "No space left on device" in message


def disk_full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


class ForLightning(Portable):
    """Sharded by hand, as Lightning's own strategy wants it."""

    def configure_model(self) -> None:
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def from_lightnings_own_folder(folder: Path) -> None:
    theirs = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    written = saved(folder, ForLightning, theirs(), precision="32-true")
    _, expected = fit(ForLightning, theirs(), 3, precision="32-true")
    resumed, module = fit(Portable, layout(1, 2), 3, ckpt_path=written, precision="32-true")
    assert resumed.global_step == 3
    assert module.trace[0][2] == pytest.approx(expected.trace[2][2], rel=1e-5)


def compiled(folder: Path) -> None:
    path = saved(folder, strategy=layout(1, 2, compile_blocks=True))
    fit(Portable, layout(2, 1), 3, ckpt_path=path)
    fit(Portable, layout(2, 1, compile_blocks=True), 3, ckpt_path=path)


def test_faults_are_noticed(pool, tmp_path):
    pool.run(2, faults, tmp_path)


def test_a_failure_on_one_rank_is_an_error_on_all(pool, tmp_path):
    pool.run(2, failures_on_one_rank, tmp_path)


def test_a_folder_of_lightnings_model_parallel_strategy_resumes(pool, tmp_path):
    pool.run(2, from_lightnings_own_folder, tmp_path)


@pytest.mark.slow
def test_names_are_the_same_with_compiled_blocks(pool, tmp_path):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}  # an earlier run may have left half a file
    pool.run(2, compiled, tmp_path, timeout=400, env=cache)
