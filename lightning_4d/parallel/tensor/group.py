"""The ranks that share each layer, and the collectives between them that autograd can go through.

Two kinds of value exist. A *plain* tensor is equal on all ranks, and so is its gradient. A *part* is one rank's share
of a dim, and so is its gradient. Each function below turns one into the other; none of them can be left out without
making numbers wrong, so they are the only places that communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_4d.parallel.same_way import together

Backward = Any  # a context of torch.autograd.Function

# Names of torch 2.13, which deprecates those of 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Communication:
    """One collective as it was called.

    Attributes:
        kind: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        backward: whether autograd's backward called it.
        bytes: size of this rank's input (all_gather: of its output).
        why: what needed it.
    """

    kind: str
    backward: bool
    bytes: int
    why: str


class TensorGroup:
    """The process group of one tensor-parallel group, and this rank's place in it.

    Args:
        group: the process group; None for a simulation without processes, where shapes are right and values are not.
        size: number of ranks.
        rank: this rank's index.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, rank: int) -> None:
        self.group = group
        self.size = size
        self.rank = rank
        self.listener: Callable[[Communication], None] | None = None  # hears of each collective

    def all_reduce(self, tensor: Tensor, why: str, *, backward: bool = False, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Sum (or another ``op``) of the ranks' tensors, in place. Which ranks must call: all of the group."""
        self._note("all_reduce", tensor, why, backward)
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int, why: str, *, backward: bool = False, parts: int = 1) -> Tensor:
        """Put the ranks' equal parts together along ``dim``. Which ranks must call: all of the group."""
        sizes = list(tensor.shape)
        gathered = tensor.new_empty((self.size, *sizes))
        self._note("all_gather", gathered, why, backward)
        if self.group is not None:
            _all_gather(gathered.view(-1), tensor.contiguous().view(-1), group=self.group)
        inner = gathered.unflatten(dim + 1, (parts, sizes[dim] // parts))  # (size, ..., parts, share, ...)
        sizes[dim] *= self.size
        return inner.movedim(0, dim + 1).reshape(sizes)

    def reduce_scatter(self, tensor: Tensor, dim: int, why: str, *, backward: bool = False, parts: int = 1) -> Tensor:
        """Sum the ranks' tensors and return this rank's part along ``dim``. Which ranks must call: all of the group."""
        self._note("reduce_scatter", tensor, why, backward)
        sizes = list(tensor.shape)
        sizes[dim] //= self.size
        pieces = tensor.unflatten(dim, (parts, self.size, sizes[dim] // parts)).movedim(dim + 1, 0).contiguous()
        part = tensor.new_empty(sizes)
        if self.group is not None:
            _reduce_scatter(part.view(-1), pieces.view(-1), group=self.group)
        return part

    def cut(self, tensor: Tensor, dim: int, parts: int = 1) -> Tensor:
        """Return this rank's share of each of the ``parts`` equal parts of ``dim``. No communication.

        ``dim`` has to divide by ``parts * size``.
        """
        if parts == 1:
            share = tensor.shape[dim] // self.size
            return tensor.narrow(dim, self.rank * share, share)
        share = tensor.shape[dim] // (parts * self.size)
        pieces = tensor.unflatten(dim, (parts, self.size, share))
        return pieces.select(dim + 1, self.rank).flatten(dim, dim + 1)

    def _note(self, kind: str, tensor: Tensor, why: str, backward: bool) -> None:
        if self.group is not None and not backward:
            together(kind)
        if self.listener is not None:
            self.listener(Communication(kind, backward, tensor.numel() * tensor.element_size(), why))


class _Enter(torch.autograd.Function):
    """A plain tensor is used by each rank for its part: the gradients of the ranks add up."""

    @staticmethod
    def forward(ctx: Backward, tensor: Tensor, group: TensorGroup, why: str) -> Tensor:
        ctx.group, ctx.why = group, why
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Backward, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        return ctx.group.all_reduce(gradient, ctx.why, backward=True), None, None


class _Sum(torch.autograd.Function):
    """Each rank has a summand; the sum is plain."""

    @staticmethod
    def forward(ctx: Backward, tensor: Tensor, group: TensorGroup, why: str) -> Tensor:
        # A copy: selective checkpointing keeps the product itself, and would sum it once more in its recompute.
        return group.all_reduce(tensor.clone(memory_format=torch.contiguous_format), why)

    @staticmethod
    @once_differentiable
    def backward(ctx: Backward, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0], None, None


class _Gather(torch.autograd.Function):
    """Parts become a plain tensor, which every rank uses in the same way."""

    @staticmethod
    def forward(ctx: Backward, part: Tensor, dim: int, parts: int, group: TensorGroup, why: str) -> Tensor:
        ctx.dim, ctx.parts, ctx.group = dim, parts, group
        return group.all_gather(part, dim, why, parts=parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Backward, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.group.cut(gradients[0], ctx.dim, ctx.parts).contiguous(), None, None, None, None


class _Cut(torch.autograd.Function):
    """Each rank takes its part of a plain tensor."""

    @staticmethod
    def forward(ctx: Backward, tensor: Tensor, dim: int, parts: int, group: TensorGroup, why: str) -> Tensor:
        ctx.dim, ctx.parts, ctx.group, ctx.why = dim, parts, group, why
        return group.cut(tensor, dim, parts).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Backward, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = ctx.group.all_gather(gradients[0], ctx.dim, ctx.why, backward=True, parts=ctx.parts)
        return whole, None, None, None, None


class _GatherForParts(torch.autograd.Function):
    """Parts become a whole tensor that each rank uses for its own part of something else (sequence parallelism)."""

    @staticmethod
    def forward(ctx: Backward, part: Tensor, dim: int, parts: int, group: TensorGroup, why: str) -> Tensor:
        ctx.dim, ctx.parts, ctx.group, ctx.why = dim, parts, group, why
        return group.all_gather(part, dim, why, parts=parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Backward, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        part = ctx.group.reduce_scatter(gradients[0], ctx.dim, ctx.why, backward=True, parts=ctx.parts)
        return part, None, None, None, None


class _SumToParts(torch.autograd.Function):
    """Each rank has a summand of the whole, and keeps its part of the sum (sequence parallelism)."""

    @staticmethod
    def forward(ctx: Backward, tensor: Tensor, dim: int, parts: int, group: TensorGroup, why: str) -> Tensor:
        ctx.dim, ctx.parts, ctx.group, ctx.why = dim, parts, group, why
        return group.reduce_scatter(tensor, dim, why, parts=parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Backward, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = ctx.group.all_gather(gradients[0], ctx.dim, ctx.why, backward=True, parts=ctx.parts)
        return whole, None, None, None, None


def enter(tensor: Tensor, group: TensorGroup, why: str) -> Tensor:
    """Return a plain tensor for use with this rank's parts. Backward: all-reduce, once for all uses of the result."""
    return _Enter.apply(tensor, group, why)  # pyright: ignore[reportReturnType]


def sum_to_plain(tensor: Tensor, group: TensorGroup, why: str) -> Tensor:
    """Sum over the ranks; where no gradient is needed, in place of ``tensor``. Forward: all-reduce."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return group.all_reduce(tensor.contiguous(), why)
    return _Sum.apply(tensor, group, why)  # pyright: ignore[reportReturnType]


def gather(part: Tensor, dim: int, parts: int, group: TensorGroup, why: str) -> Tensor:
    """Make a plain tensor of parts. Forward: all-gather."""
    return _Gather.apply(part, dim, parts, group, why)  # pyright: ignore[reportReturnType]


def cut(tensor: Tensor, dim: int, parts: int, group: TensorGroup, why: str) -> Tensor:
    """Take this rank's part of a plain tensor. Backward: all-gather, where a gradient is needed."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return group.cut(tensor, dim, parts)
    return _Cut.apply(tensor, dim, parts, group, why)  # pyright: ignore[reportReturnType]


def gather_for_parts(part: Tensor, dim: int, parts: int, group: TensorGroup, why: str) -> Tensor:
    """Whole tensor of parts, for use with this rank's parts. Forward: all-gather; backward: reduce-scatter."""
    return _GatherForParts.apply(part, dim, parts, group, why)  # pyright: ignore[reportReturnType]


def sum_to_parts(tensor: Tensor, dim: int, parts: int, group: TensorGroup, why: str) -> Tensor:
    """Sum over the ranks, cut along ``dim``. Forward: reduce-scatter; backward: all-gather."""
    return _SumToParts.apply(tensor, dim, parts, group, why)  # pyright: ignore[reportReturnType]
