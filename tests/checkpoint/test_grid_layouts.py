"""A checkpoint written under any layout opens under any other, optimizer state included, and training goes on."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from lightning_4d import NDStrategy
from lightning_4d.checkpoint import consolidate
from tests.checkpoint.runs import fit, same
from tests.grid import GridGPT

ROWS, STEP = 8, 2  # samples of all data-parallel ranks together; optimizer steps before the checkpoint
LAYOUTS: dict[str, dict[str, int]] = {
    "dp4": {"data_parallel_shard_size": 4},
    "dp2x2": {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 2},
    "pp2.dp2": {"pipeline_parallel_size": 2, "data_parallel_shard_size": 2},
    "pp2.cp2": {"pipeline_parallel_size": 2, "context_parallel_size": 2},
    "pp2.tp2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "dp2.cp2": {"data_parallel_shard_size": 2, "context_parallel_size": 2},
    "dp2.tp2": {"data_parallel_shard_size": 2, "tensor_parallel_size": 2},
    "cp2.tp2": {"context_parallel_size": 2, "tensor_parallel_size": 2},
}
PAIRS = [pair for pair in itertools.product(LAYOUTS, LAYOUTS) if pair[0] != pair[1]]
# Each is written and each is opened, twice, in other neighbourhoods.
NEAR = [(a, b) for a, b in PAIRS if (list(LAYOUTS).index(b) - list(LAYOUTS).index(a)) % len(LAYOUTS) in (3, 5)]


class Momentum(GridGPT):
    """Tied weights, and an optimizer with a state; each layout trains on the same samples in each step."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(tied=True, batch_size=batch_size)
        self.seen: list[float] = []  # mean over data-parallel ranks of each step's loss

    def train_dataloader(self) -> DataLoader:
        """In order whatever the number of ranks: the samplers that Lightning inserts shuffle."""
        data = self.dataset("train")
        kwargs = self.trainer.strategy.distributed_sampler_kwargs
        return DataLoader(data, self.batch_size, sampler=DistributedSampler(data, shuffle=False, **kwargs))

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")))


def strategy(sizes: dict[str, int], **options: Any) -> NDStrategy:
    return NDStrategy(**{"data_parallel_shard_size": 1, **sizes}, **options)


def run(sizes: dict[str, int], steps: int, **kwargs: Any) -> list[float]:
    warnings.filterwarnings("error", message=".*was written in mid-epoch by")  # the data goes on where it was
    options = kwargs.pop("options", {})
    data = sizes.get("data_parallel_replicate_size", 1) * sizes.get("data_parallel_shard_size", 1)
    settings = {"use_distributed_sampler": False, **kwargs}
    _, trained = fit(partial(Momentum, ROWS // data), strategy(sizes, **options), steps, **settings)
    return trained.seen


def write_all(folder: Path, names: list[str]) -> None:
    for name in names:
        saver = ModelCheckpoint(folder, name, every_n_train_steps=STEP, save_top_k=-1)
        run(LAYOUTS[name], STEP, checkpoint=saver)


def open_all(folder: Path, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[float]]:
    return {(a, b): run(LAYOUTS[b], STEP + 2, ckpt_path=folder / f"{a}.ckpt") for a, b in pairs}


def uninterrupted() -> list[float]:
    return run({}, STEP + 2)


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    pool.run(4, write_all, folder, list(LAYOUTS), timeout=400)
    return folder


@pytest.fixture(scope="module")
def expected(pool):
    return pool.run(1, uninterrupted)[0]


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(NEAR, id="near"),
        pytest.param([pair for pair in PAIRS if pair not in NEAR], id="all", marks=pytest.mark.slow),
    ],
)
def test_opens_under_another_layout_and_goes_on(pool, written, expected, pairs):
    for found in pool.run(4, open_all, written, pairs, timeout=60 + 20 * len(pairs)):
        for pair, seen in found.items():
            same(seen, expected[STEP:], 1e-9)
            assert len(seen) == 2, pair


def four_axes(folder: Path, expected: list[float]) -> None:
    """On eight ranks: three axes at once, from and to a layout of another kind."""
    sizes = {"pipeline_parallel_size": 2, "context_parallel_size": 2, "tensor_parallel_size": 2}
    same(run(sizes, STEP + 2, ckpt_path=folder / "dp4.ckpt"), expected[STEP:], 1e-9)
    saver = ModelCheckpoint(folder, "eight", every_n_train_steps=STEP, save_top_k=-1)
    run(sizes, STEP, checkpoint=saver)
    other = {"data_parallel_shard_size": 4, "tensor_parallel_size": 2}
    same(run(other, STEP + 2, ckpt_path=folder / "eight.ckpt"), expected[STEP:], 1e-9)
    single = ModelCheckpoint(folder / "file", "eight", every_n_train_steps=STEP, save_top_k=-1)
    run(sizes, STEP, checkpoint=single, options={"save_distributed_checkpoint": False})


def weights_of_one_process(folder: Path) -> None:
    saver = ModelCheckpoint(folder / "one", "one", every_n_train_steps=STEP, save_top_k=-1)
    run({}, STEP, checkpoint=saver, options={"save_distributed_checkpoint": False})


def test_files_hold_the_state_dict_of_one_process(pool, written, expected):
    pool.run(8, four_axes, written, expected, timeout=400)
    pool.run(1, weights_of_one_process, written)
    whole = torch.load(written / "one" / "one.ckpt", weights_only=True)
    consolidate(written / "eight.ckpt", written / "whole.ckpt")
    for path in (written / "whole.ckpt", written / "file" / "eight.ckpt"):
        found = torch.load(path, weights_only=True)
        same(found["state_dict"], whole["state_dict"], 1e-9)
        same(found["optimizer_states"], whole["optimizer_states"], 1e-9)
