"""Let all ranks fail when one does, so that none waits for a rank that has given up."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch.distributed as dist

from lightning_4d.errors import CheckpointError


def raise_together(error: Exception | None) -> None:
    """Raise on every rank if ``error`` is not None on any: there itself, elsewhere a :class:`CheckpointError` about it.

    Also a barrier: no rank returns before all have called.

    Which ranks must call: all ranks of the job.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise CheckpointError(f"rank {rank} failed: {text}")


@contextlib.contextmanager
def one_process_allowed() -> Iterator[None]:
    """Without the warning of ``torch.distributed.checkpoint`` that one process saves or loads: it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
