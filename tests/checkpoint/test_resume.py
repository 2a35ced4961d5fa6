"""Training that is resumed from a checkpoint equals training that was never interrupted, bit for bit (D3, D12)."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.checkpoint.modules import Resumable
from tests.checkpoint.runs import fit, layout, same, states


def resumed_equals_straight(
    folder: Path,
    sizes: tuple[int, int],
    total: int,
    *,
    save: dict[str, Any],
    module: dict[str, Any],
    strategy: dict[str, Any],
    only: tuple[int, ...] = (),
    **kwargs: Any,
) -> dict[str, Any]:
    """Train `total` steps; resume each checkpoint (or those of the steps `only`) in a new Trainer and module."""
    checkpoint = ModelCheckpoint(folder, "{step}", save_top_k=-1, **save)
    make = partial(Resumable, **module)
    trainer, straight = fit(make, layout(*sizes, **strategy), total, checkpoint=checkpoint, **kwargs)
    expected = states(trainer)
    total = trainer.global_step
    steps = sorted(int(path.stem.removeprefix("step=")) for path in folder.iterdir())
    for step in [s for s in steps if s < total and s in (only or steps)]:
        # Another seed: whatever is equal afterwards comes from the checkpoint.
        path = folder / f"step={step}.ckpt"
        again, resumed = fit(make, layout(*sizes, **strategy), total, ckpt_path=path, seed=1 + step, **kwargs)
        same(resumed.trace, [entry for entry in straight.trace if entry[0] >= step])
        same(states(again), expected)
    return {"trace": straight.trace, "names": list(expected["state_dict"]), "steps": steps}


EVERY_2_STEPS = {"every_n_train_steps": 2}


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((2, 1), marks=pytest.mark.slow)])
def test_d3_resume_equals_the_uninterrupted_run(pool, tmp_path, sizes):
    # 24 samples, 2 ranks, batch 2: an epoch of 6 batches is 3 steps; steps 2, 4, 8 are mid-epoch, 6 is an end.
    case = partial(resumed_equals_straight, save=EVERY_2_STEPS, module={}, strategy={})
    ranks = pool.run(2, case, tmp_path, sizes, 10, accumulate_grad_batches=2)
    assert ranks[0]["steps"] == [2, 4, 6, 8, 10]
    seen = [index for rank in ranks for _, indices, _ in rank["trace"][:6] for index in indices]
    assert sorted(seen) == list(range(24))  # an epoch is every sample once
    assert ranks[0]["trace"] != ranks[1]["trace"]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (1, 4), (4, 1)])
def test_d3_on_four_ranks(pool, tmp_path, sizes):
    case = partial(resumed_equals_straight, save=EVERY_2_STEPS, module={"size": 40}, strategy={})
    pool.run(4, case, tmp_path, sizes, 8)


def on_one_process(folder: Path) -> None:
    case = partial(resumed_equals_straight, sizes=(1, 1), strategy={})
    case(
        folder / "mid", total=14, save=EVERY_2_STEPS, module={"batch_size": 4}
    )  # a RandomSampler, no DistributedSampler
    workers = {"workers": 2, "shuffle": True}
    case(folder / "workers", total=24, save={"every_n_epochs": 1}, module=workers)


def test_d3_on_one_process(pool, tmp_path):
    pool.run(1, on_one_process, tmp_path, timeout=60)


def at_epoch_ends_and_as_files(folder: Path) -> None:
    case = partial(resumed_equals_straight, sizes=(1, 2), total=14, module={})
    validating = {"limit_val_batches": 2, "val_check_interval": 3}
    by_epochs = {"max_epochs": 3}
    case(folder / "steps", save={"save_on_train_epoch_end": True}, strategy={})
    case(folder / "epochs", save={"save_on_train_epoch_end": True}, strategy={}, total=-1, **by_epochs)
    case(folder / "last batch", save={"every_n_train_steps": 6}, strategy={}, total=-1, **by_epochs)
    case(folder / "validation", save={"monitor": "val_loss"}, strategy={}, **validating)
    case(folder / "file", save=EVERY_2_STEPS, strategy={"save_distributed_checkpoint": False}, only=(4, 6))


def test_d3_at_epoch_ends_after_validation_and_from_single_files(pool, tmp_path):
    pool.run(2, at_epoch_ends_and_as_files, tmp_path, timeout=60)


def position_with_workers(folder: Path) -> None:
    checkpoint = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=4)
    make = partial(Resumable, workers=2)
    _, straight = fit(make, layout(1, 2), 12, checkpoint=checkpoint)
    _, resumed = fit(make, layout(1, 2), 12, ckpt_path=folder / "step=8.ckpt", seed=1)
    expected = [indices for step, indices, _ in straight.trace if step >= 8]
    assert [indices for _, indices, _ in resumed.trace] == expected


def test_d12_workers_prefetch_and_no_sample_is_lost(pool, tmp_path):
    pool.run(2, position_with_workers, tmp_path)


def write(folder: Path) -> list[Any]:
    _, module = fit(Resumable, layout(1, 2), 8, checkpoint=ModelCheckpoint(folder, "{step}", every_n_train_steps=8))
    return module.trace


def resume_elsewhere(folder: Path) -> tuple[list[Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, module = fit(Resumable, layout(1, 1), 10, ckpt_path=folder / "step=8.ckpt")
    return module.trace, [str(w.message) for w in caught]


def test_d12_another_number_of_data_parallel_ranks_is_named(pool, tmp_path):
    pool.run(2, write, tmp_path)
    (trace, messages), *_ = pool.run(1, resume_elsewhere, tmp_path)
    assert [step for step, _, _ in trace] == [8, 9]
    said = [m for m in messages if "by 2 data-parallel ranks and is resumed by 1" in m]
    assert len(said) == 1
    (trace, messages), *_ = pool.run(1, resume_elsewhere_with_another_length, tmp_path)
    assert len([m for m in messages if "batches of a training DataLoader that now has" in m]) == 1


def resume_elsewhere_with_another_length(folder: Path) -> tuple[list[Any], list[str]]:
    fit(Resumable, layout(), 8, checkpoint=ModelCheckpoint(folder / "one", "{step}", every_n_train_steps=8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, module = fit(partial(Resumable, size=40), layout(), 10, ckpt_path=folder / "one" / "step=8.ckpt")
    return module.trace, [str(w.message) for w in caught]
