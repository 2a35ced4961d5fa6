"""Which positions of a sequence each rank holds.

A *run* is a range of consecutive positions. Every rank holds a few runs in ascending order; together the ranks hold
each position once. Plain arithmetic, equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

Run = tuple[int, int]
"""The positions from the first number up to, not including, the second."""


@dataclass(frozen=True)
class SequenceLayout:
    """The positions 0 .. length - 1 of a sequence, divided among ranks.

    Args:
        length: of the whole sequence.
        runs: for each rank its runs, none of them empty, in ascending order.

    >>> SequenceLayout.zigzag(8, 2).runs
    (((0, 2), (6, 8)), ((2, 6),))
    """

    length: int
    runs: tuple[tuple[Run, ...], ...]

    @classmethod
    @lru_cache(maxsize=1024)
    def contiguous(cls, length: int, ranks: int) -> SequenceLayout:
        """One run per rank. Lengths that do not divide make the first ranks' runs longer by one.

        >>> SequenceLayout.contiguous(5, 2).lengths
        (3, 2)
        """
        return cls(length, tuple(_joined([run]) for run in _divide(length, ranks)))

    @classmethod
    @lru_cache(maxsize=1024)
    def zigzag(cls, length: int, ranks: int) -> SequenceLayout:
        """Chunk ``i`` and chunk ``2 * ranks - 1 - i`` for rank ``i``: causal attention is equal work for all ranks."""
        return cls.hybrid(length, ranks, 1)

    @classmethod
    @lru_cache(maxsize=1024)
    def hybrid(cls, length: int, ring: int, ulysses: int) -> SequenceLayout:
        """Zigzag over ``ring`` groups of ``ulysses`` consecutive ranks, each group's positions divided in their order.

        >>> SequenceLayout.hybrid(8, 2, 2).runs
        (((0, 2),), ((6, 8),), ((2, 4),), ((4, 6),))
        """
        chunks = _divide(length, 2 * ring)
        runs = []
        for group in range(ring):
            held = [chunks[group], chunks[2 * ring - 1 - group]]
            for start, stop in _divide(sum(b - a for a, b in held), ulysses):
                runs.append(_joined(_part(held, start, stop)))
        return cls(length, tuple(runs))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many positions each rank holds."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @cached_property
    def longest(self) -> int:
        """The number of positions of the rank that holds most."""
        return max(self.lengths)

    @cached_property
    def order(self) -> tuple[Run, ...]:
        """Where the sequence is in the ranks' parts, each padded to the longest and put one after the other."""
        places: list[tuple[int, int, int]] = []
        for rank, runs in enumerate(self.runs):
            offset = rank * self.longest
            for start, stop in runs:
                places.append((start, offset, offset + stop - start))
                offset += stop - start
        return _joined([(start, stop) for _, start, stop in sorted(places)])

    def range_below(self, rank: int, position: int) -> int:
        """How many of the positions of ``rank`` are below ``position``."""
        return sum(max(0, min(stop, position) - start) for start, stop in self.runs[rank])

    def slice(self, start: int, stop: int) -> SequenceLayout:
        """The positions ``start`` .. ``stop - 1``, numbered from 0, where they are.

        >>> SequenceLayout.zigzag(8, 2).slice(1, 7).runs
        (((0, 1), (5, 6)), ((1, 5),))
        """
        return _sliced(self, start, stop)

    def owner(self, position: int) -> tuple[int, int]:
        """The rank that holds ``position``, and the index in its part."""
        for rank, runs in enumerate(self.runs):
            offset = 0
            for start, stop in runs:
                if start <= position < stop:
                    return rank, offset + position - start
                offset += stop - start
        raise IndexError(f"position {position} of a sequence of length {self.length}")

    def group_of(self, ranks: Sequence[int]) -> tuple[Run, ...]:
        """The runs that several ranks hold together, in ascending order."""
        return _joined(sorted(run for rank in ranks for run in self.runs[rank]))


@lru_cache(maxsize=4096)
def _sliced(layout: SequenceLayout, start: int, stop: int) -> SequenceLayout:
    if (start, stop) == (0, layout.length):
        return layout
    runs = tuple(
        tuple((max(a, start) - start, min(b, stop) - start) for a, b in held if max(a, start) < min(b, stop))
        for held in layout.runs
    )
    return SequenceLayout(max(0, stop - start), runs)


def _divide(length: int, parts: int) -> list[Run]:
    size, longer = divmod(length, parts)
    bounds = [i * size + min(i, longer) for i in range(parts + 1)]
    return list(pairwise(bounds))


def _part(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The indices ``start`` .. ``stop - 1`` of the positions that ``runs`` list."""
    part, offset = [], 0
    for a, b in runs:
        part.append((a + max(0, start - offset), min(b, a + stop - offset)))
        offset += b - a
    return part


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Drop empty runs and join those that touch."""
    joined: list[Run] = []
    for start, stop in runs:
        if start >= stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
