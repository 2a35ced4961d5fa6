"""Stand-ins for parameters that another rank holds.

A pipeline rank holds the parameters of its own stages. The others keep their names and shapes, so that optimizers,
``named_parameters`` and summaries see the whole model, but share one element of memory and are never trained or saved.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_4d.errors import UnsupportedError, explain

# Their code reads the gradient of every parameter in turn and does what is right for each.
_READERS = ("torch", "lightning", "pytorch_lightning", "lightning_4d")
_GRADIENT: Any = Tensor.grad  # the descriptor
_REMEDY = (
    "use the Trainer's gradient_clip_val or self.clip_gradients() to clip, and "
    "lightning_4d.parallel.gradients.gradient_norms(module) for norms: they count every stage"
)


class AbsentParameter(nn.Parameter):
    """Stands in for a parameter that another pipeline stage holds; has no gradient, and says so to who asks."""

    @property
    def grad(self) -> Tensor | None:
        """None. What sums over all gradients by itself would count this rank's stages only.

        Raises:
            UnsupportedError: ``torch.nn.utils.clip_grad_norm_`` asks, which would scale each stage by its own norm.
        """
        caller = _outside_comprehensions(sys._getframe(1))
        if caller.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
            _refuse_own_norm(caller)
        elif _is_by_hand(caller):
            _warn_by_hand(caller)
        return _GRADIENT.__get__(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRADIENT.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _GRADIENT.__delete__(self)


def _outside_comprehensions(frame: FrameType) -> FrameType:
    """The function that a comprehension stands in: before Python 3.12 it has a frame of its own."""
    while frame.f_code.co_name.startswith("<") and frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _refuse_own_norm(caller: FrameType) -> None:
    if "norm" not in caller.f_code.co_name:
        return  # clipping by value is right stage by stage
    raise UnsupportedError(
        explain(
            "torch.nn.utils.clip_grad_norm_ over parameters of which other pipeline stages hold some",
            "it would scale the gradients of each stage by the norm of that stage",
            _REMEDY,
        )
    )


def _is_by_hand(caller: FrameType) -> bool:
    """Whether a user's code asks, not that of a library or an optimizer, which take each parameter by itself."""
    package = str(caller.f_globals.get("__name__", "")).partition(".")[0]
    return package not in _READERS and not isinstance(caller.f_locals.get("self"), torch.optim.Optimizer)


def _warn_by_hand(caller: FrameType) -> None:
    warnings.warn_explicit(
        "the gradient of a parameter that another pipeline stage holds is None on this rank: a norm or sum over all "
        f"gradients made here counts this rank's stages only, and differs from rank to rank; {_REMEDY}",
        UserWarning,
        caller.f_code.co_filename,
        caller.f_lineno,
        registry=_WARNED,
    )


_WARNED: dict[Any, Any] = {}  # once for each line


def is_absent(parameter: object) -> bool:
    """Whether ``parameter`` is a stand-in for one that another rank holds."""
    return type(parameter) is AbsentParameter  # not isinstance: parameters answer that in Python, for each in turn


def stand_in(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter of the same shape, dtype and marks that takes one element of memory.

    Its values are nan: whatever uses them where they do not count changes nothing, and anything else shows.
    """
    value = float("nan") if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
    empty = torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)
    result = AbsentParameter(empty, requires_grad=parameter.requires_grad)
    vars(result).update(vars(parameter))
    return result


class Released:
    """Replaces parameters by stand-ins, module by module.

    Args:
        is_released: whether another rank holds the parameter that a module keeps under a name.
        device: of the stand-ins.
    """

    def __init__(self, is_released: Callable[[nn.Module, str], bool], device: torch.device) -> None:
        self._is_released = is_released
        self._device = device
        self._made: dict[nn.Parameter, nn.Parameter] = {}  # a parameter with several owners gets one

    def release(self, modules: Iterable[nn.Module]) -> None:
        """Replace what ``modules`` (not their children) hold themselves."""
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None or is_absent(parameter) or not self._is_released(module, name):
                    continue
                if parameter not in self._made:
                    self._made[parameter] = stand_in(parameter, self._device)
                module._parameters[name] = self._made[parameter]


def absent_names(module: nn.Module) -> set[str]:
    """Return all names, tied ones too, under which ``module`` holds stand-ins: what its state dict leaves out."""
    return {name for name, p in module.named_parameters(remove_duplicate=False) if is_absent(p)}
