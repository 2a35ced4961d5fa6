"""Operations on each element by itself, also in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d import _torch_private as private
from lightning_4d.parallel.context.communication import take_part
from lightning_4d.parallel.context.rules.align import aligned, broadcasts, lead_of
from lightning_4d.parallel.context.tensor import SequenceTensor, rule, wrap
from lightning_4d.parallel.parts import empty_as_whole

_UNARY = """
abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil
clamp clamp_max clamp_min clip conj conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor
frac i0 isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not logit nan_to_num neg
negative positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh
trunc hardshrink threshold celu selu elu gelu silu mish softplus softsign relu6 leaky_relu hardtanh hardswish
hardsigmoid logsigmoid tanhshrink softshrink
"""
_BINARY = """
add addcdiv addcmul arctan2 atan2 bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift copysign
div divide eq floor_divide float_power fmax fmin fmod ge greater greater_equal gt heaviside hypot isclose ldexp le
lerp less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt masked_fill maximum minimum mul
multiply ne nextafter not_equal pow remainder rsub sub subtract true_divide where xlogy
"""
_METHODS = """
float double half bfloat16 long int short char byte bool cfloat cdouble cpu cuda contiguous clone detach copy_ zero_
fill_ __abs__ __neg__ __pos__ __invert__ __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__
__imul__ __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__ __floordiv__ __rfloordiv__ __ifloordiv__
__mod__ __rmod__ __imod__ __pow__ __rpow__ __ipow__ __and__ __rand__ __iand__ __or__ __ror__ __ior__ __xor__
__rxor__ __ixor__ __lshift__ __rlshift__ __ilshift__ __rshift__ __rrshift__ __irshift__ __eq__ __ne__ __lt__ __le__
__gt__ __ge__
"""


def _functions() -> Iterator[Any]:
    for name in (_UNARY + _BINARY).split():
        for spelling in (name, name + "_"):
            for place in (torch, torch.Tensor, F, torch.special, private.NN_FUNCTIONS):
                if hasattr(place, spelling):
                    yield getattr(place, spelling)
    for name in _METHODS.split():
        if hasattr(torch.Tensor, name):
            yield getattr(torch.Tensor, name)
    yield torch.clone


def _changes(name: str) -> bool:
    """Whether a function of that name changes its first argument."""
    if name.startswith("__"):
        return name.startswith("__i") and name != "__invert__"
    return name.endswith("_")


@rule(*_functions())
def elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run on parts that are brought in line; in place, the first argument is the one that others follow."""
    if not kwargs and (parts := _alike(args)) is not None and not _changes(func.__name__):
        alike = func(*parts)
        return wrap(alike, args[0].sharding) if isinstance(alike, Tensor) else NotImplemented
    if kwargs and kwargs.get("out") is not None:
        return NotImplemented
    name = getattr(func, "__name__", "")
    lead = lead_of((*args, *kwargs.values()) if kwargs else args)
    if lead is None:  # inside a list, where nothing elementwise takes tensors
        return NotImplemented
    in_place = _changes(name) or bool(kwargs.get("inplace"))
    if in_place and not isinstance(args[0], SequenceTensor):
        return NotImplemented
    if not all(broadcasts(value, lead) for value in (*args, *kwargs.values())):
        return NotImplemented
    given = [aligned(value, lead, name) for value in args]
    named = {key: aligned(value, lead, name) for key, value in kwargs.items()}
    result = func(*given, **named)
    if in_place:
        return args[0]
    # torch.where(condition) finds places, which are of the whole tensor.
    return lead.wrapped(result) if isinstance(result, Tensor) else NotImplemented


def _alike(args: tuple[Any, ...]) -> list[Any] | None:
    """The parts of sequences that are divided the very same way, and numbers; None for all else. For speed alone."""
    first = args[0]
    if type(first) is not SequenceTensor:
        return None
    sharding, dims = first.sharding, first.ndim
    parts = []
    for arg in args:
        if type(arg) is SequenceTensor and arg.sharding is sharding and arg.ndim == dims:
            parts.append(arg.part)
        elif isinstance(arg, (int, float)):
            parts.append(arg)
        else:
            return None
    return parts


@rule(torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as)
def convert(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Convert the first argument; a second one only says to what."""
    result = func(*map(_part_of, args), **{name: _part_of(value) for name, value in kwargs.items()})
    is_converted = isinstance(args[0], SequenceTensor) and isinstance(result, Tensor)
    return wrap(result, args[0].sharding) if is_converted else result


def _part_of(value: Any) -> Any:
    return value.part if isinstance(value, SequenceTensor) else value


@rule(torch.Tensor.data.__get__)  # pyright: ignore[reportAttributeAccessIssue]
def data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The part without its graph."""
    return wrap(args[0].part.detach(), args[0].sharding)


_LIKE = [torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like]


@rule(*_LIKE)
def like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A part of the same shape."""
    x = args[0] if args else None
    if not isinstance(x, SequenceTensor):
        return NotImplemented
    return wrap(func(x.part, *args[1:], **kwargs), x.sharding)


@rule(F.dropout, torch.dropout, torch.dropout_, torch.native_dropout)
def dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Draw for the whole tensor and take this rank's part: the numbers of one process, and random states stay equal."""
    if func is not F.dropout:
        return NotImplemented
    return _dropout(*args, **kwargs)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not isinstance(input, SequenceTensor) or not 0.0 <= p <= 1.0:
        return NotImplemented
    if not training or p == 0.0:
        return input
    noise = F.dropout(empty_as_whole(input.shape, input.part).fill_(1.0), p)
    noise = take_part(noise, input.sharding)
    if inplace:
        input.part.mul_(noise)
        return input
    return wrap(input.part * noise, input.sharding)
