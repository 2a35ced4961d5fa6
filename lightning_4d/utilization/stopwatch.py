"""Time what a device does, without making the host wait for it: CUDA events, read later; the host's clock elsewhere."""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = Any  # a torch.cuda.Event, or seconds
_OPEN_INTERVALS = 256  # events kept before finished ones are added up


class Stopwatch:
    """Adds up intervals between :meth:`start` and :meth:`stop`, as the device goes through them.

    On CUDA an interval ends when all work queued before its end is done, and starts likewise; so what is timed between
    two points at which the host does nothing but fetch data is how long the device was idle because of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._opened: Mark | None = None
        self._intervals: list[tuple[Mark, Mark]] = []
        self._seconds = 0.0

    def mark(self) -> Mark:
        """Return the present point in the device's work."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def is_running(self) -> bool:
        """Whether an interval is open."""
        return self._opened is not None

    def start(self, at: Mark | None = None) -> None:
        """Open an interval, unless one is open."""
        if self._opened is None:
            self._opened = self.mark() if at is None else at

    def stop(self, at: Mark | None = None) -> None:
        """Close the open interval, if there is one, now or at an earlier mark."""
        if self._opened is None:
            return
        self._intervals.append((self._opened, self.mark() if at is None else at))
        self._opened = None
        if len(self._intervals) > _OPEN_INTERVALS:
            self._add_finished()

    def reset(self) -> None:
        """Forget all intervals, the open one too."""
        self._opened, self._intervals, self._seconds = None, [], 0.0

    def seconds(self) -> float:
        """Return the sum of the closed intervals; waits until the device has reached the end of the last."""
        if self._intervals and self._device.type == "cuda":
            self._intervals[-1][1].synchronize()
        elif self._device.type not in ("cpu", "cuda", "meta"):
            torch.accelerator.synchronize(self._device)
        self._add_finished()
        return self._seconds

    def _add_finished(self) -> None:
        left = []
        for start, end in self._intervals:
            if isinstance(end, float):
                self._seconds += max(0.0, end - start)
            elif end.query():
                self._seconds += max(0.0, start.elapsed_time(end)) / 1e3
            else:
                left.append((start, end))
        self._intervals = left
