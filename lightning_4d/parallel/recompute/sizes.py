"""How many bytes each block would hold, counted in a real forward while nothing of it is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_4d.parallel.recompute.arguments import Outputs, tensors_in
from lightning_4d.parallel.recompute.plan import BlockBytes
from lightning_4d.parallel.recompute.tensors import storages

GROWTH = 1.25  # arguments larger by this factor than those measured are measured again


class Sizes:
    """Counts bytes by block.

    Args:
        blocks: the blocks, in the order of the plan.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self.measured: dict[int, BlockBytes] = {}
        self._open: set[int] = set(range(len(blocks)))  # still to be measured
        self._arguments: dict[int, int] = {}  # bytes of all arguments when measured
        self._shared: dict[int, int] = {}  # storages of the arguments of the block before
        self._begun: set[int] = set()  # arguments counted, forward to come
        self._in_forward: set[int] = set()  # blocks measured in the present forward

    def wants(self, index: int) -> bool:
        """Whether this block is to be measured in this call."""
        return index in self._open

    def complete_at(self, index: int, arguments: Any) -> bool:
        """Whether measurements are complete, now that a block is called again. Larger arguments open them again."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(arguments))
        if index in self._in_forward:  # a new forward: blocks that were not called need no measurement
            self._in_forward.clear()
            self._open.clear()
            self._shared.clear()
            return True
        if index not in self._open and size > GROWTH * self._arguments.get(index, size):
            self._open = set(range(len(self._blocks)))
            self._scale(size / self._arguments[index])
            return True
        return False

    def _scale(self, factor: float) -> None:
        """Until the new measurement is there, take bytes to grow with the arguments."""
        self._arguments = {index: round(size * factor) for index, size in self._arguments.items()}
        self.measured = {
            index: BlockBytes(round(s.input * factor), round(s.interior * factor), round(s.unlinked * factor))
            for index, s in self.measured.items()
        }

    def begin(self, index: int, arguments: Any, previous: Outputs | None) -> None:
        """Count the arguments of a block, without those that the block before got as well (a mask for all)."""
        tensors = tensors_in(arguments)
        self._arguments[index] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        found = {place: size for tensor in tensors for place, size in storages(tensor)}
        own = {place: size for place, size in found.items() if place not in self._shared}
        unlinked = {
            place
            for tensor in tensors
            if previous is None or previous.find(tensor) is None
            for place, _ in storages(tensor)
        }
        loose = sum(size for place, size in own.items() if place in unlinked)
        self.measured[index] = BlockBytes(sum(own.values()), 0, loose)
        self._shared = found
        self._in_forward.add(index)
        self._open.discard(index)
        self._begun.add(index)

    def observer(self, index: int) -> Observer | None:
        """What is to see each tensor that the block would save; None if the block is not measured."""
        if index not in self._begun:
            return None
        self._begun.discard(index)
        module = self._blocks[index]
        held = [*module.parameters(), *module.buffers()]
        known = {place for tensor in held for place, _ in storages(tensor)} | set(self._shared)
        return Observer(known, lambda interior: self._finish(index, interior))

    def _finish(self, index: int, interior: int) -> None:
        arguments = self.measured[index]
        self.measured[index] = BlockBytes(arguments.input, interior, arguments.unlinked)


class Observer:
    """Counts the bytes of tensors, each storage once.

    Args:
        known: addresses of storages that do not count.
        finish: called with the sum at the end.
    """

    def __init__(self, known: set[int], finish: Callable[[int], None]) -> None:
        self._seen = known
        self._finish = finish
        self._bytes = 0
        self._alive: list[Tensor] = []  # an address that is given back and taken again would count once for two

    def __call__(self, tensor: Tensor) -> None:
        """Count the storages of ``tensor``."""
        self._alive.append(tensor.detach())
        for place, nbytes in storages(tensor):
            if place not in self._seen:
                self._seen.add(place)
                self._bytes += nbytes

    def close(self) -> None:
        """End counting, and let go of all tensors."""
        self._alive.clear()
        self._finish(self._bytes)
