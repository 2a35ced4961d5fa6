"""Make sure that ranks which divide the work on samples read the same batch: each computes a part for all of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.data.buffers import fingerprint
from lightning_4d.parallel.pipeline.batch import tensors_by_path
from lightning_4d.parallel.pipeline.randomness import seed_of

_FIRST, _EVERY = 2, 1000  # steps of each kind that are compared: the first ones, then now and then


class SameBatch:
    """Compares batches over the ranks of one group.

    Args:
        axis: ``"pipeline"``, ``"context-parallel"`` or ``"tensor-parallel"``; for messages.
        group: the ranks along it.
        device: where the group's backend communicates.
    """

    def __init__(self, axis: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self._axis = axis
        self._group = group
        self._device = device
        self._steps: Counter[str] = Counter()

    def check(self, step: str, batch: Any) -> None:
        """Compare the batch of a step with that of the other ranks, if it is this one's turn.

        Which ranks must call: all ranks of the group, in every step.

        Raises:
            UnsupportedError: on all ranks of the group, that they read different batches.
        """
        self._steps[step] += 1
        count = self._steps[step]
        if count > _FIRST and count % _EVERY:
            return
        mine = torch.tensor([digest(batch)], dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, mine, group=self._group)
        digests = [int(each) for each in everyone]
        if len(set(digests)) > 1:
            other = next(rank for rank, each in enumerate(digests) if each != digests[0])
            raise UnsupportedError(
                explain(
                    f"{self._axis} ranks 0 and {other} read different batches in call {count} of {step}",
                    "these ranks hold parts of one model, or of one sample, so they must read the same samples",
                    "let data and augmentation depend on trainer.strategy.data_parallel_rank, not on the global rank "
                    "or on unseeded random numbers",
                )
            )


def digest(batch: Any) -> int:
    """Return 63 bits that depend on keys, shapes, dtypes and values of a batch's tensors; waits for the device."""
    return seed_of(
        *((path, tuple(t.shape), t.dtype, fingerprint(t) if t.numel() else ()) for path, t in tensors_by_path(batch))
    )
