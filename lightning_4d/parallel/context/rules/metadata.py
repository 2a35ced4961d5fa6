"""Questions about a tensor that its part, or its shape, answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_4d.parallel.context.tensor import SequenceTensor, rule

_PROPERTIES = """
is_cuda is_cpu is_xpu is_mps is_meta is_sparse is_sparse_csr is_quantized is_mkldnn is_nested is_ipu is_xla is_maia
is_mtia is_vulkan layout itemsize names output_nr name device dtype
"""
_METHODS = """
is_floating_point is_complex is_signed is_inference is_contiguous is_conj is_neg is_same_size element_size
get_device is_pinned is_shared new_zeros new_ones new_empty new_full new_tensor is_coalesced
"""


def _functions() -> list[Any]:
    properties = [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(torch.Tensor, name)]
    methods = [getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)]
    return [*properties, *methods, torch.is_floating_point, torch.is_complex, torch.result_type, torch.get_device]


@rule(*_functions())
def of_the_part(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Ask the part."""
    return func(*(arg.part if isinstance(arg, SequenceTensor) else arg for arg in args), **kwargs)


@rule(torch.Tensor.nbytes.__get__)  # pyright: ignore[reportAttributeAccessIssue]
def nbytes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Of the whole tensor."""
    return args[0].numel() * args[0].part.element_size()


@rule(torch.numel)
def numel(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Of the whole tensor."""
    return args[0].numel()


@rule(torch.Tensor.stride)
def stride(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Of a whole tensor with its dims in memory in the order of the part's."""
    x = args[0]
    strides, step = [0] * x.dim(), 1
    for dim in sorted(range(x.dim()), key=lambda dim: (x.part.stride(dim), -dim)):
        if x.part.stride(dim) or x.part.shape[dim] == 1:
            strides[dim], step = step, step * x.shape[dim]
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    return tuple(strides) if given is None else strides[given]
