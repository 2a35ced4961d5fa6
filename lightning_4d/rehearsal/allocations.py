"""Bytes of all tensors that a step makes, on fake tensors: what an allocator would have handed out at the peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_4d import _torch_private as private

__all__ = ["Allocations"]


class Allocations:
    """Counts the memory of every tensor that comes into being while it watches, from then until it is freed.

    What existed before does not count, unless it grows: FSDP frees and fills the memory of gathered parameters.

    Attributes:
        now: bytes at this moment.
        peak: the most there were at once, while it watched.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which tensors are counted; it may be entered again, and goes on counting."""
        self.peak = self.now
        with private.storage_resizes(self._resized), private.dispatch_mode(self._handle):
            yield

    def _handle(self, mode: Any, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for storage in _storages((args, kwargs)):  # what comes from outside and is seen for the first time
            self._see(storage, 0)
        output = operation(*args, **kwargs)
        for storage in _storages(output):
            self._see(storage, storage.nbytes())
        return output

    def _see(self, storage: torch.UntypedStorage, size: int) -> None:
        if private.storage_id(storage) not in self._sizes:
            self._add(storage, size)

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = private.storage_id(storage)
        self._sizes[key] = 0
        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._set(key, size)

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _resized(self, storage: torch.UntypedStorage, before: int) -> None:
        key = private.storage_id(storage)
        if key in self._sizes:
            self._set(key, storage.nbytes())
        elif storage.nbytes() > before:
            self._add(storage, storage.nbytes())

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._alive[key]


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors in nested containers; of tensors that wrap others, those of the inner ones."""
    for leaf in private.tree_leaves(values):
        if not isinstance(leaf, Tensor):
            continue
        if hasattr(leaf, "__tensor_flatten__"):
            names, _ = leaf.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
            yield from _storages([getattr(leaf, name) for name in names])
        else:
            yield leaf.untyped_storage()
