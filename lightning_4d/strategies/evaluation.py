"""Let data-parallel ranks evaluate different numbers of batches without waiting for each other for ever.

Gathering a block's parameters needs every rank. A rank that runs out of batches before others takes part in the
gathering of their remaining steps, and does nothing else in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

if TYPE_CHECKING:
    from lightning_4d.strategies.nd import NDStrategy


class EvaluationBalance:
    """Runs evaluation steps, and after a rank's last one joins the remaining steps of others.

    With loaders of known length the numbers of steps are compared once, at the start. Else each step is announced.
    """

    def __init__(self, strategy: NDStrategy) -> None:
        self._strategy = strategy
        self._local = 0.0
        self._most = 0.0
        self._steps = 0
        self._announce = False

    def start(self) -> None:
        """Compare the numbers of batches, and make buffers equal. Which ranks must call: all."""
        self._strategy.data.synchronize_buffers()
        self._steps = 0
        self._announce = False
        self._local = self._most = 0.0
        if self._strategy.data_parallel_size == 1:
            return
        self._local = float(sum(_loop(self._trainer).max_batches))
        counts = torch.tensor([self._local, -self._local], dtype=torch.float64, device=self._strategy.root_device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self._strategy.mesh.data_parallel_group)
        self._most = float(counts[0])
        self._announce = self._most == float("inf")
        if -float(counts[1]) == self._most and not self._announce:
            self._local = self._most = 0.0  # nothing to balance

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one evaluation step; after the last one of this rank, join what others still have."""
        data = self._strategy.data
        if self._announce:
            self._count_running(1)
            last = self._is_last_batch()
        else:
            self._steps += 1
            last = self._steps == self._local
        if not last:
            return data.run(step, *args, **kwargs)
        with data.record_gathers() as gathers:
            output = data.run(step, *args, **kwargs)
        if self._announce:
            while self._count_running(0):
                data.replay_gathers(gathers)
        else:
            for _ in range(int(self._most) - self._steps):
                data.replay_gathers(gathers)
        return output

    @property
    def _trainer(self) -> Trainer:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module.trainer

    def _is_last_batch(self) -> bool:
        return _loop(self._trainer).batch_progress.is_last_batch

    def _count_running(self, running: int) -> int:
        count = torch.tensor(running, device=self._strategy.root_device)
        dist.all_reduce(count, group=self._strategy.mesh.data_parallel_group)
        return int(count)


def _loop(trainer: Trainer) -> Any:
    return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
