"""Stand-ins for parameters that another rank holds.

A pipeline rank holds the parameters of its own stages. The others keep their names and shapes, so that optimizers,
``named_parameters`` and summaries see the whole model, but share one element of memory and are never trained or saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

_MARK = "_lightning_4d_absent"


def is_absent(parameter: object) -> bool:
    """Whether ``parameter`` is a stand-in for one that another rank holds."""
    return getattr(parameter, _MARK, False) is True


def stand_in(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter of the same shape, dtype and marks that takes one element of memory; its values are zeros."""
    empty = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    result = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    vars(result).update(vars(parameter))
    setattr(result, _MARK, True)
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
