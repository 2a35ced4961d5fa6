"""Which argument of a block holds the sequence, and in which dim: its attention tells, by what it compares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def attended_lengths(operation: object, args: Sequence[Any]) -> list[int]:
    """The numbers of queries and keys, if ``operation`` (of aten) is attention or a softmax; else nothing."""
    name = str(operation)
    if "scaled_dot_product" in name:
        return [int(tensor.shape[-2]) for tensor in args[:2]]
    if "softmax" in name and args[0].dim() >= 3:
        return [int(size) for size in args[0].shape[-2:]]
    return []


def find_sequence_dim(leaves: Sequence[Any], lengths: Iterable[int]) -> tuple[int, int] | None:
    """Return the index of the leaf that holds the sequence, and the dim; None if none does.

    Args:
        leaves: of a block's arguments.
        lengths: what its attention compares. Without a leaf that is as long, the middle one of three dims is taken.
    """
    floating = [(i, leaf) for i, leaf in enumerate(leaves) if may_hold_sequence(leaf)]
    for length in lengths:
        for index, leaf in floating:
            dims = [dim for dim in _preferred(leaf.dim()) if leaf.shape[dim] == length]
            if dims:
                return index, dims[0]
    return next(((index, 1) for index, leaf in floating if leaf.dim() == 3), None)


def named_sequence_dim(leaves: Sequence[Any], dim: int) -> tuple[int, int] | None:
    """The first leaf that has the dim which the user named; None if there is none."""
    for index, leaf in enumerate(leaves):
        if may_hold_sequence(leaf) and -leaf.dim() <= dim < leaf.dim():
            return index, dim % leaf.dim()
    return None


def may_hold_sequence(leaf: Any) -> bool:
    """Whether ``leaf`` is a hidden state, rather than ids or a mask."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() >= 2


def _preferred(dims: int) -> list[int]:
    """The dim before the features, then the ones before that."""
    return [dims - 2, *range(dims - 2)]
