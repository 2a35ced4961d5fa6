"""Run a module's code on fake tensors and leave no trace: parameters, buffers, attributes, hooks and random states.

The module is changed in place for the duration, since user code may hold references to it, and restored after it.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_4d import _torch_private as private

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_LONG = 10_000  # longer lists inside attributes are data, not something that a step appends to
_FOREIGN = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "numpy", "builtins")
# Forward hooks of these packages gather, cast and recompute; they say nothing about what the model computes.
_LAYOUT_HOOKS = ("torch.distributed", "lightning_4d")


@contextmanager
def faked(module: nn.Module, device: torch.device, overrides: Mapping[str, Any]) -> Iterator[FakeRun]:
    """Make all parameters and buffers of ``module`` fake and whole, and yield a converter for other tensors.

    Inside, nothing is computed: tensors have shapes only. Parameters that are sharded appear in their global shape.
    Hooks of FSDP and of activation checkpointing are off, compiled code runs uncompiled, torchmetrics do nothing.

    Args:
        module: any module, on any device, sharded or not.
        device: where its tensors pretend to be.
        overrides: attributes of ``module`` to replace meanwhile, such as its logging methods.

    Which ranks must call: none has to; there is no communication.
    """
    mode = private.fake_tensor_mode()
    with ExitStack() as stack:
        stack.enter_context(_random_states())
        stack.enter_context(_attributes(module))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and loading it would take seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        with mode:
            run = FakeRun(mode, device)
            for child in module.modules():
                run.replace_tensors(child)
                _drop_layout_hooks(child)
                _silence_metric(child)
        module.__dict__.update(overrides)
        stack.enter_context(mode)
        yield run


class FakeRun:
    """Makes fakes: of parameters and buffers, each once, and of a batch's tensors."""

    def __init__(self, mode: Any, device: torch.device) -> None:
        self._mode = mode
        self._device = device
        self.parameters: dict[int, nn.Parameter] = {}  # by the id of the real one
        self._buffers: dict[int, Tensor] = {}

    def replace_tensors(self, module: nn.Module) -> None:
        """Put fakes in the place of the module's own parameters and buffers."""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = self._parameter(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = self._buffer(buffer)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return the fake of a tensor of the batch, on the device it is on."""
        return self._mode.from_tensor(tensor.detach()) if type(tensor) is Tensor else tensor

    def whole(self, value: Any) -> Any:
        """Return an operation's argument with fakes in place of real tensors, which the operation could change.

        Raises:
            RuntimeError: a parameter of no module; its gradient would reach the real one.
        """
        if isinstance(value, (list, tuple)):
            return type(value)(self.whole(item) for item in value)
        if not isinstance(value, Tensor) or self._mode.is_our_fake(value):
            return value
        if value.requires_grad:
            raise RuntimeError(
                f"it trains a tensor of shape {tuple(value.shape)} that is no parameter of the module or its children"
            )
        return self._mode.from_tensor(value)

    def _parameter(self, real: nn.Parameter) -> nn.Parameter:
        if id(real) not in self.parameters:
            self.parameters[id(real)] = nn.Parameter(self._empty(real), real.requires_grad)
        return self.parameters[id(real)]

    def _buffer(self, real: Tensor) -> Tensor:
        if id(real) not in self._buffers:
            self._buffers[id(real)] = self._empty(real)
        return self._buffers[id(real)]

    def _empty(self, real: Tensor) -> Tensor:
        return torch.empty(real.shape, dtype=real.dtype, device=self._device)


def _drop_layout_hooks(module: nn.Module) -> None:
    private.restore_call(module)  # a pipeline's
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if _origin(hook).startswith(_LAYOUT_HOOKS):
                del hooks[key]


def _origin(hook: Any) -> str:
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    return str(getattr(hook, "__module__", None) or type(owner if owner is not None else hook).__module__ or "")


def _silence_metric(module: nn.Module) -> None:
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None or not isinstance(module, torchmetrics.Metric):
        return

    def nothing(*_: Any, **__: Any) -> None: ...

    def zero(*_: Any, **__: Any) -> Tensor:
        return torch.zeros(())

    module.__dict__.update(update=nothing, forward=zero, compute=zero, reset=nothing)


# ---------------------------------------------------------------------------------------------------------- restoring


@contextmanager
def _attributes(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of a module and all its children, and what they hold in lists, dicts and own objects."""
    memory: dict[int, Callable[[], None]] = {}
    kept: list[Any] = []  # ids stay valid while the objects live
    for child in module.modules():
        kept.append(child)
        _remember(child.__dict__, memory, depth=4)
    try:
        yield
    finally:
        for restore in memory.values():
            restore()


def _remember(value: Any, memory: dict[int, Callable[[], None]], depth: int) -> None:
    if depth == 0 or id(value) in memory or isinstance(value, (Tensor, nn.Module)):
        return
    if type(value) in _CONTAINERS:
        if len(value) > _LONG:
            return
        memory[id(value)] = _restorer(value)
        inside = value.values() if isinstance(value, dict) else value
    elif _is_own_object(value):
        inside = (value.__dict__,)
    else:
        return
    for item in list(inside):
        _remember(item, memory, depth - 1)


def _is_own_object(value: Any) -> bool:
    """Whether it is an instance of a user's class, whose state a step may change; not a library's, not a class."""
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _FOREIGN


def _restorer(container: Any) -> Callable[[], None]:
    copy = list(container.items()) if isinstance(container, dict) else list(container)

    def restore() -> None:
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(copy)
        else:
            container.update(copy)

    return restore


@contextmanager
def _random_states() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        state = random.getstate()
        stack.callback(random.setstate, state)
        if "numpy" in sys.modules:
            import numpy as np

            stack.callback(np.random.set_state, np.random.get_state())
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        yield
