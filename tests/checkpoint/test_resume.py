"""Training that is resumed from a checkpoint equals training that was never interrupted, bit for bit (D3, D12)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.checkpoint.modules import Resumable
from tests.checkpoint.runs import fit, layout, same, states


def resumed_equals_straight(
    folder: Path, replicate: int, shard: int, every: int, *, total: int, options: dict[str, Any], **kwargs: Any
) -> dict[str, Any]:
    """Train `total` steps with a checkpoint each `every` steps, resume each in a new Trainer and module, compare."""
    checkpoint = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=every)
    module = partial(Resumable, **options)
    trainer, straight = fit(module, layout(replicate, shard), total, checkpoint=checkpoint, **kwargs)
    expected = states(trainer)
    for step in range(every, total, every):
        path = folder / f"step={step}.ckpt"
        assert path.is_dir()
        # Another seed: whatever is equal afterwards comes from the checkpoint.
        again, resumed = fit(module, layout(replicate, shard), total, ckpt_path=path, seed=1 + step, **kwargs)
        same(resumed.trace, [entry for entry in straight.trace if entry[0] >= step])
        same(states(again), expected)
    return {"trace": straight.trace, "names": list(expected["state_dict"])}


@pytest.mark.parametrize(("replicate", "shard"), [(1, 2), (2, 1)])
def test_d3_resume_equals_the_uninterrupted_run(pool, tmp_path, replicate, shard):
    # 24 samples, 2 ranks, batch 2: an epoch of 6 batches is 3 steps; steps 2, 4, 8 are mid-epoch, 6 is an end.
    ranks = pool.run(
        2, resumed_equals_straight, tmp_path, replicate, shard, 2, total=10, options={}, accumulate_grad_batches=2
    )
    seen = [index for rank in ranks for _, indices, _ in rank["trace"][:6] for index in indices]
    assert sorted(seen) == list(range(24))  # an epoch is every sample once
    assert ranks[0]["trace"] != ranks[1]["trace"]
    assert not [name for name in ranks[0]["names"] if name.startswith(("_", "module."))]


def test_d3_on_one_process(pool, tmp_path):
    pool.run(1, resumed_equals_straight, tmp_path, 1, 1, 2, total=15, options={"batch_size": 4})
