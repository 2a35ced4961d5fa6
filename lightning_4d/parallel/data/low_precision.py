"""Gather weights in the dtype that autocast would cast them to anyway, with the numbers of autocast.

Under ``torch.autocast`` a linear layer casts its fp32 weight to bf16, and casts the weight's gradient back. Sharded
weights may as well be cast before they are gathered: half the traffic, the same numbers, as long as the weight does
nothing else. Which weights do nothing else is seen in the training forwards before the first optimizer step: those
used exactly once in each, by an operation of autocast's lower-precision list. All others are gathered as they are.

Evaluation and calls from outside a training step gather as stored, since they may run without autocast.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from lightning_4d import _torch_private as private

# Operations that autocast runs in lower precision on CPU and on CUDA, whose every floating argument it casts.
# torch documentation, "Automatic Mixed Precision package", autocast op reference.
_CAST = (
    F.linear,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.mm,
    torch.Tensor.mm,
    torch.addmm,
    F.conv1d,
    F.conv2d,
    F.conv3d,
)
# Attributes that do not depend on the dtype. Not `dtype` itself: `x.to(self.weight.dtype)` is common.
_HARMLESS = {"shape", "device", "ndim", "requires_grad", "is_leaf", "is_cuda", "is_meta", "layout", "grad", "grad_fn"}
_HARMLESS |= {"_version"}  # activation checkpointing compares it

_HARMLESS_METHODS = {"size", "dim", "numel", "stride", "requires_grad_", "is_floating_point", "is_inference"}


class LowPrecisionGather:
    """Chooses the weights to gather in ``dtype``, and switches them for training steps.

    Args:
        units: the FSDP modules, equal on all ranks.
        dtype: autocast's lower-precision dtype.
        group: process group of all data-parallel ranks.
        device: the device of the parameters.
    """

    def __init__(
        self, units: Sequence[FSDPModule], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._dtype = dtype
        self._group = group
        self._device = device
        self._parameters = list(private.fsdp_parameters(units))
        self._observer: _Observer | None = _Observer(self._parameters, device.type, dtype)
        self._chosen: list[Any] = []
        self._active = False

    @property
    def chosen_names(self) -> list[str]:
        """The parameters gathered in lower precision; empty until the first optimizer step."""
        return [parameter._param_fqn for parameter in self._chosen]

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Watch one training forward, if the choice is still open."""
        if self._observer is None:
            yield
            return
        # Compiled code hides its operations; it is compiled one step later.
        with torch.compiler.set_stance("force_eager"), self._observer:
            yield
        self._observer.end_forward()

    def choose(self) -> None:
        """Choose, once, after the first optimizer step, when no gradient is pending.

        Which ranks must call: all data-parallel ranks.
        """
        if self._observer is None or not self._observer.forwards:
            return
        mine = [self._observer.is_cast(parameter) for parameter in self._parameters]
        votes = torch.tensor(mine, dtype=torch.uint8, device=self._device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        self._chosen = [p for p, vote in zip(self._parameters, votes.tolist(), strict=True) if vote]
        self._observer = None
        self._active = False  # nothing was chosen so far: the next training step puts the choice into effect

    def activate(self, active: bool) -> None:
        """Gather the chosen weights in lower precision, or as they are stored. All parameters must be sharded."""
        if active == self._active:
            return
        self._active = active
        for parameter in self._chosen:
            private.fsdp_gather_in(parameter, self._dtype if active else None)


class _Observer(TorchFunctionMode):
    """Counts, in one forward, the uses of each gathered parameter that autocast casts, and finds all other uses."""

    def __init__(self, parameters: Sequence[Any], device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.forwards = 0
        self._parameters = parameters
        self._device_type = device_type
        self._dtype = dtype
        self._by_gathered: dict[nn.Parameter, Any] = {}
        self._cast: Counter[Any] = Counter()
        self._ever_cast: set[Any] = set()
        self._otherwise: set[Any] = set()

    def is_cast(self, parameter: Any) -> bool:
        """Whether autocast is all that ever happened to the parameter."""
        return parameter in self._ever_cast and parameter not in self._otherwise

    def end_forward(self) -> None:
        """Close the counts of one forward."""
        self.forwards += 1
        self._ever_cast.update(self._cast)
        self._otherwise.update(parameter for parameter, count in self._cast.items() if count > 1)
        self._cast.clear()
        self._by_gathered.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        used = [p for p in _parameters_in((args, kwargs)) if not _is_harmless(func)]
        for gathered in used:
            self._note(gathered, func)
        return func(*args, **(kwargs or {}))

    def _note(self, gathered: nn.Parameter, func: Callable[..., Any]) -> None:
        if gathered not in self._by_gathered:
            self._by_gathered = {p._unsharded_param: p for p in self._parameters if hasattr(p, "_unsharded_param")}
        parameter = self._by_gathered.get(gathered)
        if parameter is None:
            return
        if func in _CAST and self._autocasts() and gathered.dtype == torch.float32:
            self._cast[parameter] += 1
        else:
            self._otherwise.add(parameter)

    def _autocasts(self) -> bool:
        return (
            torch.is_autocast_enabled(self._device_type) and torch.get_autocast_dtype(self._device_type) == self._dtype
        )


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _parameters_in(item)
    elif isinstance(value, dict):
        yield from _parameters_in(list(value.values()))


def _is_harmless(func: Callable[..., Any]) -> bool:
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in _HARMLESS
    return getattr(func, "__name__", "") in _HARMLESS_METHODS
