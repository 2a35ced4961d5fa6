"""A recompute must leave no trace: buffers, attributes and lists that a forward changes are changed once, not twice.

Running statistics are the well-known case: a batch norm that is recomputed would count each batch twice.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.recompute.tensors import version

_OF_TORCH = set(vars(nn.Module())) - {"training"}  # names torch keeps in a module for its own purposes
_CONTAINERS = (list, dict, set, deque)


class BlockState:
    """Tells which submodules of a block keep tensors that their forward changes, and protects them in a recompute.

    Args:
        name: dotted name of the block.
        block: the block.
    """

    def __init__(self, name: str, block: nn.Module) -> None:
        self._name = name
        self._block = block
        self._changing: set[nn.Module] = set()
        self._known: set[bool] = set()  # the modes, training or not, in which a forward was watched

    def before_forward(self) -> list[tuple[nn.Module, list[Any]]] | None:
        """Begin to watch a forward, if one like this has not been watched yet."""
        if self._block.training in self._known:
            return None
        self._known.add(self._block.training)
        return [(module, _fingerprint(module)) for module in self._block.modules()]

    def after_forward(self, before: list[tuple[nn.Module, list[Any]]] | None) -> None:
        """End to watch it."""
        self._changing.update(module for module, looks in before or () if _fingerprint(module) != looks)

    def frozen(self) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        """What must be equal in a recompute: training flags, and versions of the parameters."""
        modes = tuple(module.training for module in self._block.modules())
        return modes, tuple(version(parameter) for parameter in self._block.parameters())

    @contextlib.contextmanager
    def protected(self, frozen: tuple[tuple[bool, ...], tuple[int, ...]]) -> Iterator[None]:
        """Run a recompute in the body, with training flags as ``frozen``, and undo what it changes.

        Raises:
            UnsupportedError: parameters changed since the forward, or a tensor changed that a first forward did not.
        """
        modules = list(self._block.modules())
        modes, versions = self.frozen()
        if versions != frozen[1] and len(versions) == len(frozen[1]):
            raise UnsupportedError(
                explain(
                    f"parameters of block {self._name!r} changed between forward and backward",
                    "a recompute would use the new values, and its gradient would be wrong",
                    "call backward before the optimizer steps",
                )
            )
        snapshots = [_Snapshot(module, module in self._changing) for module in modules]
        watched = [(module, _fingerprint(module)) for module in modules if module not in self._changing]
        try:
            _set_modes(modules, modes, frozen[0])
            yield
            self._check(watched)
        finally:
            _set_modes(modules, frozen[0], modes)
            for snapshot in snapshots:
                snapshot.restore()

    def _check(self, watched: list[tuple[nn.Module, list[Any]]]) -> None:
        for module, looks in watched:
            if len(looks) == len(now := _fingerprint(module)) and now != looks:
                self._changing.add(module)
                raise UnsupportedError(
                    explain(
                        f"a recompute of block {self._name!r} changed a buffer of its {type(module).__name__}",
                        "a buffer that changes only in some forwards would be changed twice",
                        "change it in every training forward, or outside the block",
                    )
                )


def _set_modes(modules: list[nn.Module], now: tuple[bool, ...], wanted: tuple[bool, ...]) -> None:
    if now != wanted and len(wanted) == len(modules):
        for module, mode in zip(modules, wanted, strict=True):
            module.training = mode


def _tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The tensors that the module itself holds, parameters apart: where, under which name."""
    for name, value in module._buffers.items():
        if value is not None:
            yield module._buffers, name, value
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            yield vars(module), name, value


def _fingerprint(module: nn.Module) -> list[Any]:
    # Identity is left out: a tensor that is replaced is put back by the snapshot without knowing beforehand.
    return [(name, version(tensor)) for _, name, tensor in _tensors(module) if tensor.grad_fn is None]


class _Snapshot:
    """What one module holds, and how to put it back. Tensors that change in place are lent a copy meanwhile."""

    def __init__(self, module: nn.Module, changing: bool) -> None:
        self._module = module
        self._buffers = dict(module._buffers)
        self._attributes = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        self._contents = {n: v.copy() for n, v in self._attributes.items() if type(v) in _CONTAINERS}
        if changing:
            with torch.no_grad():
                for holder, name, tensor in list(_tensors(module)):
                    holder[name] = tensor.detach().clone()

    def restore(self) -> None:
        module = self._module
        module._buffers.update(self._buffers)
        for name, content in self._contents.items():
            self._put_back(self._attributes[name], content)
        attributes = vars(module)
        for name in [n for n in attributes if n not in _OF_TORCH and n not in self._attributes]:
            del attributes[name]
        attributes.update(self._attributes)

    @staticmethod
    def _put_back(container: Any, content: Any) -> None:
        if len(container) != len(content) or any(a is not b for a, b in zip(container, content)):
            container.clear()
            (container.update if isinstance(container, (dict, set)) else container.extend)(content)
        elif isinstance(container, dict):
            container.update(content)
