"""Operations along a dim: sums and softmax, sorting and normalisation.

Along another dim than the sequence's they work on the part. Along the sequence, sums and means are added up over the
ranks; the rest gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d import _torch_private as private
from lightning_4d._torch_private import tree_map
from lightning_4d.parallel.context.communication import reduce_sum, use_whole
from lightning_4d.parallel.context.tensor import SequenceTensor, rule, wrap

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]

# The place of `dim` among the arguments, and its default: None where it must be given or means all.
_REDUCING = {
    "sum": 1, "nansum": 1, "mean": 1, "nanmean": 1, "prod": 1, "var": 1, "std": 1, "amax": 1, "amin": 1, "max": 1,
    "min": 1, "argmax": 1, "argmin": 1, "all": 1, "any": 1, "logsumexp": 1, "norm": 2, "median": 1, "nanmedian": 1,
    "count_nonzero": 1, "var_mean": 1, "std_mean": 1, "aminmax": -1, "vector_norm": 2,
}  # fmt: skip
_KEEPING = {
    "softmax": (1, None), "log_softmax": (1, None), "softmin": (1, None), "cumsum": (1, None), "cumprod": (1, None),
    "logcumsumexp": (1, None), "sort": (1, -1), "argsort": (1, -1), "topk": (2, -1), "normalize": (2, 1),
    "glu": (1, -1), "cummax": (1, None), "cummin": (1, None), "gather": (1, None), "roll": (2, None),
}  # fmt: skip
_PLACES = (torch, torch.Tensor, F, torch.special, torch.linalg, private.NN_FUNCTIONS)


def _functions(names: Mapping[str, Any]) -> list[Any]:
    return [getattr(place, name) for name in names for place in _PLACES if hasattr(place, name)]


def _name(func: Callable[..., Any]) -> str:
    """``norm`` of torch.linalg and ``softmax`` of torch.special go by longer names."""
    return func.__name__.removeprefix("linalg_").removeprefix("special_")


# ----------------------------------------------------------------------------------------------------- reductions


@rule(*_functions(_REDUCING))
def reduce(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Reduce other dims on the part; sums and means also over the ranks."""
    x = args[0] if args else None
    name = _name(func)
    if not isinstance(x, SequenceTensor) or kwargs.get("out") is not None:
        return NotImplemented
    dims = _dims(x, args, kwargs, _REDUCING[name])
    if dims is NotImplemented:
        return dims
    # torch.var(x, dim, unbiased, keepdim)
    keepdim = _keepdim(args, kwargs, _REDUCING[name] + (name in ("var", "std", "var_mean", "std_mean")))
    if x.sharding.dim not in dims:
        result = func(x.part, *args[1:], **kwargs)
        dim = x.sharding.dim - (0 if keepdim else sum(dim < x.sharding.dim for dim in dims))
        return tree_map(lambda part: wrap(part, x.sharding.at(dim)), result)
    dtype = kwargs.get("dtype")
    if name == "sum":
        return reduce_sum(_sum(x.part, dims, keepdim, dtype), x.sharding.groups)
    if name == "mean":
        return _mean(x, dims, keepdim, dtype)
    return NotImplemented


def _dims(x: SequenceTensor, args: Arguments, kwargs: Named, place: int) -> Any:
    """The dims that are reduced, from 0; NotImplemented for other forms of the function."""
    given = args[place] if 0 < place < len(args) else kwargs.get("dim")
    if given is None or given == ():
        return list(range(x.dim()))
    if isinstance(given, bool) or not isinstance(given, (int, tuple, list)):
        return NotImplemented  # max of two tensors, var(x, unbiased)
    return [dim % x.dim() for dim in ([given] if isinstance(given, int) else given)]


def _keepdim(args: Arguments, kwargs: Named, place: int) -> bool:
    """`keepdim` as a keyword, or as the last boolean argument."""
    given = kwargs.get("keepdim")
    if given is not None:
        return bool(given)
    return len(args) > place + 1 and isinstance(args[-1], bool) and args[-1]


def _sum(part: Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return part.sum(list(dims), keepdim=keepdim, dtype=dtype)


def _mean(x: SequenceTensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None) -> Any:
    dtype = dtype or x.part.dtype
    if not dtype.is_floating_point:
        return NotImplemented  # torch says that it cannot
    accurate = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = reduce_sum(_sum(x.part, dims, keepdim, accurate), x.sharding.groups)
    return (total / prod(x.shape[dim] for dim in dims)).to(dtype)


# ------------------------------------------------------------------------------------------- along a dim that stays


@rule(*_functions(_KEEPING))
def along(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Work along another dim than the sequence's."""
    x = args[0] if args else None
    place, default = _KEEPING[_name(func)]
    dim = args[place] if len(args) > place else kwargs.get("dim", default)
    if _name(func) == "gather":
        dim, index = (args[1] if len(args) > 1 else kwargs["dim"]), (args[2] if len(args) > 2 else kwargs.get("index"))
        return _gather_along(func, x, dim, index)
    if not isinstance(x, SequenceTensor) or not isinstance(dim, int) or kwargs.get("out") is not None:
        return NotImplemented
    if dim % x.dim() == x.sharding.dim:
        return NotImplemented
    return tree_map(lambda part: wrap(part, x.sharding), func(x.part, *args[1:], **kwargs))


def _gather_along(func: Callable[..., Any], x: Any, dim: int, index: Any) -> Any:
    """`torch.gather` of other dims, where values and indices have the same positions."""
    from lightning_4d.parallel.context.rules.align import aligned, lead_of

    lead = lead_of((x, index))
    if lead is None or x.dim() != index.dim() or dim % x.dim() == x.dim() - lead.back:
        return NotImplemented
    place = x.dim() - lead.back
    if x.shape[place] != index.shape[place]:
        return NotImplemented
    return lead.wrapped(func(aligned(x, lead, "gather"), dim, aligned(index, lead, "gather")))


@rule(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def norm(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Normalise the last dims."""
    return _normed(func, *args, **kwargs)


def _normed(func: Callable[..., Any], x: Any, normalized_shape: Sequence[int], *rest: Any, **named: Any) -> Any:
    if not isinstance(x, SequenceTensor) or x.sharding.dim >= x.dim() - len(normalized_shape):
        return NotImplemented
    groups = x.sharding.groups
    given = [use_whole(value, groups) if isinstance(value, Tensor) else value for value in rest]
    named = {name: use_whole(value, groups) if isinstance(value, Tensor) else value for name, value in named.items()}
    return wrap(func(x.part, normalized_shape, *given, **named), x.sharding)
