"""The ranks that share a sequence, and how attention divides them: a ring of groups, all-to-all inside a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.context.layout import SequenceLayout

METHODS = ("ring", "ulysses", "hybrid")


@dataclass(frozen=True, eq=False)
class ContextGroups:
    """The process groups of one rank.

    Args:
        group: all ranks that share its sequences.
        ring: the ranks with the same place in their Ulysses group.
        ulysses: neighbours in ``group``, which exchange heads for positions.
        ring_size: 1 for pure Ulysses.
        ulysses_size: 1 for a pure ring.
    """

    group: dist.ProcessGroup
    ring: dist.ProcessGroup
    ulysses: dist.ProcessGroup
    ring_size: int
    ulysses_size: int

    @property
    def size(self) -> int:
        """How many ranks share a sequence."""
        return self.ring_size * self.ulysses_size

    @property
    def rank(self) -> int:
        """This rank's place in ``group``."""
        return self.group.rank()

    def layout(self, length: int) -> SequenceLayout:
        """How a sequence of ``length`` positions is divided."""
        return SequenceLayout.hybrid(length, self.ring_size, self.ulysses_size)

    def ring_runs(self, layout: SequenceLayout) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The positions that each Ulysses group holds together, in the order of the ring."""
        u = self.ulysses_size
        return tuple(layout.group_of(range(i * u, (i + 1) * u)) for i in range(self.ring_size))


def ulysses_size_of(method: str, ulysses_size: int | str, context_size: int, node_size: int) -> int:
    """Return the Ulysses part of ``context_size`` ranks.

    Args:
        method: "ring" (1), "ulysses" (all), or "hybrid" (``ulysses_size``).
        ulysses_size: an int, or "auto" for the ranks of a node.
        context_size: ranks that share a sequence.
        node_size: processes of a node.

    Raises:
        UnsupportedError: an unknown method, or a size that does not divide.

    >>> ulysses_size_of("hybrid", "auto", 16, 8), ulysses_size_of("ring", "auto", 4, 8)
    (8, 1)
    """
    if method not in METHODS:
        raise UnsupportedError(
            explain(f"context_parallel_attention={method!r}", f"it is one of {', '.join(METHODS)}", "use 'ring'")
        )
    if method != "hybrid":
        return 1 if method == "ring" else context_size
    divisors = [size for size in range(1, context_size + 1) if context_size % size == 0]
    if ulysses_size == "auto":
        return max(size for size in divisors if size <= node_size)
    if ulysses_size not in divisors:
        raise UnsupportedError(
            explain(
                f"ulysses_size={ulysses_size!r} with context_parallel_size={context_size}",
                "the Ulysses part divides the context-parallel ranks",
                f"use one of {divisors}",
            )
        )
    return int(ulysses_size)


def make_groups(
    everyone: Sequence[Sequence[int]], ulysses_size: int, group: dist.ProcessGroup | None = None
) -> ContextGroups:
    """Create the process groups of this rank.

    Args:
        everyone: the global ranks of each context-parallel group of the job, equal on all ranks.
        ulysses_size: the Ulysses part.
        group: this rank's context-parallel group, if it exists already.

    Which ranks must call: all ranks of the default process group, together.
    """
    ring_size = len(everyone[0]) // ulysses_size
    rings = [list(ranks[i::ulysses_size]) for ranks in everyone for i in range(ulysses_size)]
    neighbours = [
        list(ranks[i * ulysses_size : (i + 1) * ulysses_size]) for ranks in everyone for i in range(ring_size)
    ]
    group = group or _subgroup([list(ranks) for ranks in everyone])
    # A group of its own for each purpose: their operations would otherwise have to keep one order.
    return ContextGroups(group, _subgroup(rings), _subgroup(neighbours), ring_size, ulysses_size)


def _subgroup(ranks: list[list[int]]) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration(ranks)
    assert isinstance(group, dist.ProcessGroup)
    return group
