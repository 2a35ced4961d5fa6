"""Bytes that autograd keeps between forward and backward, on fake tensors as well as on real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from lightning_4d._torch_private import storage_key

__all__ = ["Activations"]


class Activations:
    """Counts the memory of tensors that autograd saves, each once however often it is saved, until all let go of it.

    Args:
        held: returns the tensors that exist anyway: parameters, gathered ones, and buffers.

    Attributes:
        now: bytes kept at this moment.
        peak: the most there were at once.
    """

    def __init__(self, held: Callable[[], Iterable[Tensor]]) -> None:
        self.now = self.peak = 0
        self._held = held
        self._ignored: set[int] = set()
        self._uses: Counter[int] = Counter()

    def watching(self) -> AbstractContextManager[Any]:
        """A context in which what autograd saves is counted; what was saved before it is not."""
        return saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def refresh(self) -> None:
        """Look again at which tensors exist anyway: gathered parameters come into being at their first use."""
        self._ignored = {storage_key(_local(tensor)) for tensor in self._held()}

    def _pack(self, tensor: Tensor) -> _Saved:
        return _Saved(self, tensor)

    def add(self, key: int, size: int) -> None:
        """A tensor was saved."""
        self._uses[key] += 1
        if self._uses[key] == 1 and key not in self._ignored:
            self.now += size
            self.peak = max(self.peak, self.now)

    def remove(self, key: int, size: int) -> None:
        """Autograd let go of a tensor."""
        self._uses[key] -= 1
        if self._uses[key] == 0:
            del self._uses[key]
            if key not in self._ignored:
                self.now -= size


class _Saved:
    """A saved tensor; it is counted as long as this object lives."""

    __slots__ = ("_counter", "_key", "_size", "tensor")

    def __init__(self, counter: Activations, tensor: Tensor) -> None:
        # Without its history, which would keep itself alive.
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
        storage = _local(tensor)
        self._counter, self._key, self._size = counter, storage_key(storage), storage.untyped_storage().nbytes()
        counter.add(self._key, self._size)

    def __del__(self) -> None:
        self._counter.remove(self._key, self._size)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
