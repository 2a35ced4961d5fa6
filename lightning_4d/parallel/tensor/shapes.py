"""Rules for views, splits and joins: which dim of the result is divided, and into how many parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_4d.parallel.tensor.pointwise import aligned
from lightning_4d.parallel.tensor.sharded import Sharded, find_sharded, functions, getter, rule

Args = Any  # a tuple
Kwargs = dict[str, Any]


def normal(dim: int, ndim: int) -> int:
    """A dim as a number from 0."""
    return dim + ndim if dim < 0 else dim


def _sizes(given: Args) -> list[int]:
    """Sizes or dims given one by one, or as one sequence."""
    if len(given) == 1 and isinstance(given[0], (tuple, list, torch.Size)):
        given = tuple(given[0])
    return [int(size) for size in given]


# --------------------------------------------------------------------------------------------------------------- views


def view_split(old: Sequence[int], new: Sequence[int], dim: int, parts: int, size: int) -> tuple[int, int] | None:
    """Find the divided dim and the parts of a view.

    Args:
        old: global sizes before.
        new: global sizes after, of as many elements.
        dim: the divided dim before.
        parts: its parts.
        size: number of ranks.

    Returns:
        The dim and the parts after; None where the shares are no longer equal parts of one dim.

    >>> view_split((2, 5, 24), (2, 5, 3, 4, 2), dim=2, parts=3, size=2)  # queries, keys, values of 4 heads
    (3, 1)
    >>> view_split((2, 4, 5, 2), (8, 5, 2), dim=1, parts=1, size=2)  # (batch, heads) merged
    (0, 2)
    >>> view_split((2, 5, 24), (2, 5, 3, 8), dim=2, parts=1, size=2) is None  # 3 heads over 2 ranks
    True
    """
    before = math.prod(old[:dim]) * parts  # how often the pattern of the ranks' shares repeats
    shares = old[dim] // parts * math.prod(old[dim + 1 :])  # elements of one pattern
    outer = 1
    for index, length in enumerate(new):
        if before % outer == 0:
            repeats = before // outer
            own = length // repeats if repeats and length % repeats == 0 else 0
            rest = math.prod(new[index + 1 :])
            if own > 1 and own % size == 0 and own * rest == shares:
                return index, repeats
        outer *= length
    return None


def _viewed(value: Sharded, sizes: Sequence[int]) -> Any:
    sizes = list(sizes)
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = value.numel() // known if known else 0
    found = view_split(value.shape, sizes, value.split_dim, value.parts, value.runtime.group.size)
    if found is None:
        return NotImplemented
    dim, parts = found
    local = list(sizes)
    local[dim] //= value.runtime.group.size
    return local, dim, parts


@rule(Tensor.view, Tensor.reshape, torch.reshape)
def _view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    given = args[1:] or (kwargs.get("shape") or kwargs.get("size"),)
    if isinstance(given[0], torch.dtype) or type(value) is not Sharded:
        return NotImplemented
    found = _viewed(value, _sizes(given))
    if found is NotImplemented:
        return NotImplemented
    local, dim, parts = found
    return value.like(func(value.local, local), dim, parts)


@rule(Tensor.view_as, Tensor.reshape_as)
def _view_as(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[0].reshape(args[1].shape)


@rule(*functions("flatten"))
def _flatten(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def bounds(value: Tensor, start_dim: int = 0, end_dim: int = -1) -> tuple[int, int]:
        return normal(start_dim, value.dim()), normal(end_dim, value.dim())

    start, end = bounds(*args, **kwargs)
    shape = args[0].shape
    return args[0].reshape(*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :])


@rule(*functions("unflatten"))
def _unflatten(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def target(value: Tensor, dim: int, sizes: Sequence[int]) -> list[int]:
        dim, sizes = normal(dim, value.dim()), list(sizes)
        if -1 in sizes:
            sizes[sizes.index(-1)] = value.shape[dim] // math.prod(size for size in sizes if size != -1)
        return [*value.shape[:dim], *sizes, *value.shape[dim + 1 :]]

    return args[0].reshape(target(*args, **kwargs))


# ------------------------------------------------------------------------------------------------------ order of dims


def _permuted(value: Sharded, order: Sequence[int]) -> Sharded:
    order = [normal(dim, value.dim()) for dim in order]
    return value.like(value.local.permute(order), order.index(value.split_dim))


@rule(*functions("permute"))
def _permute(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _permuted(args[0], _sizes(args[1:] or (kwargs["dims"],)))


@rule(*functions("transpose swapaxes swapdims"))
def _transpose(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def order(value: Tensor, dim0: int, dim1: int) -> list[int]:
        dims = list(range(value.dim()))
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
        return dims

    return _permuted(args[0], order(*args, **kwargs)) if not kwargs else NotImplemented


@rule(*functions("t"), *getter("T"))
def _t(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _permuted(args[0], list(range(args[0].dim()))[::-1])


@rule(*getter("mT"))
def _matrix_transposed(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[0].transpose(-1, -2)


@rule(*functions("movedim moveaxis"))
def _movedim(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, *rest = args
    numbered = torch.empty(tuple(range(1, value.dim() + 1)), device="meta")  # each size tells its dim
    return _permuted(value, [size - 1 for size in func(numbered, *rest, **kwargs).shape])


@rule(*functions("unsqueeze"))
def _unsqueeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, dim = args[0], normal(args[1] if len(args) > 1 else kwargs["dim"], args[0].dim() + 1)
    return value.like(value.local.unsqueeze(dim), value.split_dim + (dim <= value.split_dim))


@rule(*functions("squeeze"))
def _squeeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, given = args[0], args[1:] or tuple(kwargs.values())
    dims = [normal(dim, value.dim()) for dim in _sizes(given)] if given else list(range(value.dim()))
    dims = [dim for dim in dims if value.shape[dim] == 1]
    kept = [size for dim, size in enumerate(value.local.shape) if dim not in dims]
    return value.like(value.local.reshape(kept), value.split_dim - sum(dim < value.split_dim for dim in dims))


@rule(Tensor.expand, Tensor.expand_as)
def _expand(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if type(value) is not Sharded or kwargs:
        return NotImplemented
    sizes = list(args[1].shape) if func is Tensor.expand_as else _sizes(args[1:])
    dim = len(sizes) - (value.dim() - value.split_dim)
    sizes[dim] = -1
    return value.like(value.local.expand(sizes), dim)


# --------------------------------------------------------------------------------------------------- pieces of one dim


def _pieces(value: Sharded, lengths: Sequence[int]) -> Any:
    """Split the divided dim into pieces of whole parts."""
    length, size = value.split_size // value.parts, value.runtime.group.size
    if any(piece % length for piece in lengths) or sum(lengths) != value.split_size:
        return NotImplemented
    split = value.local.split([piece // size for piece in lengths], value.split_dim)
    return tuple(value.like(part, parts=piece // length) for part, piece in zip(split, lengths, strict=True))


@rule(*functions("split split_with_sizes tensor_split"), torch.functional.split)
def _split(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def arguments(value: Any, sizes: Any = None, dim: int = 0, **named: Any) -> tuple[Any, int]:
        return sizes if sizes is not None else next(iter(named.values())), dim

    value, (sizes, dim) = args[0], arguments(*args, **kwargs)
    dim = normal(dim, value.dim())
    if dim != value.split_dim:
        return tuple(value.like(part) for part in func(value.local, *args[1:], **kwargs))
    if getattr(func, "__name__", "") == "tensor_split":
        return NotImplemented
    if isinstance(sizes, int):
        whole, rest = divmod(value.split_size, sizes)
        sizes = [sizes] * whole + ([rest] if rest else [])
    return _pieces(value, sizes)


@rule(*functions("chunk"))
def _chunk(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def arguments(value: Sharded, chunks: int, dim: int = 0) -> tuple[Sharded, int, int]:
        return value, chunks, normal(dim, value.dim())

    value, chunks, dim = arguments(*args, **kwargs)
    if dim != value.split_dim:
        return tuple(value.like(part) for part in value.local.chunk(chunks, dim))
    length = -(-value.split_size // chunks)
    return _split(Tensor.split, (value, length, dim), {})


@rule(*functions("unbind"))
def _unbind(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, dim = args[0], normal(args[1] if len(args) > 1 else kwargs.get("dim", 0), args[0].dim())
    if dim == value.split_dim:
        return NotImplemented
    return tuple(value.like(part, value.split_dim - (dim < value.split_dim)) for part in value.local.unbind(dim))


@rule(*functions("narrow"))
def _narrow(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if kwargs or not isinstance(args[2], int):
        return NotImplemented
    value, dim, start, length = args
    index = [slice(None)] * value.dim()
    index[dim] = slice(start, start + length)
    return value[tuple(index)]


@rule(*functions("select"))
def _select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if kwargs:
        return NotImplemented
    value, dim, at = args
    index: list[Any] = [slice(None)] * value.dim()
    index[dim] = at
    return value[tuple(index)]


@rule(Tensor.__getitem__)
def _getitem(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, index = args
    if type(value) is not Sharded:
        return NotImplemented  # a plain tensor indexed by a sharded one
    index = index if isinstance(index, tuple) else (index,)
    found = _index_of_split(value, index)
    if found is None:
        return NotImplemented
    at, dim = found
    if at is not None and index[at] != slice(None):
        return _sliced(value, index, at, dim)
    return value.like(value.local[index], dim)


def _index_of_split(value: Sharded, index: tuple[Any, ...]) -> tuple[int | None, int] | None:
    """Where in ``index`` the divided dim is (None: not named), and which dim of the result it becomes."""
    given = [item for item in index if item is not None and item is not Ellipsis]
    if not all(isinstance(item, (int, slice)) and not isinstance(item, bool) for item in given):
        return _after_tensor_index(value, index)
    source = target = 0
    for position, item in enumerate(index):
        if item is None:
            target += 1
        elif item is Ellipsis:
            skipped = value.dim() - len(given)
            if source <= value.split_dim < source + skipped:
                break
            source, target = source + skipped, target + skipped
        elif source == value.split_dim:
            return (position, target) if isinstance(item, slice) else None
        else:
            source, target = source + 1, target + isinstance(item, slice)
    return None, target + value.split_dim - source


def _after_tensor_index(value: Sharded, index: tuple[Any, ...]) -> tuple[None, int] | None:
    """One mask or integer tensor in front of the divided dim, and nothing else."""
    if len(index) != 1 or not isinstance(index[0], Tensor) or type(index[0]) is Sharded:
        return None
    where = index[0]
    is_mask = where.dtype in (torch.bool, torch.uint8)
    used, made = (where.dim(), 1) if is_mask else (1, where.dim())
    return (None, value.split_dim - used + made) if used <= value.split_dim else None


def _sliced(value: Sharded, index: tuple[Any, ...], at: int, dim: int) -> Any:
    """A slice of the divided dim that holds whole parts."""
    start, stop, step = index[at].indices(value.split_size)
    length, size = value.split_size // value.parts, value.runtime.group.size
    if step != 1 or start % length or stop % length or stop <= start:
        return NotImplemented
    local = (*index[:at], slice(start // size, stop // size), *index[at + 1 :])
    return value.like(value.local[local], dim, (stop - start) // length)


@rule(Tensor.__setitem__)
def _setitem(func: Any, args: Args, kwargs: Kwargs) -> Any:
    target, index, new = args
    if type(target) is not Sharded:
        return NotImplemented
    found = _index_of_split(target, index if isinstance(index, tuple) else (index,))
    if found is None:
        return NotImplemented
    at, dim = found
    if at is not None and (index if isinstance(index, tuple) else (index,))[at] != slice(None):
        return NotImplemented
    part = target.local[index]
    func(target.local, index, aligned(new, target.like(part, dim), part.dim() - dim, func))
    return None


# --------------------------------------------------------------------------------------------------------------- joins


@rule(*functions("cat concat concatenate"))
def _cat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def arguments(tensors: Sequence[Tensor], dim: int = 0, **named: Any) -> tuple[Sequence[Tensor], int, bool]:
        return tensors, dim, bool(named)

    tensors, dim, unknown = arguments(*args, **kwargs)
    lead = find_sharded(tensors)
    if lead is None or unknown or normal(dim, lead.dim()) == lead.split_dim:
        return NotImplemented
    tensors = [tensor for tensor in tensors if tensor.shape != (0,)]  # as caches of keys and values begin
    back = lead.dim() - lead.split_dim
    if any(tensor.dim() != lead.dim() for tensor in tensors):
        return NotImplemented
    return lead.like(torch.cat([aligned(tensor, lead, back, func) for tensor in tensors], dim))


@rule(*functions("stack"))
def _stack(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def arguments(tensors: Sequence[Tensor], dim: int = 0) -> tuple[Sequence[Tensor], int]:
        return tensors, dim

    tensors, dim = arguments(*args, **kwargs)
    lead = find_sharded(tensors)
    assert lead is not None
    back, dim = lead.dim() - lead.split_dim, normal(dim, lead.dim() + 1)
    local = torch.stack([aligned(tensor, lead, back, func) for tensor in tensors], dim)
    return lead.like(local, lead.split_dim + (dim <= lead.split_dim))


@rule(*functions("repeat_interleave"))
def _repeat_interleave(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def arguments(value: Any, repeats: Any, dim: int | None = None, **_: Any) -> tuple[Any, Any, int | None]:
        return value, repeats, dim

    value, repeats, dim = arguments(*args, **kwargs)
    if type(value) is not Sharded or not isinstance(repeats, int) or dim is None:
        return NotImplemented
    return value.like(value.local.repeat_interleave(repeats, dim))


@rule(*functions("flip"))
def _flip(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _reordered(func, args, kwargs, args[1:] or (kwargs["dims"],))


@rule(*functions("roll"))
def _roll(func: Any, args: Args, kwargs: Kwargs) -> Any:
    # Without dims all elements are one row.
    return _reordered(func, args, kwargs, (args[2] if len(args) > 2 else kwargs.get("dims", ()),))


def _reordered(func: Any, args: Args, kwargs: Kwargs, given: Args) -> Any:
    value, dims = args[0], _sizes(given)
    if not dims or value.split_dim in [normal(dim, value.dim()) for dim in dims]:
        return NotImplemented
    return value.like(func(value.local, *args[1:], **kwargs))
