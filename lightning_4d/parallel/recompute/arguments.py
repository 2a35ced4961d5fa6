"""A block's arguments, remembered for its recompute: what the block before produces by reference, the rest by value.

Containers are rebuilt, so that a list or dict that the block or the user's loop changes afterwards is found as it was.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.recompute.offload import Offloader, Parked
from lightning_4d.parallel.recompute.tensors import held, looks, same, version

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, range, slice)


def map_leaves(function: Callable[[Any, str], Any], value: Any, place: str) -> Any:
    """Rebuild ``value`` with each leaf replaced by ``function(leaf, place)``.

    Tuples, lists, dicts and dataclasses are containers; all else is a leaf, also subclasses with a life of their own.
    """
    if isinstance(value, tuple):
        items = [map_leaves(function, item, f"{place}[{i}]") for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if type(value) is list:
        return [map_leaves(function, item, f"{place}[{i}]") for i, item in enumerate(value)]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, map_leaves(function, item, f"{place}[{key!r}]")) for key, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module, _Kept, _Produced, _Opaque)):
        return _map_dataclass(function, value, place)
    return function(value, place)


def _map_dataclass(function: Callable[[Any, str], Any], value: Any, place: str) -> Any:
    copy = object.__new__(type(value))  # without __init__, whose arguments need not be the fields
    for name, item in vars(value).items() if hasattr(value, "__dict__") else ():
        object.__setattr__(copy, name, map_leaves(function, item, f"{place}.{name}"))
    return copy


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in ``value``, in order."""
    found: list[Tensor] = []
    map_leaves(lambda leaf, _: found.append(leaf) if isinstance(leaf, Tensor) else None, value, "")
    return found


class Outputs:
    """The tensors that a block returned, as long as the user's code holds them."""

    def __init__(self, output: Any) -> None:
        self._tensors = [(weakref.ref(held(tensor)), looks(tensor), version(tensor)) for tensor in tensors_in(output)]

    def find(self, tensor: Tensor) -> int | None:
        """The index of the output that ``tensor`` is, unchanged; None if it is none of them."""
        for index, (reference, looked, at_output) in enumerate(self._tensors):
            output = reference()
            if output is None or looks(tensor) != looked or version(tensor) != at_output:
                continue
            if same(held(tensor), output):
                return index
        return None


@dataclasses.dataclass(frozen=True)
class _Produced:
    """A tensor that the block before returns, again in its recompute."""

    index: int
    requires_grad: bool


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A tensor held until the recompute, cut off from the graph that made it, which it would otherwise keep alive."""

    tensor: Parked
    requires_grad: bool
    version: int
    place: str


@dataclasses.dataclass(frozen=True)
class _Opaque:
    """An object of unknown kind, by reference, with what it looked like."""

    value: Any
    looks: tuple[Any, ...]
    place: str


class Arguments:
    """The arguments of one call of a block.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        previous: what the block before in the segment returned; None for the first.
        offloader: where kept tensors go.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], previous: Outputs | None, offloader: Offloader
    ) -> None:
        self._watched: list[tuple[weakref.ref[Tensor], int, str]] = []

        def remember(leaf: Any, place: str) -> Any:
            if isinstance(leaf, Tensor):
                return self._remember(leaf, place, previous, offloader)
            if isinstance(leaf, (*_ATOMS, nn.Module)) or callable(leaf):
                return leaf
            return _Opaque(leaf, _looks(leaf), place)

        self._args, self._kwargs = map_leaves(remember, (tuple(args), dict(kwargs)), "")
        self._offloader = offloader

    def _remember(self, tensor: Tensor, place: str, previous: Outputs | None, offloader: Offloader) -> Any:
        self._watched.append((weakref.ref(tensor), version(tensor), place))
        index = None if previous is None else previous.find(tensor)
        if index is not None:
            return _Produced(index, tensor.requires_grad)
        return _Kept(offloader.park(tensor), tensor.requires_grad, version(tensor), place)

    def check_after_forward(self, block: str) -> None:
        """Raise if the block changed what its recompute would need unchanged."""
        for reference, before, place in self._watched:
            tensor = reference()
            if tensor is not None and version(tensor) != before:
                raise _changed(block, place, "the block itself", "write x = x + y instead of x += y inside the block")
        for opaque in self._leaves(_Opaque):
            if _looks(opaque.value) != opaque.looks:
                raise _mutated(block, opaque)
        self._watched.clear()

    def check_between(self, block: str, following: str) -> None:
        """Raise if the user's code between two blocks changed in place what a recompute needs."""
        where = f"the code between {block!r} and {following!r}"
        for kept in self._leaves(_Kept):
            if kept.tensor.changed(kept.version):
                raise _changed(block, kept.place, where, "write x = x + y instead of x += y there")

    def restore(self, block: str, produced: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments again; ``produced`` is what the block before returned in its recompute."""

        def give(leaf: Any, _: str) -> Any:
            if isinstance(leaf, _Produced):
                return produced[leaf.index]
            if isinstance(leaf, _Kept):
                if leaf.tensor.changed(leaf.version):
                    raise _changed(block, leaf.place, "code after the block", "write x = x + y instead of x += y there")
                return leaf.tensor.get().detach().requires_grad_(leaf.requires_grad)
            if isinstance(leaf, _Opaque):
                if _looks(leaf.value) != leaf.looks:
                    raise _mutated(block, leaf)
                return leaf.value
            return leaf

        return map_leaves(give, (self._args, self._kwargs), "")

    def prefetch(self) -> None:
        """Start to bring offloaded tensors back."""
        for kept in self._leaves(_Kept):
            kept.tensor.prefetch()

    def _leaves(self, kind: type[Any]) -> list[Any]:
        found: list[Any] = []
        collect = lambda leaf, _: found.append(leaf) if isinstance(leaf, kind) else None  # noqa: E731
        map_leaves(collect, (self._args, self._kwargs), "")
        return found


def _changed(block: str, place: str, who: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            f"{describe_place(place)} of block {block!r} is changed in place by {who}",
            "a recompute needs the arguments as the block got them",
            remedy,
        )
    )


def _mutated(block: str, opaque: _Opaque) -> UnsupportedError:
    return UnsupportedError(
        explain(
            f"{describe_place(opaque.place)} of block {block!r} is a {type(opaque.value).__name__} that was changed "
            "during or after the block's forward",
            "a recompute calls the block again with the same arguments and would change it twice",
            "pass lists or dicts, or do not update the object while training (use_cache=False)",
        )
    )


def describe_place(place: str) -> str:
    """``[0][1]`` is the second positional argument, ``[1]['mask']`` the keyword argument."""
    return f"args{place[3:]}" if place.startswith("[0]") else f"kwargs{place[3:]}"


def _looks(value: Any, depth: int = 4) -> tuple[Any, ...]:
    """What can be seen of an object without copying it: identities and versions of what it holds."""
    if isinstance(value, Tensor):
        return (id(value), version(value))
    if depth == 0 or isinstance(value, (*_ATOMS, nn.Module)):
        return (id(value),)
    if isinstance(value, Mapping):
        return (id(value), *((key, _looks(item, depth - 1)) for key, item in value.items()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return (id(value), *(_looks(item, depth - 1) for item in value))
    return (id(value), *((name, _looks(item, depth - 1)) for name, item in getattr(value, "__dict__", {}).items()))
