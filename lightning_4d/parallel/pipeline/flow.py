"""Follow where values come from while a step runs: from which parameters, and from which outputs of which blocks.

A dispatch mode sees every operation below autograd. Tensors that share memory share their sources, so views and
changes in place need no rules of their own. What is computed inside a block counts as that block's, and what leaves a
block counts as its output; so the sources of a value are those that it has without passing through a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_4d import _torch_private as private
from lightning_4d._torch_private import pytree
from lightning_4d.parallel.sequence import attended_lengths


class Parameter(NamedTuple):
    """A parameter of the model as a source, by its first name."""

    name: str


class Output(NamedTuple):
    """A tensor that a block gives to the code outside it.

    Attributes:
        block: number of the block, in the order of calls.
        slot: which of its tensors: returned ones first, then those it keeps as attributes.
    """

    block: int
    slot: int


class Inside(NamedTuple):
    """A value made inside a block that is none of its outputs (as far as is known)."""

    block: int


Source = Parameter | Output | Inside
Sources = frozenset[Source]
_NOTHING: Sources = frozenset()
OUTSIDE = None  # the block number of code outside the blocks


class Flow:
    """Sources of all tensors of one run of a step.

    Args:
        parameters: the name of each parameter, as the step will see the tensors (fakes, in a fake run).
        buffers: the name of each buffer.
        convert: what an operation is to see of its arguments; fakes instead of real tensors, in a fake run.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        buffers: Iterable[tuple[str, Tensor]],
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        self._convert = convert
        self._sources: dict[int, Sources] = {}
        self._alive: dict[int, Tensor] = {}  # addresses of storages stay taken while these live
        self._origin: dict[int, int | None] = {}  # the block that made a tensor, by storage
        self.touched: dict[int | None, set[Source]] = {}  # by block: sources of what its operations read
        self.random: set[int | None] = set()  # blocks that draw random numbers
        self.written_buffers: dict[str, int | None] = {}
        self.foreign_writes: dict[int, str] = {}  # blocks that change, in place, what they did not make: the operation
        self.outside_writes = False  # code outside the blocks changes something in place
        self.uses: Counter[tuple[int, str]] = Counter()  # how many operations read a parameter, by place
        self.place = 0  # counts the boundaries of blocks
        self.attended: list[int] = []  # lengths that the attention of the first block compares
        self._parameters: dict[int, str] = {}
        self._buffers: dict[int, str] = {}
        self.block: int | None = OUTSIDE
        for name, tensor in parameters:
            self.set(tensor, frozenset([Parameter(name)]))
            self._parameters[private.storage_key(tensor)] = name
        for name, tensor in buffers:
            self.set(tensor, _NOTHING)
            self._buffers[private.storage_key(tensor)] = name

    def set(self, tensor: Tensor, sources: Sources) -> None:
        """Say where ``tensor``, and all that shares its memory, comes from."""
        key = private.storage_key(tensor)
        self._sources[key] = sources
        self._alive[key] = tensor

    def of(self, tensor: Tensor) -> Sources:
        """Return the sources of ``tensor``; empty for what comes from the batch or from nowhere."""
        return self._sources.get(private.storage_key(tensor), _NOTHING)

    def of_all(self, value: Any) -> Sources:
        """Return the sources of all tensors in nested containers."""
        return frozenset().union(*(self.of(tensor) for tensor in tensors_in(value)))

    def was_written(self, tensor: Tensor, block: int) -> bool:
        """Whether ``block`` made or changed ``tensor``."""
        return self._origin.get(private.storage_key(tensor), OUTSIDE) == block

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the operations that run inside."""
        with private.dispatch_mode(self._operation):
            yield

    @contextmanager
    def inside(self, block: int) -> Iterator[None]:
        """What runs inside belongs to ``block``."""
        before, self.block = self.block, block
        self.place += 1
        try:
            yield
        finally:
            self.block = before
            self.place += 1

    def _operation(self, _mode: Any, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation is _DEVICE:  # autograd asks for it all the time
            return operation(*args, **kwargs)
        if self._convert is not None and not private.makes_constant(operation):
            args = tuple(self._convert(arg) for arg in args)
            kwargs = {name: self._convert(arg) for name, arg in kwargs.items()}
        inputs = list(tensors_in((args, kwargs)))
        read = frozenset().union(*map(self.of, inputs)) if inputs else _NOTHING
        result = operation(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()) and operation not in _NOT_RANDOM:
            self.random.add(self.block)
        if self.block == 0:
            self.attended += attended_lengths(operation, args)
        if read:
            self.touched.setdefault(self.block, set()).update(read)
        if not _is_view(operation):
            names = [self._parameters.get(private.storage_key(tensor)) for tensor in inputs]
            self.uses.update((self.place, name) for name in names if name is not None)
        made: Sources = read if self.block is None else frozenset([Inside(self.block)])
        written = _written(operation, args, kwargs)
        for tensor in written:
            self._write(tensor, str(operation), made)
        known = {private.storage_key(tensor) for tensor in inputs}
        for tensor in tensors_in(result):
            key = private.storage_key(tensor)
            if key not in known:  # not a view of an input, nor the input itself
                self._make(tensor, key, made)
        return result

    def _make(self, tensor: Tensor, key: int, sources: Sources) -> None:
        self._sources[key] = sources
        self._alive[key] = tensor
        self._origin[key] = self.block

    def _write(self, tensor: Tensor, operation: str, sources: Sources) -> None:
        key = private.storage_key(tensor)
        if key in self._buffers:
            self.written_buffers.setdefault(self._buffers[key], self.block)
            return
        if self.block is None:
            self.outside_writes = True
            self._sources[key] = self._sources.get(key, _NOTHING) | sources
        elif self._origin.get(key, OUTSIDE) != self.block:
            self.foreign_writes.setdefault(self.block, operation)


_DEVICE = torch.ops.prim.device.default
# Attention kernels carry the tag for their dropout, whether it is on or not.
_NOT_RANDOM = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
)


def _is_view(operation: Any) -> bool:
    """Whether the operation gives another view of its argument and computes nothing."""
    schema = getattr(operation, "_schema", None)
    return schema is not None and not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def _written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that the operation changes, by its schema."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) or not isinstance(value, (int, float, str, bool, type(None))):
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield leaf
