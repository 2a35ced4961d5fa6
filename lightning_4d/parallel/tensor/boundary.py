"""Let sharded tensors cross the hooks that FSDP2 puts around a module.

FSDP2 sends a module's inputs and outputs through autograd Functions, which have to see ordinary tensors. So a module's
tensors are unwrapped before FSDP2's hooks and wrapped again after them: by hooks inside FSDP2's, which are registered
before those, and hooks outside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lightning_4d.parallel.tensor.sharded import Sharded

_Spec = tuple[int, int, Any, frozenset[str]] | None


class Boundaries:
    """The hooks of some modules around FSDP2's.

    Args:
        modules: those that FSDP2 will wrap, the root left out.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._crossings = [(module, _Crossing()) for module in modules]

    def install_inside(self) -> None:
        """Register the inner hooks: before FSDP2's, and after those that are to see whole tensors inside these."""
        for module, crossing in self._crossings:
            module.register_forward_pre_hook(crossing.wrap_inputs, prepend=True, with_kwargs=True)
            module.register_forward_hook(crossing.unwrap_output)

    def install_outside(self) -> None:
        """Register the outer hooks: after FSDP2's, and before those that are to see whole tensors outside these."""
        for module, crossing in self._crossings:
            module.register_forward_pre_hook(crossing.unwrap_inputs, prepend=True, with_kwargs=True)
            module.register_forward_hook(crossing.wrap_output)


class _Crossing:
    def __init__(self) -> None:
        self._specs: list[list[_Spec]] = []

    def unwrap_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        specs: list[_Spec] = []
        unwrapped = _mapped(lambda leaf: _unwrapped(leaf, specs), (args, kwargs))
        self._specs.append(specs)
        return unwrapped if any(specs) else None

    def wrap_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _wrapped(self._specs.pop(), (args, kwargs))

    def unwrap_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        specs: list[_Spec] = []
        unwrapped = _mapped(lambda leaf: _unwrapped(leaf, specs), output)
        self._specs.append(specs)
        return unwrapped if any(specs) else None

    def wrap_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _wrapped(self._specs.pop(), output)


def _unwrapped(leaf: Any, specs: list[_Spec]) -> Any:
    if type(leaf) is not Sharded:
        specs.append(None)
        return leaf
    leaf.check()
    specs.append((leaf.split_dim, leaf.parts, leaf.runtime, leaf.origin))
    return leaf.local


def _wrapped(specs: list[_Spec], value: Any) -> Any:
    if not any(specs):
        return None  # nothing to change
    following = iter(specs)

    def wrap(leaf: Any) -> Any:
        spec = next(following)
        return leaf if spec is None else Sharded(leaf, spec[0], spec[1], spec[2], spec[3])

    return _mapped(wrap, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(function, item) for item in value)
    if isinstance(value, dict):
        items = {key: _mapped(function, item) for key, item in value.items()}
        return items if type(value) is dict else _updated(value, items)
    return value


def _updated(value: Any, items: dict[Any, Any]) -> Any:
    for key, item in items.items():
        value[key] = item
    return value
