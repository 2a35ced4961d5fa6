"""Rules for functions along a dim: norms, softmax, sums. Where they do not touch the divided dim, they are local."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d.parallel.tensor import group as collectives
from lightning_4d.parallel.tensor.pointwise import aligned
from lightning_4d.parallel.tensor.shapes import normal
from lightning_4d.parallel.tensor.sharded import Sharded, entered, functions, rule

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@rule(F.layer_norm, torch.layer_norm)
def _layer_norm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def arguments(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> tuple[Any, Sequence[int], Tensor | None, Tensor | None, float]:
        return input, normalized_shape, weight, bias, eps

    value, shape, weight, bias, eps = arguments(*args, **kwargs)
    if _is_over(value, shape):
        mean = value.mean(dim=-1, keepdim=True)
        return _scaled(value - mean, weight, bias, eps)
    if not _is_outside(value, shape):
        return NotImplemented
    weight, bias = (_affine(value, parameter) for parameter in (weight, bias))
    return value.like(F.layer_norm(value.local, shape, weight, bias, eps))


@rule(F.rms_norm, torch.rms_norm)
def _rms_norm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def arguments(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> tuple[Any, Sequence[int], Tensor | None, float | None]:
        return input, normalized_shape, weight, eps

    value, shape, weight, eps = arguments(*args, **kwargs)
    if _is_over(value, shape):
        return _scaled(value, weight, None, torch.finfo(value.dtype).eps if eps is None else eps)
    if not _is_outside(value, shape):
        return NotImplemented
    return value.like(F.rms_norm(value.local, shape, _affine(value, weight), eps))


def _is_outside(value: Any, normalized_shape: Sequence[int]) -> bool:
    return type(value) is Sharded and value.split_dim < value.dim() - len(normalized_shape)


def _is_over(value: Any, normalized_shape: Sequence[int]) -> bool:
    """Whether it normalises over the divided dim and no other: two small all-reduces, in forward and in backward."""
    return type(value) is Sharded and value.split_dim == value.dim() - 1 and len(normalized_shape) == 1


def _scaled(value: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """Divide by the root mean square over the last dim, in float32 at least."""
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    result = (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(value.dtype)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _affine(value: Sharded, parameter: Tensor | None) -> Tensor | None:
    if parameter is None:
        return None
    parameter = parameter.gathered("a norm's parameter") if type(parameter) is Sharded else parameter
    return entered(parameter, value.runtime, "a norm's parameter, used with parts")


def _dims(value: Sharded, dim: Any) -> list[int]:
    if dim is None or dim == ():
        return list(range(value.dim()))
    return [normal(d, value.dim()) for d in ((dim,) if isinstance(dim, int) else dim)]


def _argument_dim(args: Args, kwargs: Kwargs, default: Any = None) -> Any:
    return kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else default


_KEEPS = "softmax log_softmax cumsum cumprod cummax cummin logcumsumexp normalize softmin"


@rule(*functions(_KEEPS))
def _along(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0] if args else None
    if type(value) is not Sharded:
        return NotImplemented
    if getattr(func, "__name__", "") == "normalize":
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 1)
    else:
        dim = _argument_dim(args, kwargs)
    if not isinstance(dim, int) or normal(dim, value.dim()) == value.split_dim:
        return NotImplemented
    local = func(value.local, *args[1:], **kwargs)
    return value.like(local) if isinstance(local, Tensor) else NotImplemented


_REDUCES = "sum mean prod amax amin norm vector_norm logsumexp std var all any nansum nanmean"


@rule(*functions(_REDUCES))
def _reduced(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0] if args else None
    name = getattr(func, "__name__", "")
    if type(value) is not Sharded or "out" in kwargs:
        return NotImplemented
    is_norm = name.removeprefix("linalg_") in ("norm", "vector_norm")
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None) if is_norm else _argument_dim(args, kwargs)
    if isinstance(dim, (bool, float)) or (name in ("std", "var") and dim is None):
        return NotImplemented
    dims = _dims(value, dim)
    if value.split_dim in dims:
        return _over_split(func, name, value, args, kwargs)
    keeps = kwargs.get("keepdim", _positional_keepdim(name, args))
    at = value.split_dim - (0 if keeps else sum(d < value.split_dim for d in dims))
    return value.like(func(value.local, *args[1:], **kwargs), at)


def _positional_keepdim(name: str, args: Args) -> bool:
    position = 3 if name.removeprefix("linalg_") in ("norm", "vector_norm", "std", "var") else 2
    return len(args) > position and args[position] is True


def _over_split(func: Any, name: str, value: Sharded, args: Args, kwargs: Kwargs) -> Any:
    if name not in ("sum", "mean"):
        return NotImplemented
    local = func(value.local, *args[1:], **kwargs)
    local = local / value.runtime.group.size if name == "mean" else local
    return collectives.sum_to_plain(local, value.runtime.group, f"{name} over a divided dim")


_DEFAULT_DIM = {"max": None, "min": None, "median": None}  # without a dim these are over all elements


@rule(*functions("max min median mode topk sort argsort kthvalue"))
def _with_indices(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if len(args) > 1 and isinstance(args[1], Tensor):
        return NotImplemented
    name = getattr(func, "__name__", "")
    at_dim = 2 if name in ("topk", "kthvalue") else 1
    dim = kwargs.get("dim", args[at_dim] if len(args) > at_dim else _DEFAULT_DIM.get(name, -1))
    if not isinstance(dim, int) or isinstance(dim, bool) or normal(dim, value.dim()) == value.split_dim:
        return NotImplemented
    result = func(value.local, *args[1:], **kwargs)
    single = isinstance(result, Tensor)
    outputs = [result] if single else list(result)
    drops = outputs[0].dim() < value.dim() and normal(dim, value.dim()) < value.split_dim
    parts = [value.like(output, value.split_dim - drops) for output in outputs]
    return parts[0] if single else type(result)(parts)


@rule(*functions("argmax"))
def _argmax(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Over a divided dim: each rank's own maximum, then the first of the largest. Gathers two numbers, not all."""

    def arguments(input: Any, dim: int | None = None, keepdim: bool = False) -> tuple[Any, int | None, bool]:
        return input, dim, keepdim

    value, dim, keepdim = arguments(*args, **kwargs)
    if dim is None or value.parts != 1:
        return NotImplemented
    dim = normal(dim, value.dim())
    if dim != value.split_dim:
        return value.like(value.local.argmax(dim, keepdim), value.split_dim - (dim < value.split_dim and not keepdim))
    group = value.runtime.group
    largest, where = value.local.detach().max(dim, keepdim=True)
    largest = group.all_gather(largest, dim, "argmax")
    where = group.all_gather(where + group.rank * value.local.shape[dim], dim, "argmax")
    found = where.gather(dim, largest.argmax(dim, keepdim=True))
    return found if keepdim else found.squeeze(dim)


@rule(*functions("gather"))
def _torch_gather(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``torch.gather`` along another dim, with indices that have the divided dim whole."""
    if kwargs or len(args) != 3 or type(args[0]) is not Sharded:
        return NotImplemented
    value, dim, index = args
    dim = normal(dim, value.dim())
    if dim == value.split_dim or index.dim() != value.dim() or index.shape[value.split_dim] != value.split_size:
        return NotImplemented
    back = value.dim() - value.split_dim
    return value.like(value.local.gather(dim, aligned(index, value, back, func)))
