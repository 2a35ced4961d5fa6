"""Where a kept tensor waits: where it is, or in pinned CPU memory while the GPU has better uses for its own.

The copies run on a stream of their own beside the computation, out while the forward goes on and back while the
segment after is recomputed. Tensors that are not on CUDA stay where they are: a copy from CPU to CPU saves nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_4d.parallel.recompute.tensors import version as version_of

SMALLEST = 1 << 16  # bytes; below that a copy costs more than it saves


class Parked:
    """A tensor that waits in place."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()  # shares memory and version, not the graph

    def get(self) -> Tensor:
        """The tensor, on its device."""
        return self._tensor

    def changed(self, version: int) -> bool:
        """Whether it was changed in place since ``version``."""
        return version_of(self._tensor) != version

    def prefetch(self) -> None:
        """Start to bring it back."""


class Offloader:
    """Parks tensors.

    Args:
        enabled: move tensors on CUDA that take part in the gradient to pinned CPU memory.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def park(self, tensor: Tensor) -> Parked:
        """Hold ``tensor`` until the recompute."""
        if not self._enabled or not _is_worth_it(tensor):
            return Parked(tensor)
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        return _Offloaded(tensor.detach(), stream)


def _is_worth_it(tensor: Tensor) -> bool:
    activation = tensor.requires_grad and not tensor.is_leaf  # masks and parameters are alive anyway
    plain = type(tensor) is Tensor and tensor.is_cuda and tensor.layout is torch.strided
    return activation and plain and tensor.numel() * tensor.element_size() >= SMALLEST


class _Offloaded(Parked):
    """A tensor that waits in pinned CPU memory."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._device = tensor.device
        self._back: Tensor | None = None
        self._home = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True
        )
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._home.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)

    def changed(self, version: int) -> bool:
        """Never: this is a copy, made at the time."""
        return False

    def prefetch(self) -> None:
        if self._back is not None:
            return
        with torch.cuda.stream(self._stream):  # in order after the copy out
            self._back = self._home.to(self._device, non_blocking=True)

    def get(self) -> Tensor:
        self.prefetch()
        assert self._back is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        self._back.record_stream(current)
        return self._back
