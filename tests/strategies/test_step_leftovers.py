"""What a training step leaves in memory: nothing but parameters, gradients and optimizer states, however many run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_4d import NDStrategy
from tests.rehearsal.runs import module
from tests.strategies.scenarios import quiet, trainer_with


class Counting(Callback):
    """Counts the tensors that exist after each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        gc.collect()
        self.counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))


def counts_of(precision: str, **strategy: Any) -> list[int]:
    quiet()
    counting = Counting()
    settings = {"max_steps": 7, "limit_val_batches": 0, "precision": precision, "callbacks": [counting]}
    trainer_with(lambda: NDStrategy(**strategy), **settings)().fit(module())
    return counting.counts


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "strategy",
    [
        {"data_parallel_shard_size": 2},
        {"tensor_parallel_size": 2, "data_parallel_shard_size": 1},
        {"tensor_parallel_size": 2, "data_parallel_shard_size": 1, "sequence_parallel": True},
        {"context_parallel_size": 2, "data_parallel_shard_size": 1},
        {"pipeline_parallel_size": 2, "data_parallel_shard_size": 1},
    ],
    ids=["dp", "tp", "sequence", "cp", "pp"],
)
def test_steps_leave_nothing_behind(pool, precision, strategy):
    for counts in pool.run(2, counts_of, precision, **strategy):
        assert len(counts) == 7
        # gloo's own thread lets go of a received tensor a moment after its receiver has it, so one count may be higher;
        # what stays behind makes every later one higher.
        assert min(counts[4:]) <= counts[3], counts
