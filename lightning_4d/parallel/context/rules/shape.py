"""Operations that move, split, join or pick dims. Each keeps track of where the sequence goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d import _torch_private as private
from lightning_4d.parallel.context.communication import Sharding, select
from lightning_4d.parallel.context.rules.align import Lead, aligned, lead_of
from lightning_4d.parallel.context.tensor import SequenceTensor, rule, wrap

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]


def _sizes(given: Sequence[Any]) -> list[int]:
    """``view(2, 3)`` and ``view((2, 3))`` alike."""
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = given[0]
    return [int(size) for size in given]


# ---------------------------------------------------------------------------------------------------- new shapes


def _reshaped(func: Callable[..., Any], x: SequenceTensor, shape: Sequence[int]) -> Any:
    """Call ``func(part, *sizes)`` if the sequence stays in one piece of ``shape``."""
    shape = list(shape)
    if -1 in shape:
        known = prod(size for size in shape if size != -1)
        if known == 0 or x.numel() % known:
            return NotImplemented
        shape[shape.index(-1)] = x.numel() // known
    if prod(shape) != x.numel() or not x.numel():
        return NotImplemented
    sharding = _sharding_in(x, shape)
    if sharding is None:
        return NotImplemented
    shape[sharding.dim] = sharding.local_size
    return wrap(func(x.part, shape), sharding)


def _sharding_in(x: SequenceTensor, shape: Sequence[int]) -> Sharding | None:
    """Where in ``shape`` the sequence is in one piece, if it is."""
    old = x.sharding
    length = old.layout.length
    before, after = prod(x.shape[: old.dim]) * old.outer, old.inner * prod(x.shape[old.dim + 1 :])
    passed = 1
    for dim, size in enumerate(shape):
        outer, rest = divmod(before, passed)
        if rest:
            return None
        inner, rest = divmod(size, outer * length)
        if not rest and inner and after % inner == 0:
            return Sharding(dim, old.layout, old.groups, outer, inner)
        passed *= size
    return None


@rule(torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.view_as, torch.Tensor.reshape_as)
def view(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Keep the sequence whole among the new dims, alone or merged with others."""
    x, given = args[0], args[1:] or tuple(kwargs.values())
    if not isinstance(x, SequenceTensor):
        return x.reshape(given[0].shape) if func is torch.Tensor.reshape_as else x.view(given[0].shape)
    if not given or isinstance(given[0], torch.dtype):
        return NotImplemented
    if isinstance(given[0], Tensor):
        given = (given[0].shape,)
    change = torch.Tensor.view if "view" in func.__name__ else torch.Tensor.reshape
    return _reshaped(change, x, _sizes(given))


@rule(torch.Tensor.flatten, torch.flatten)
def flatten(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """As a reshape."""
    return _flatten(*args, **kwargs)


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % x.dim(), end_dim % x.dim()
    return _reshaped(torch.Tensor.reshape, x, [*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]])


@rule(torch.Tensor.unflatten, torch.unflatten)
def unflatten(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """As a view."""
    return _unflatten(*args, **kwargs)


def _unflatten(x: Any, dim: Any, sizes: Sequence[int], *_: Any) -> Any:
    if not isinstance(dim, int):
        return NotImplemented
    dim %= x.dim()
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[dim] // -prod(sizes)
    return _reshaped(torch.Tensor.view, x, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


@rule(torch.Tensor.unsqueeze, torch.unsqueeze)
def unsqueeze(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """A new dim of size 1."""
    x, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    dim %= x.dim() + 1
    return wrap(x.part.unsqueeze(dim), x.sharding.at(x.sharding.dim + (dim <= x.sharding.dim)))


@rule(torch.Tensor.squeeze, torch.squeeze)
def squeeze(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Drop dims of size 1; the whole sequence has never size 1, though a part may."""
    x, given = args[0], args[1:] or tuple(kwargs.values())
    dims = range(x.dim()) if not given else [dim % x.dim() for dim in _sizes(given)]
    dims = [dim for dim in dims if x.shape[dim] == 1]
    if x.sharding.dim in dims:
        return NotImplemented
    part = x.part.squeeze(dims) if dims else x.part.view_as(x.part)
    return wrap(part, x.sharding.at(x.sharding.dim - sum(dim < x.sharding.dim for dim in dims)))


@rule(torch.Tensor.expand, torch.Tensor.expand_as)
def expand(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Repeat other dims without copying."""
    x, given = args[0], args[1:] or tuple(kwargs.values())
    if not isinstance(x, SequenceTensor):
        return x.expand(given[0].shape)
    sizes = list(given[0].shape) if isinstance(given[0], Tensor) else _sizes(given)
    dim = x.sharding.dim + len(sizes) - x.dim()
    if sizes[dim] not in (-1, x.sharding.size):
        return NotImplemented
    sizes[dim] = x.sharding.local_size
    return wrap(x.part.expand(sizes), x.sharding.at(dim))


@rule(torch.Tensor.repeat)
def repeat(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Repeat other dims."""
    x, counts = args[0], _sizes(args[1:] or tuple(kwargs.values()))
    dim = x.sharding.dim + len(counts) - x.dim()
    return NotImplemented if counts[dim] != 1 else wrap(x.part.repeat(counts), x.sharding.at(dim))


# --------------------------------------------------------------------------------------------------- order of dims


@rule(
    torch.Tensor.transpose, torch.transpose, torch.Tensor.swapaxes, torch.swapaxes, torch.Tensor.swapdims,
    torch.swapdims,
)  # fmt: skip
def transpose(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Swap two dims."""
    x, (first, second) = args[0], (*args[1:], *kwargs.values())
    if not isinstance(first, int) or not isinstance(second, int):
        return NotImplemented
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    return _permuted(x, order)


def _permuted(x: SequenceTensor, order: Sequence[int]) -> SequenceTensor:
    return wrap(x.part.permute(*order), x.sharding.at(order.index(x.sharding.dim)))


@rule(torch.Tensor.permute, torch.permute)
def permute(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Order the dims anew."""
    x, order = args[0], _sizes(args[1:] or tuple(kwargs.values()))
    return _permuted(x, [dim % x.dim() for dim in order])


@rule(torch.Tensor.movedim, torch.movedim, torch.Tensor.moveaxis, torch.moveaxis)
def movedim(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Move dims: torch says where, of a tensor that holds nothing."""
    x, rest = args[0], args[1:]
    numbered = torch.empty(tuple(range(1, x.dim() + 1)), device="meta")  # each size tells its dim
    order = [size - 1 for size in func(numbered, *rest, **kwargs).shape]
    return _permuted(x, order)


@rule(*(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")), torch.t, torch.Tensor.t, torch.adjoint)
def transposed(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """The last two dims swapped; real tensors of at least 2 dims, ``T`` of exactly 2."""
    x = args[0]
    if x.part.is_complex() or x.dim() < 2 or (x.dim() > 2 and getattr(func, "__self__", None) not in _MATRIX):
        return NotImplemented
    return _permuted(x, [*range(x.dim() - 2), x.dim() - 1, x.dim() - 2])


_MATRIX = (torch.Tensor.mT, torch.Tensor.mH)


# -------------------------------------------------------------------------------------------------- pick and split


def _narrowed(x: SequenceTensor, start: int, stop: int) -> Any:
    """Positions ``start`` .. ``stop - 1`` of the sequence, where they are: nothing is sent."""
    old = x.sharding
    if old.is_merged or stop - start < 1:
        return NotImplemented
    first, last = (old.layout.range_below(old.groups.rank, position) for position in (start, stop))
    layout = old.layout.slice(start, stop)
    return wrap(x.part.narrow(old.dim, first, last - first), Sharding(old.dim, layout, old.groups))


def _selected(x: SequenceTensor, position: int) -> Any:
    """One position, whole on all ranks."""
    old = x.sharding
    if old.is_merged or x.part.dtype == torch.bool:
        return NotImplemented
    return select(x.part, old, position % old.layout.length)


@rule(torch.Tensor.__getitem__)
def getitem(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Integers, slices, None and Ellipsis; of the sequence a range without steps, or one position."""
    x, index = args
    if not isinstance(x, SequenceTensor):
        return NotImplemented
    index = _full_index(index if isinstance(index, tuple) else (index,), x.dim())
    return NotImplemented if index is None else _indexed(x, index)


def _full_index(index: tuple[Any, ...], dims: int) -> list[Any] | None:
    """One entry per dim, and the None of new ones; None if something else indexes."""
    if not all(entry is None or entry is Ellipsis or type(entry) in (int, slice) for entry in index):
        return None
    if sum(entry is Ellipsis for entry in index) > 1:
        return None
    used = sum(entry is not None and entry is not Ellipsis for entry in index)
    position = next((i for i, entry in enumerate(index) if entry is Ellipsis), len(index))
    filler = [slice(None)] * (dims - used)
    return [*index[:position], *filler, *index[position + 1 :]]


def _indexed(x: SequenceTensor, index: list[Any]) -> Any:
    sharding = x.sharding
    place = [i for i, entry in enumerate(index) if entry is not None][sharding.dim]
    entry = index[place]
    if type(entry) is int:
        if not -sharding.size <= entry < sharding.size:
            return NotImplemented  # torch says what is wrong
        selected = _selected(x, entry)
        del index[place]
        return selected if selected is NotImplemented else selected[tuple(index)]
    start, stop, step = entry.indices(sharding.size)
    if step != 1 or any(isinstance(other, slice) and (other.step or 1) < 1 for other in index):
        return NotImplemented
    if (start, stop) != (0, sharding.size):
        x = _narrowed(x, start, stop)
        if x is NotImplemented:
            return x
    index[place] = slice(None)
    dim = sum(not isinstance(other, int) for other in index[:place])
    return wrap(x.part[tuple(index)], x.sharding.at(dim))


def _in_order(args: Arguments, kwargs: Named, *names: str) -> list[Any]:
    """The tensor and what follows it, by place or by these names."""
    return [*args, *(kwargs[name] for name in names[len(args) - 1 :])]


@rule(torch.Tensor.narrow, torch.narrow)
def narrow(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """A range of one dim."""
    x, dim, start, length = _in_order(args, kwargs, "dim", "start", "length")
    dim %= x.dim()
    if not isinstance(start, int):
        return NotImplemented
    if dim != x.sharding.dim:
        return wrap(x.part.narrow(dim, start, length), x.sharding)
    start %= x.shape[dim]
    return _narrowed(x, start, start + length)


@rule(torch.Tensor.select, torch.select)
def select_rule(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """One index of one dim."""
    x, dim, index = _in_order(args, kwargs, "dim", "index")
    if not isinstance(dim, int) or not isinstance(index, int):
        return NotImplemented
    dim %= x.dim()
    return _indexed(x, [*[slice(None)] * dim, index, *[slice(None)] * (x.dim() - dim - 1)])


@rule(torch.Tensor.split, torch.split, torch.Tensor.chunk, torch.chunk, torch.functional.split)
def split(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Pieces of one dim; of the sequence, pieces where they are."""
    return _split(func, *args, **kwargs)


def _split(func: Callable[..., Any], x: Any, sizes: Any = None, dim: int = 0, **named: Any) -> Any:
    if not isinstance(x, SequenceTensor):
        return NotImplemented
    sizes = named.popitem()[1] if sizes is None else sizes
    dim %= x.dim()
    if dim != x.sharding.dim:
        return tuple(wrap(piece, x.sharding) for piece in func(x.part, sizes, dim))
    lengths = [piece.shape[0] for piece in func(torch.empty(x.shape[dim], device="meta"), sizes)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    pieces = [_narrowed(x, start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else tuple(pieces)


@rule(torch.Tensor.unbind, torch.unbind)
def unbind(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """The indices of one dim other than the sequence's."""
    x, dim = args[0], (*args[1:], *kwargs.values(), 0)[0] % args[0].dim()
    if dim == x.sharding.dim:
        return NotImplemented
    return tuple(wrap(piece, x.sharding.at(x.sharding.dim - (dim < x.sharding.dim))) for piece in x.part.unbind(dim))


@rule(torch.repeat_interleave, torch.Tensor.repeat_interleave)
def repeat_interleave(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Repeat the indices of another dim."""
    x = args[0]
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(x, SequenceTensor) or dim is None or dim % x.dim() == x.sharding.dim:
        return NotImplemented
    return wrap(func(x.part, *args[1:], **kwargs), x.sharding)


@rule(torch.flip, torch.Tensor.flip)
def flip(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Reverse other dims."""
    x, dims = args[0], _sizes(args[1:] or tuple(kwargs.values()))
    if x.sharding.dim in [dim % x.dim() for dim in dims]:
        return NotImplemented
    return wrap(x.part.flip(dims), x.sharding)


@rule(F.pad, private.NN_FUNCTIONS.pad)
def pad(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Pad other dims by a constant."""
    x, amounts = args[0], args[1] if len(args) > 1 else kwargs["pad"]
    mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
    if not isinstance(x, SequenceTensor) or mode != "constant":
        return NotImplemented
    if len(amounts) // 2 >= x.dim() - x.sharding.dim:
        return NotImplemented
    return wrap(func(x.part, *args[1:], **kwargs), x.sharding)


# ------------------------------------------------------------------------------------------------------------ join


@rule(torch.cat, torch.concat, torch.concatenate)
def cat(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Join along another dim than the sequence's."""
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    tensors = [tensor for tensor in tensors if isinstance(tensor, SequenceTensor) or tensor.shape != (0,)]
    lead = lead_of(tensors)
    if lead is None or kwargs.get("out") is not None or not _same_dims(tensors, lead):
        return NotImplemented
    if len(tensors) == 1:  # with an empty one, as caches of keys and values begin
        return tensors[0].clone()
    dims = tensors[0].dim()
    if dim % dims == dims - lead.back:
        return NotImplemented
    return lead.wrapped(torch.cat([aligned(tensor, lead, "cat") for tensor in tensors], dim))


@rule(torch.stack)
def stack(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Join along a new dim."""
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    lead = lead_of(tensors)
    if lead is None or kwargs.get("out") is not None or not _same_dims(tensors, lead):
        return NotImplemented
    dims = tensors[0].dim()
    dim %= dims + 1
    part = torch.stack([aligned(tensor, lead, "stack") for tensor in tensors], dim)
    position = dims - lead.back
    return wrap(part, lead.sharding.at(position + (dim <= position)))


def _same_dims(tensors: Sequence[Tensor], lead: Lead) -> bool:
    """All have the sequence's length in its place; so they can be parts of the same positions."""
    dims = tensors[0].dim()
    place = dims - lead.back
    return all(tensor.dim() == dims and tensor.shape[place] == lead.sharding.size for tensor in tensors)
