"""Rules for functions that treat each element by itself: they run on this rank's part.

A plain tensor that meets a part is cut to match where it has the divided dim, and used as it is where it is broadcast
over that dim; then its gradient is the sum over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d._torch_private import nn_builtins, without_torch_function
from lightning_4d.parallel.tensor.sharded import (
    RULES,
    Sharded,
    changes_first,
    cut_like,
    entered,
    function_name,
    functions,
    getter,
    refusal,
    rule,
)

_NAMES = """
abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor
bfloat16 bool ceil celu clamp clamp_max clamp_min clip clone contiguous copy_ copysign cos cosh deg2rad detach div
divide double elu eq erf erfc erfinv exp exp2 expm1 fill_ float floor floor_divide fmax fmin fmod frac ge gelu
greater greater_equal gt half hardshrink hardsigmoid hardswish hardtanh int isclose isfinite isinf isnan ldexp
le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor
logit logsigmoid long lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative nextafter not_equal
positive pow rad2deg real reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc
sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc
where xlogy zero_ zeros_like ones_like empty_like full_like
"""
_OPERATORS = """
add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv div rdiv idiv floordiv rfloordiv ifloordiv mod rmod
imod pow rpow ipow neg pos abs invert and rand iand or ror ior xor rxor ixor eq ne lt le gt ge
"""


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on this rank's part; see the module's docstring."""
    lead = next((value for value in (*args, *kwargs.values()) if type(value) is Sharded), None)
    if lead is None or "out" in kwargs:
        return NotImplemented
    first = args[0] if args else None
    in_place = changes_first(func)
    if in_place and type(first) is not Sharded:
        return NotImplemented
    back = lead.dim() - lead.split_dim  # the divided dim, counted from the last
    if first is not lead and type(first) is Sharded:
        lead, back = first, first.dim() - first.split_dim
    local = func(
        *(aligned(value, lead, back, func) for value in args),
        **{key: aligned(value, lead, back, func) for key, value in kwargs.items()},
    )
    if in_place:
        return first
    if not isinstance(local, Tensor):
        return NotImplemented  # torch.where(condition) finds places, which are of the whole tensor
    result = lead.like(local, local.dim() - back)
    if lead.runtime.on_gather is not None:
        result.origin = frozenset().union(*(value.origin for value in args if type(value) is Sharded))
    return result


def aligned(value: Any, lead: Sharded, back: int, func: Any) -> Any:
    """This rank's part of an operand, to go with ``lead``, whose divided dim is the ``back``-th from the last."""
    if not isinstance(value, Tensor):
        return value
    if type(value) is Sharded:
        if value.dim() - value.split_dim == back and value.parts == lead.parts and value.split_size == lead.split_size:
            return value.local
        value.runtime.name_gather(func, value)
        value = value.gathered(f"{function_name(func)} with a tensor that is divided otherwise")
    if value.dim() >= back and value.shape[-back] == lead.split_size:
        return cut_like(value, value.dim() - back, lead, function_name(func))
    if value.dim() >= back and value.shape[-back] != 1:
        # It would go with this rank's share by accident only.
        raise RuntimeError(
            f"The size of tensor a ({lead.split_size}) must match the size of tensor b ({value.shape[-back]}) at "
            f"dimension -{back} in {function_name(func)}, for shapes {tuple(lead.shape)} and {tuple(value.shape)}"
        )
    return entered(value, lead.runtime, function_name(func))


for _function in functions(_NAMES):
    RULES[_function] = pointwise
for _function in functions(" ".join(f"{name}_" for name in _NAMES.split() if not name.endswith("_"))):
    RULES[_function] = pointwise
for _function in functions(" ".join(f"__{name}__" for name in _OPERATORS.split()), (Tensor,)):
    RULES[_function] = pointwise
# The functions behind F.gelu and others, where torch.nn.functional calls them with the tensor itself.
for _function in nn_builtins("gelu silu silu_ mish softplus hardtanh hardswish leaky_relu elu"):
    RULES[_function] = pointwise


@rule(Tensor.to, Tensor.type, Tensor.type_as)
def _converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert the first argument; a second tensor only says to what."""
    local = func(*map(_local, args), **{name: _local(value) for name, value in kwargs.items()})
    first = args[0]
    return first.like(local) if type(first) is Sharded and isinstance(local, Tensor) else local


def _local(value: Any) -> Any:
    return value.local if type(value) is Sharded else value


@rule(*getter("data"))
def _data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].like(args[0].local.data)


@rule(
    *getter("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "layout", "itemsize", "is_leaf")
)
@rule(
    *getter(
        "dtype",
        "device",
        "is_mps",
        "is_xpu",
        "is_mkldnn",
        "is_complex",
        "names",
        "nbytes",
        "_version",
        "output_nr",
        "retains_grad",
    )
)
@rule(*functions("is_floating_point is_complex element_size is_contiguous is_pinned is_inference get_device is_signed"))
@rule(*functions("is_same_size retain_grad result_type stride"))
@rule(*functions("new_zeros new_ones new_empty new_full new_tensor"))
def _of_the_part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    local = tuple(value.local if type(value) is Sharded else value for value in args)
    return func(*local, **kwargs)


@rule(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, torch.autograd.grad)
@rule(*functions("share_memory_ set_ resize_ data_ptr storage untyped_storage"))
def _refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On a gathered copy these would do nothing, without a word."""
    raise refusal(function_name(func))


@rule(*getter("grad"))
def _gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient = args[0].local.grad
    return None if gradient is None else args[0].like(gradient)


@rule(Tensor.requires_grad_)
def _requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args[0].local.requires_grad_(*args[1:], **kwargs)
    with without_torch_function():
        func(*args, **kwargs)
    return args[0]


@rule(*functions("dropout alpha_dropout feature_dropout dropout_ feature_dropout_"), F.dropout1d, F.dropout2d)
def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from lightning_4d.parallel.tensor.randomness import dropout

    return dropout(func, args, kwargs)
