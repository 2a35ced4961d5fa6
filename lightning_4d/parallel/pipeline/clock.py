"""Measure when a rank of a pipeline computes what, without waiting for its device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_4d.parallel.pipeline.timeline import Span


class Clock:
    """Times computations from its making on, in seconds; on CUDA by events, read at the end.

    Args:
        device: of the computations.
        rank: the pipeline rank.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._cuda = device.type == "cuda"
        self._rank = rank
        self._marks: list[tuple[Any, Any, str, int, int]] = []
        self._start = self._now()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, kind: str, microbatch: int, stage: int) -> Iterator[None]:
        """Time what runs inside."""
        start = self._now()
        yield
        self._marks.append((start, self._now(), kind, microbatch, stage))

    def spans(self) -> list[Span]:
        """Return what was timed; waits for the device."""
        return [
            Span(self._rank, self._seconds(start), self._seconds(end), kind, microbatch, stage)
            for start, end, kind, microbatch, stage in self._marks
        ]

    def _seconds(self, moment: Any) -> float:
        if not self._cuda:
            return moment - self._start
        moment.synchronize()
        return self._start.elapsed_time(moment) / 1000
