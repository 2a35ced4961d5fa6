"""Memory and changes of tensors: which storage, which version, and whether two are the same values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def storages(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """The address and the bytes of each storage that ``tensor`` uses; several for tensors that wrap others."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # torch 2.13 lists the mesh of a DTensor too
                yield from storages(inner)
    elif tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()


def version(tensor: Tensor) -> int:
    """How often the tensor was changed in place; 0 for tensors that do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def same(first: Tensor, second: Tensor) -> bool:
    """Whether both are one and the same values in memory: the same object, or a view of all of it."""
    if first is second:
        return True
    if type(first) is not type(second) or first.shape != second.shape or first.dtype != second.dtype:
        return False
    if hasattr(first, "__tensor_flatten__"):
        names, context = first.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        others, other_context = second.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        alike = names == others and context == other_context
        pairs = [(getattr(first, name), getattr(second, name)) for name in names]
        return alike and all(same(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)
    if first.layout is not torch.strided or second.layout is not torch.strided or first.device != second.device:
        return False
    same_view = first.stride() == second.stride() and first.storage_offset() == second.storage_offset()
    return same_view and first.numel() > 0 and first.data_ptr() == second.data_ptr()


def held(tensor: Tensor) -> Tensor:
    """What a tensor that only shows another one holds: it lives on when the wrapper is made anew; else the tensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        if len(names) == 1:
            return getattr(tensor, names[0])
    return tensor


def looks(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor shows what it holds."""
    context = tensor.__tensor_flatten__()[1] if hasattr(tensor, "__tensor_flatten__") else None  # pyright: ignore[reportAttributeAccessIssue]
    return type(tensor), tensor.shape, tensor.dtype, context
