"""Know a count at a new sequence length from counts at others, so that dynamically padded batches need few of them.

Products with weights grow linearly with the length, attention with its square. Whether a model's counts do so is not
assumed: a parabola through three of them must meet all others exactly, and only lengths between them are filled in.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from lightning_4d.utilization.batch import BatchKey
from lightning_4d.utilization.counter import Flops
from lightning_4d.utilization.flops import StepFlops

_ENOUGH = 4  # three make a parabola, one more confirms it
_MOST = 16  # counts kept for a shape
_PARTS = ("forward", "backward", "recompute", "kernel")
Template = tuple[object, ...]


class CountsByLength:
    """Counts of batches that differ in one length only, and those that follow from them."""

    def __init__(self) -> None:
        self._counts: dict[Template, dict[int, StepFlops]] = {}

    def add(self, key: BatchKey, length: int, flops: StepFlops) -> None:
        """Add a count."""
        counts = self._counts.setdefault(_template(key, length), {})
        if len(counts) < _MOST or not min(counts) <= length <= max(counts):
            counts[length] = flops

    def get(self, key: BatchKey, length: int) -> StepFlops | None:
        """Return the count at ``length`` if it follows from others, else None."""
        counts = self._counts.get(_template(key, length), {})
        if length in counts:
            return counts[length]
        if len(counts) < _ENOUGH or not min(counts) < length < max(counts):
            return None
        like = counts[min(counts)]
        if any(_kind(other) != _kind(like) for other in counts.values()):
            return None
        values = _interpolate({at: _numbers(flops) for at, flops in counts.items()}, length)
        return None if values is None else _with_numbers(like, values)


def _template(key: BatchKey, length: int) -> Template:
    return tuple((path, tuple("T" if n == length else n for n in shape), dtype) for path, shape, dtype in key)


def _kind(flops: StepFlops) -> tuple[object, ...]:
    return flops.dtype, dict(flops.attention_calls), tuple(flops.blocks)


def _numbers(flops: StepFlops) -> list[int]:
    parts = [*(getattr(flops, name) for name in _PARTS), *flops.blocks.values()]
    return [number for part in parts for number in (part.total, part.attention, part.masked)]


def _with_numbers(like: StepFlops, numbers: list[int]) -> StepFlops:
    parts = [Flops(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
    first, blocks = parts[: len(_PARTS)], parts[len(_PARTS) :]
    return replace(like, **dict(zip(_PARTS, first, strict=True)), blocks=dict(zip(like.blocks, blocks, strict=True)))


def _interpolate(values: dict[int, list[int]], at: int) -> list[int] | None:
    """Return the numbers at ``at``, or None if no parabola meets all that are known."""
    known = sorted(values)
    nodes = (known[0], known[len(known) // 2], known[-1])
    for check in known:
        if _parabola(nodes, values, check) != values[check]:
            return None
    result = _parabola(nodes, values, at)
    return [int(x) for x in result] if all(x.denominator == 1 for x in result) else None


def _parabola(nodes: tuple[int, int, int], values: dict[int, list[int]], at: int) -> list[Fraction]:
    weights = []
    for node in nodes:
        weight = Fraction(1)
        for other in nodes:
            if other != node:
                weight *= Fraction(at - other, node - other)
        weights.append(weight)
    columns = zip(*(values[node] for node in nodes), strict=True)
    return [sum((w * v for w, v in zip(weights, column, strict=True)), Fraction(0)) for column in columns]
