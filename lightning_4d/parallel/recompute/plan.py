"""Which blocks form a segment, and what that holds at the peak: plain arithmetic on recorded bytes.

With N blocks, a bytes of block input and b bytes of what autograd saves inside a block, its input included: keeping
all holds N·b; recomputing each block N·a + b; segments of k blocks N/k·a + k·b, least at k = √(N·a/b); with segments
whose recompute keeps block inputs only, N/k·a + k·a + b, least at k = √N. `peak_bytes` is the same count for blocks
that differ and for segments that do not divide N.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.recompute.policy import RecomputePolicy

Keep = Literal["all", "inputs", "products"]


@dataclass(frozen=True)
class BlockBytes:
    """What one block holds.

    Args:
        input: bytes of the arguments that must be kept to recompute from here.
        interior: bytes that autograd saves inside, without parameters, buffers and the input.
        unlinked: bytes of the arguments that the block before does not produce, so that they are kept in any segment.
    """

    input: int
    interior: int
    unlinked: int = 0


@dataclass(frozen=True)
class Segment:
    """Blocks ``start`` to ``stop`` (exclusive) of the plan's order, recomputed together.

    Args:
        start: index of the first block.
        stop: index after the last block.
        keep: ``"all"`` recomputes nothing, ``"inputs"`` everything from the first block's input, ``"products"`` what is
            neither a matrix product nor attention.
        nested: the recompute keeps block inputs only, and each block is recomputed again from its own.
    """

    start: int
    stop: int
    keep: Keep = "inputs"
    nested: bool = False


Plan = tuple[Segment, ...]


def make_plan(
    policy: RecomputePolicy, chains: Sequence[int], sizes: Mapping[int, BlockBytes] | None, in_flight: int = 1
) -> Plan:
    """Divide blocks into segments by ``policy``.

    Args:
        policy: the policy.
        chains: the number of blocks of each chain, in order; a segment never crosses from one chain to another.
        sizes: recorded bytes by block index, for policies that need them; None while nothing is recorded. Blocks
            without a record count as the mean.
        in_flight: how many forwards wait for their backward at once (microbatches of a pipeline).

    Raises:
        UnsupportedError: no plan fits ``budget_bytes``; names the least that works.
    """
    count = sum(chains)
    if policy.kind == "none":
        return tuple(Segment(i, i + 1, "all") for i in range(count))
    if policy.kind == "selective":
        return tuple(Segment(i, i + 1, "products") for i in range(count))
    if policy.kind == "every_k":
        k = policy.every_k or 1
        return tuple(Segment(i, i + 1, "inputs" if (i + 1) % k == 0 else "all") for i in range(count))
    if policy.kind == "sqrt" and policy.segments != "auto":
        return _by_count(chains, policy.segments, nested=policy.nested)
    if policy.kind == "full" or sizes is None:
        return tuple(Segment(i, i + 1) for i in range(count))
    complete = _complete(sizes, count)
    if policy.kind == "budget":
        return _within_budget(chains, complete, policy.budget_bytes or 0, in_flight)
    return best_plan(chains, complete, nested=policy.nested, in_flight=in_flight)


def best_plan(chains: Sequence[int], sizes: Sequence[BlockBytes], *, nested: bool, in_flight: int = 1) -> Plan:
    """Return the plan of equal segments with the lowest peak; of equals, the one with the shortest segments."""
    plans = (_by_length(chains, k, nested=nested) for k in range(1, max(chains) + 1))
    return min(plans, key=lambda plan: peak_bytes(plan, sizes, in_flight))


def peak_bytes(plan: Plan, sizes: Sequence[BlockBytes], in_flight: int = 1) -> int:
    """Bytes that blocks hold at the worst moment, what the recompute re-creates included.

    Backward frees the last segment before it comes to the one before, so each moment is one segment's recompute beside
    what the segments before it keep. Of ``in_flight`` forwards all but one only wait, with what all segments keep.
    """
    waiting = (in_flight - 1) * sum(_kept(segment, sizes) for segment in plan)
    peak = kept_before = 0
    for segment in plan:
        peak = max(peak, kept_before + _at_recompute(segment, sizes))
        kept_before += _kept(segment, sizes)
    return waiting + peak


def extra_forwards(plan: Plan) -> list[float]:
    """How often each block's forward runs again per step, as a share of its floating-point operations.

    Operations that are not matrix products, convolutions or attention count nothing, as is usual.
    """
    return [value for segment in plan for value in _extra(segment)]


def _extra(segment: Segment) -> Iterator[float]:
    length = segment.stop - segment.start
    if segment.keep != "inputs":
        yield from [0.0] * length
    else:  # a nested segment's last block is recomputed straight from its input
        yield from [2.0 if segment.nested else 1.0] * (length - 1)
        yield 1.0


def _kept(segment: Segment, sizes: Sequence[BlockBytes]) -> int:
    head, *others = sizes[segment.start : segment.stop]
    if segment.keep == "inputs":
        return head.input + sum(size.unlinked for size in others)
    return sum(size.input + size.interior for size in (head, *others))


def _at_recompute(segment: Segment, sizes: Sequence[BlockBytes]) -> int:
    blocks = sizes[segment.start : segment.stop]
    inputs = sum(size.input for size in blocks)
    if segment.keep == "inputs" and segment.nested:
        return inputs + max(size.interior for size in blocks)
    return inputs + sum(size.interior for size in blocks)


def _by_length(chains: Sequence[int], length: int, *, nested: bool) -> Plan:
    """Segments of at most ``length`` blocks, as equal as possible."""
    return _divide(chains, [math.ceil(count / length) for count in chains], nested=nested)


def _by_count(chains: Sequence[int], segments: int, *, nested: bool) -> Plan:
    """About ``segments`` segments in all, at least one for each chain."""
    shares = [max(1, min(count, round(segments * count / sum(chains)))) for count in chains]
    return _divide(chains, shares, nested=nested)


def _divide(chains: Sequence[int], shares: Sequence[int], *, nested: bool) -> Plan:
    """Each chain in so many segments, as equal as possible."""
    segments = []
    first = 0
    for count, parts in zip(chains, shares, strict=True):
        bounds = [first + round(i * count / parts) for i in range(parts + 1)]
        segments += [Segment(a, b, nested=nested and b - a > 1) for a, b in itertools.pairwise(bounds)]
        first += count
    return tuple(segments)


def _complete(sizes: Mapping[int, BlockBytes], count: int) -> list[BlockBytes]:
    known = list(sizes.values())
    mean = BlockBytes(
        sum(size.input for size in known) // len(known), sum(size.interior for size in known) // len(known)
    )
    return [sizes.get(i, mean) for i in range(count)]


def _within_budget(chains: Sequence[int], sizes: Sequence[BlockBytes], budget: int, in_flight: int = 1) -> Plan:
    count = len(sizes)

    def cheapest(untouched: int) -> Plan:
        """The plan of lowest peak that leaves the last ``untouched`` blocks alone: backward frees them first."""
        rest = _shorten(chains, count - untouched)
        tail = tuple(Segment(i, i + 1, "all") for i in range(count - untouched, count))
        heads = [_by_length(rest, k, nested=False) for k in range(1, max(rest) + 1)] if rest else [()]
        return min((head + tail for head in heads), key=lambda plan: peak_bytes(plan, sizes, in_flight))

    low, high = -1, count + 1  # the number of untouched blocks that fits; more untouched blocks never hold less
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak_bytes(cheapest(middle), sizes, in_flight) <= budget else (low, middle)
    if low >= 0:
        return cheapest(low)
    nested = best_plan(chains, sizes, nested=True, in_flight=in_flight)
    if peak_bytes(nested, sizes, in_flight) <= budget:
        return nested
    least = min(peak_bytes(nested, sizes, in_flight), peak_bytes(cheapest(0), sizes, in_flight))
    raise UnsupportedError(
        explain(
            f"budget_bytes={budget}",
            f"the {count} blocks hold at least {least} bytes at their peak, whatever is recomputed",
            f"use budget_bytes={least} or more, or a smaller batch",
        )
    )


def _shorten(chains: Sequence[int], count: int) -> list[int]:
    kept = []
    for length in chains:
        if count > 0:
            kept.append(min(length, count))
            count -= length
    return kept
