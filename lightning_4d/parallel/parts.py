"""What a tensor in parts has to offer so that another kind of tensor may hold it.

Tensors show a whole and hold this rank's part of it, along one mesh axis each. Where two axes divide one tensor, one
kind is inside the other: the part of a sequence that a rank holds may itself be a part of its features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_PARAMETER = "_lightning_4d_parameter"


class Divided(Tensor):
    """A tensor that may be inside another: it is divided along one dim, and shows the shape of the whole."""

    local: Tensor
    split_dim: int

    @abstractmethod
    def like(self, local: Tensor, dim: int | None = None) -> Tensor:
        """Return another tensor with this rank's part ``local``, divided as this one is, in another dim if given."""

    @abstractmethod
    def gathered(self, why: str = "whole tensor") -> Tensor:
        """Return the whole tensor. Which ranks must call: all that share it."""

    @classmethod
    @abstractmethod
    def run_as(cls, rule: Any, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call ``function``, which takes the arguments of the torch function ``rule``, as that one would be called."""


def inside(function: Callable[[Tensor], Tensor], tensor: Tensor, *dims: int) -> Tensor:
    """Return ``function(tensor)``, computed on the part inside a tensor that is divided.

    Args:
        function: keeps the number of dims, and works along ``dims`` only.
        tensor: where it is divided along one of ``dims``, it is made whole first.
        dims: not negative.

    Which ranks must call: all that share the tensor.
    """
    if not isinstance(tensor, Divided):
        return function(tensor)
    if tensor.split_dim in dims:
        return function(tensor.gathered())
    return tensor.like(function(tensor.local))


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor that is not divided. Which ranks must call: all that share it."""
    return tensor.gathered() if isinstance(tensor, Divided) else tensor


def empty_as_whole(shape: Sequence[int], part: Tensor) -> Tensor:
    """Return memory for the tensor of which ``part`` is a part, its dims in the order of the part's.

    That is how one process has it, and so in which order it draws noise.
    """
    order = sorted(range(part.dim()), key=lambda dim: (-part.stride(dim), dim))
    return torch.empty_permuted(tuple(shape), order, dtype=part.dtype, device=part.device)


def mark_parameter(tensor: Tensor) -> Tensor:
    """Say that ``tensor`` shows a parameter: its gradient is averaged over the ranks that train it, like all others."""
    vars(tensor)[_PARAMETER] = True
    return tensor


def is_parameter(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter, or shows one."""
    return isinstance(tensor, nn.Parameter) or _PARAMETER in vars(tensor)
