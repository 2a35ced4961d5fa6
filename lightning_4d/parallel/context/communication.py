"""Between whole tensors and the parts that ranks hold: four operations, each exact in both directions.

The rule of gradients: a *whole* (plain) tensor has its true gradient, equal on all ranks. A *part* has the gradient of
its own positions times the number of ranks, so that the average over the ranks of a parameter's gradient is the true
one wherever the parameter was used: on whole tensors alike on each rank, or on parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_4d.parallel.context.groups import ContextGroups
from lightning_4d.parallel.context.layout import SequenceLayout
from lightning_4d.parallel.context.ring import take_runs
from lightning_4d.parallel.parts import Divided, inside, is_parameter, plain
from lightning_4d.parallel.same_way import together
from lightning_4d.parallel.views import as_view

# Renamed in torch 2.13, where the old name warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Sharding:
    """Where a tensor's sequence is.

    Args:
        dim: the dim that holds it, counted from the left.
        layout: which positions each rank holds.
        groups: the ranks.
        outer: how many other indices are merged with the position before it: ``flatten(0, 1)`` of (B, T) makes it B.
        inner: and how many after it.
    """

    dim: int
    layout: SequenceLayout
    groups: ContextGroups
    outer: int = 1
    inner: int = 1

    @cached_property
    def size(self) -> int:
        """The whole tensor's size along ``dim``."""
        return self.outer * self.layout.length * self.inner

    @cached_property
    def local_size(self) -> int:
        """This rank's size along ``dim``."""
        return self.outer * self.layout.lengths[self.groups.rank] * self.inner

    @property
    def is_merged(self) -> bool:
        """Whether other indices share the dim with the position."""
        return self.outer != 1 or self.inner != 1

    def at(self, dim: int) -> Sharding:
        """The same in another dim."""
        return self if dim == self.dim else Sharding(dim, self.layout, self.groups, self.outer, self.inner)

    def same_positions(self, other: Sharding) -> bool:
        """Whether both hold the same positions in the same order, whatever their dims."""
        if self is other:
            return True
        same_layout = self.layout is other.layout or self.layout == other.layout
        return same_layout and self.outer == other.outer and self.inner == other.inner


def gather(part: Tensor, sharding: Sharding) -> Tensor:
    """The whole tensor. Which ranks must call: all of the group."""
    return inside(lambda tensor: _Gather.apply(tensor, sharding), part, sharding.dim)  # pyright: ignore[reportReturnType]


def gather_plain(part: Tensor, sharding: Sharding) -> Tensor:
    """The whole tensor, whole along every axis. Which ranks must call: all that share it, over all axes."""
    return plain(gather(part, sharding))


def cut(whole: Tensor, sharding: Sharding) -> Tensor:
    """This rank's part of a tensor that all ranks hold whole.

    Which ranks must call: all of the group, since backward communicates.
    """
    if whole.requires_grad and torch.is_grad_enabled():
        return inside(lambda tensor: _Cut.apply(tensor, sharding), whole, sharding.dim)  # pyright: ignore[reportReturnType]
    return take_part(whole, sharding)


def reduce_sum(partial: Tensor, groups: ContextGroups) -> Tensor:
    """The sum over the ranks, whole. Which ranks must call: all of the group."""
    return inside(lambda tensor: _Sum.apply(tensor, groups), partial)  # pyright: ignore[reportReturnType]


def use_whole(whole: Tensor, groups: ContextGroups) -> Tensor:
    """A whole tensor that meets parts as it is (a condition of all positions). All ranks must call.

    Parameters need nothing: their gradients are averaged over the ranks anyway.
    """
    if is_parameter(whole) or not (whole.requires_grad and torch.is_grad_enabled()):
        return whole
    return inside(lambda tensor: _UseWhole.apply(tensor, groups), whole)  # pyright: ignore[reportReturnType]


def select(part: Tensor, sharding: Sharding, position: int) -> Tensor:
    """One position, without its dim, whole on all ranks: a copy, so nothing may change it in place.

    Which ranks must call: all of the group.
    """
    if isinstance(part, Divided) and part.split_dim != sharding.dim:
        local: Tensor = _Select.apply(part.local, sharding, position)  # pyright: ignore[reportAssignmentType]
        return part.like(as_view(local), part.split_dim - (part.split_dim > sharding.dim))
    return as_view(_Select.apply(plain(part), sharding, position))  # pyright: ignore[reportArgumentType]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        return join_parts(part, sharding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return take_part(grads[0], ctx.sharding) * ctx.sharding.groups.size, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        part = take_part(whole, sharding)
        # A copy: a view would keep the whole alive, and could not be changed in place.
        return part.clone() if part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() else part

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return join_parts(grads[0] / ctx.sharding.groups.size, ctx.sharding), None


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, sharding: Sharding, position: int) -> Tensor:
        owner, index = sharding.layout.owner(position)
        ctx.index = index if owner == sharding.groups.rank else None
        ctx.sharding, ctx.size = sharding, part.shape[sharding.dim]
        shape = (*part.shape[: sharding.dim], *part.shape[sharding.dim + 1 :])
        mine = part.new_zeros(shape) if ctx.index is None else part.select(sharding.dim, index)
        return _all_reduced(mine, sharding.groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sharding = ctx.sharding
        shape = list(grads[0].shape)
        shape.insert(sharding.dim, ctx.size)
        grad = grads[0].new_zeros(shape)
        if ctx.index is not None:
            grad.select(sharding.dim, ctx.index).copy_(grads[0] * sharding.groups.size)
        return grad, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, groups: ContextGroups) -> Tensor:
        ctx.groups = groups
        return _all_reduced(partial, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.groups.size, None


class _UseWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, groups: ContextGroups) -> Tensor:
        ctx.groups = groups
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grads[0] / ctx.groups.size, ctx.groups), None


def take_part(whole: Tensor, sharding: Sharding) -> Tensor:
    """This rank's part, without a gradient of its own; a view where it is one range."""
    if isinstance(whole, Divided):
        return inside(lambda tensor: take_part(tensor, sharding), whole, sharding.dim)
    runs = sharding.layout.runs[sharding.groups.rank]
    if not sharding.is_merged:
        return take_runs(whole, sharding.dim, runs)
    dim = sharding.dim
    split = whole.unflatten(dim, (sharding.outer, sharding.layout.length, sharding.inner))
    return take_runs(split, dim + 1, runs).flatten(dim, dim + 2)


def join_parts(part: Tensor, sharding: Sharding) -> Tensor:
    """The whole tensor, contiguous, without a gradient of its own. Which ranks must call: all of the group."""
    layout, groups, dim = sharding.layout, sharding.groups, sharding.dim
    mine = layout.lengths[groups.rank]
    split = part.reshape((*part.shape[:dim], sharding.outer, mine, sharding.inner, *part.shape[dim + 1 :]))
    first = split.movedim(dim + 1, 0).contiguous()
    if mine < layout.longest:
        first = F.pad(first, (0, 0) * (first.dim() - 1) + (0, layout.longest - mine))
    together("a gather of a sequence")
    parts = first.new_empty((groups.size * layout.longest, *first.shape[1:]))
    _all_gather(parts, first, group=groups.group)
    return take_runs(parts, 0, layout.order).movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


def _all_reduced(tensor: Tensor, groups: ContextGroups) -> Tensor:
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    together("a sum over a sequence")
    dist.all_reduce(tensor, group=groups.group)
    return tensor
