"""Record one run of a user's step: which blocks it calls, what they give to the code around them, and who needs what.

The record answers what a pipeline has to know about a step that it will run in pieces: the order of the blocks, shapes
and dtypes of what they return, which parameters each of them and the code after the last one (the *tail*) depend on,
and what of an earlier block's output a later piece still needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_4d import _torch_private as private
from lightning_4d._torch_private import pytree
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.pipeline.flow import Flow, Inside, Output, Parameter, Source, Sources, tensors_in
from lightning_4d.parallel.pipeline.randomness import host_state
from lightning_4d.parallel.sequence import find_sequence_dim, named_sequence_dim


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it exists."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Describe ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def stand_in(self, device: torch.device, *, in_memory: bool) -> Tensor:
        """Return a tensor of this kind whose values do not count: nan, so that a use of them shows; 0 for integers.

        Not ``in_memory``: one element that is repeated, which cannot be written to.
        """
        value = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
        size = self.shape if in_memory else ()
        return torch.full(size, value, dtype=self.dtype, device=device).expand(self.shape)


@dataclass(frozen=True)
class Slot:
    """A leaf of a block's output that holds tensor number ``number`` of the block."""

    number: int
    spec: TensorSpec


@dataclass(frozen=True)
class SameAsArgument:
    """A leaf of a block's output that is the leaf ``number`` of its arguments, unchanged."""

    number: int


@dataclass(frozen=True)
class AttributeSlot:
    """A tensor that a block leaves in an attribute of one of its modules (a balance loss, say)."""

    slot: Slot
    module: str  # its name inside the block; "" is the block itself
    attribute: str


Leaf: TypeAlias = Any  # Slot | SameAsArgument | a constant of the user's


@dataclass(frozen=True)
class BlockRecord:
    """One block in one run of a step.

    Attributes:
        name: dotted name in the module tree.
        leaves: of what it returns.
        structure: of what it returns.
        attributes: tensors that it leaves in attributes.
        needs: parameters and outputs of earlier blocks that its arguments and operations depend on.
    """

    name: str
    leaves: tuple[Leaf, ...]
    structure: pytree.TreeSpec
    attributes: tuple[AttributeSlot, ...]
    needs: frozenset[Source]

    def slots(self) -> dict[int, Slot]:
        """Return its tensors by number."""
        slots = [leaf for leaf in self.leaves if isinstance(leaf, Slot)] + [a.slot for a in self.attributes]
        return {slot.number: slot for slot in slots}


@dataclass(frozen=True)
class Hidden:
    """The state that goes from block to block, as the first block gets it.

    Attributes:
        spec: what is known of it.
        dim: the dim of the sequence.
    """

    spec: TensorSpec
    dim: int


@dataclass(frozen=True)
class StepRecord:
    """One run of a step.

    Attributes:
        blocks: in the order of calls.
        tail: what the code after the last block depends on, its results and logged values included.
        outside_buffers: those of ``written_buffers`` that code outside the blocks changes.
        stubs: by name of a module outside the blocks that has parameters of its own: what each of its calls returned.
        random: the block numbers whose code draws random numbers from torch; None stands for code outside blocks.
        written_buffers: names of buffers that the step changes.
        writes_outside: whether code outside the blocks changes tensors in place.
        uses: how many operations read a parameter, by its name and the place: 2·k before block k, 2·k + 1 inside it.
        draws_on_host: whether the step draws from Python's or NumPy's generators.
        hidden: what the first block gets; None where it has no sequence.
    """

    blocks: tuple[BlockRecord, ...]
    tail: frozenset[Source]
    stubs: Mapping[str, tuple[Any, ...]]
    random: frozenset[int | None]
    written_buffers: tuple[str, ...]
    outside_buffers: tuple[str, ...]
    writes_outside: bool
    uses: Mapping[tuple[int, str], int]
    draws_on_host: bool = False
    hidden: Hidden | None = None

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the blocks in the order of calls."""
        return tuple(block.name for block in self.blocks)

    def outputs_needed(self, number: int | None) -> set[Output]:
        """Return the block outputs that block ``number`` needs, or the tail if None."""
        needs = self.tail if number is None else self.blocks[number].needs
        return {source for source in needs if isinstance(source, Output)}

    def uses_twice(self, blocks: range) -> bool:
        """Whether a stage of these blocks reads a parameter in more than one operation."""
        last = 2 * blocks.stop + (1 if blocks.stop == len(self.blocks) else 0)
        found: dict[str, int] = {}
        for (place, name), count in self.uses.items():
            if place == 0 or 2 * blocks.start <= place < last:
                found[name] = found.get(name, 0) + count
        return any(count > 1 for count in found.values())

    def users(self, parameter: str) -> set[int | None]:
        """Return the blocks that need a parameter; None stands for the tail."""
        source = Parameter(parameter)
        found: set[int | None] = {i for i, block in enumerate(self.blocks) if source in block.needs}
        return found | ({None} if source in self.tail else set())


class Recorder:
    """Makes a :class:`StepRecord` of a step that runs between ``with recorder.recording():``.

    Args:
        root: the module that the step runs on.
        blocks: its repeated blocks.
        flow: knows the parameters and buffers as the step will see them.
        sequence_dim: of the blocks' inputs, if the user named it.
    """

    def __init__(self, root: nn.Module, blocks: Sequence[Block], flow: Flow, sequence_dim: int | None = None) -> None:
        self.flow = flow
        self._root = root
        self._names = {block.module: block.name for block in blocks}
        self._records: list[BlockRecord] = []
        self._stubs: dict[str, list[Any]] = {}
        self._late: set[Source] = set()
        self._sequence_dim = sequence_dim
        self._hidden: Hidden | None = None
        self._host_state = host_state()

    @contextmanager
    def recording(self) -> Any:
        """Observe the calls of blocks, and of modules outside them that have parameters."""
        inside = {child for module in self._names for child in module.modules()}
        replaced: list[nn.Module] = []
        try:
            for module in self._names:
                self._observe(module, self._block_call, replaced)
            for name, module in self._root.named_modules():
                if module not in inside and any(True for _ in module.parameters(recurse=False)) and name:
                    self._observe_stub(name, module, replaced)
            with self.flow.following():
                yield self
        finally:
            for module in replaced:
                private.restore_call(module)

    def _observe(self, module: nn.Module, observer: Callable[..., Any], replaced: list[nn.Module]) -> None:
        original = private.plain_call(module)  # of a module that is split into stages already, too
        private.replace_call(module, lambda *args, **kwargs: observer(module, original, args, kwargs))
        replaced.append(module)

    def _observe_stub(self, name: str, module: nn.Module, replaced: list[nn.Module]) -> None:
        def call(_module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            described = pytree.tree_map(lambda leaf: TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf, output)
            self._stubs.setdefault(name, []).append(described)
            return output

        self._observe(module, call, replaced)

    def note(self, value: Any) -> None:
        """Say that the tail needs ``value``: a result, or something logged or given to a metric."""
        self._late |= self.flow.of_all(value)

    def _block_call(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number, name = len(self._records), self._names[module]
        if any(record.name == name for record in self._records):
            raise UnsupportedError(
                explain(
                    f"block {name!r} is called more than once in a step",
                    "a pipeline passes through its blocks once per step",
                    "use pipeline_parallel_size=1, or name other blocks= that run once",
                )
            )
        flow = self.flow
        flow.touched.pop(None, None)  # what ran so far was before this block, so it is not the tail
        needs = set(flow.of_all((args, kwargs)))
        with flow.inside(number):
            output = original(*args, **kwargs)
        if number in flow.foreign_writes:
            raise UnsupportedError(
                explain(
                    f"block {name!r} changes a tensor in place that it did not make ({flow.foreign_writes[number]})",
                    "blocks of different pipeline stages share no memory",
                    "return a new tensor instead, as in x = x + f(x)",
                )
            )
        if number == 0:
            self._hidden = self._hidden_in(pytree.tree_leaves((args, kwargs)))
        needs |= flow.touched.get(number, set())
        needs = {source for source in needs if source != Inside(number)}
        self._check_known(needs, f"block {name!r}")
        arguments = {
            id(leaf): i for i, leaf in enumerate(pytree.tree_leaves((args, kwargs))) if isinstance(leaf, Tensor)
        }
        leaves, structure = pytree.tree_flatten(output)
        described = self._describe(number, leaves, arguments)
        attributes = self._attributes(number, module, len(leaves))
        self._records.append(BlockRecord(name, described, structure, attributes, frozenset(needs)))
        return output

    def _hidden_in(self, leaves: Sequence[Any]) -> Hidden | None:
        if self._sequence_dim is not None:
            found = named_sequence_dim(leaves, self._sequence_dim)
        else:
            found = find_sequence_dim(leaves, self.flow.attended)
        return None if found is None else Hidden(TensorSpec.of(leaves[found[0]]), found[1])

    def _describe(self, number: int, leaves: Sequence[Any], arguments: Mapping[int, int]) -> tuple[Leaf, ...]:
        described: list[Leaf] = []
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                described.append(leaf)
            elif id(leaf) in arguments and not self.flow.was_written(leaf, number):
                described.append(SameAsArgument(arguments[id(leaf)]))
            else:
                described.append(Slot(position, TensorSpec.of(leaf)))
        for position, (leaf, kind) in enumerate(zip(leaves, described, strict=True)):
            if isinstance(kind, Slot):
                self.flow.set(leaf, frozenset([Output(number, position)]))
        return tuple(described)

    def _attributes(self, number: int, module: nn.Module, first: int) -> tuple[AttributeSlot, ...]:
        found = []
        for name, child in module.named_modules():
            for attribute, value in vars(child).items():
                if isinstance(value, Tensor) and Inside(number) in self.flow.of(value):
                    slot = Slot(first + len(found), TensorSpec.of(value))
                    self.flow.set(value, frozenset([Output(number, slot.number)]))
                    found.append(AttributeSlot(slot, name, attribute))
        return tuple(found)

    def result(self, output: Any) -> StepRecord:
        """Return the record, once the step has returned ``output``.

        Raises:
            UnsupportedError: no block was called, or a block's inner values are used outside it.
        """
        flow = self.flow
        tail = set(flow.of_all(output)) | self._late | flow.touched.get(None, set())
        self._check_known(tail, "the code after the last block")
        missing = [name for name in self._names.values() if name not in {record.name for record in self._records}]
        if missing:
            raise UnsupportedError(
                explain(
                    f"the step does not call the block {missing[0]!r}",
                    "a pipeline passes through every block in every step",
                    "name the blocks= that run in each step, or use pipeline_parallel_size=1",
                )
            )
        return StepRecord(
            tuple(self._records),
            frozenset(tail),
            {name: tuple(calls) for name, calls in self._stubs.items()},
            frozenset(flow.random),
            tuple(flow.written_buffers),
            tuple(name for name, block in flow.written_buffers.items() if block is None),
            flow.outside_writes,
            dict(flow.uses),
            host_state() != self._host_state,
            self._hidden,
        )

    def _check_known(self, sources: Iterable[Source], who: str) -> None:
        for source in sources:
            if isinstance(source, Inside):
                name = self._records[source.block].name
                raise UnsupportedError(
                    explain(
                        f"{who} uses a tensor that was made inside block {name!r}, and is neither its output nor an "
                        "attribute of it",
                        "what leaves a pipeline stage must be known by name",
                        "return it from the block, or keep it as an attribute of the block (self.balance_loss = ...)",
                    )
                )


def parameter_sources(sources: Sources) -> set[str]:
    """Return the names of the parameters among ``sources``."""
    return {source.name for source in sources if isinstance(source, Parameter)}


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return list(tensors_in(value))
