"""Divide a chain of blocks into stages of nearly equal cost: plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_4d.errors import UnsupportedError, explain


def divide(costs: Sequence[float], stages: int, *, before: float = 0.0, after: float = 0.0) -> list[int]:
    """Return the first block of each stage, so that the costliest stage costs least.

    Of equal divisions the one whose stages differ least (by the sum of squares).

    Args:
        costs: of each block, in order, in any unit.
        stages: at least one block goes to each.
        before: cost of what the first stage computes before its blocks (an embedding).
        after: cost of what the last stage computes after its blocks (a head and a loss).

    Raises:
        UnsupportedError: fewer blocks than stages.
    """
    check_count(len(costs), stages)
    prefix = [0.0]
    for one in costs:
        prefix.append(prefix[-1] + one)

    def cost(start: int, stop: int) -> float:
        extra = (before if start == 0 else 0.0) + (after if stop == len(costs) else 0.0)
        return prefix[stop] - prefix[start] + extra

    # best[stop]: (costliest stage, sum of squares, starts) of the best division of the first `stop` blocks
    best: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())] + [(float("inf"), 0.0, ())] * len(costs)
    for stage in range(stages):
        longer: list[tuple[float, float, tuple[int, ...]]] = [(float("inf"), 0.0, ())] * (len(costs) + 1)
        for stop in range(stage + 1, len(costs) - (stages - stage - 1) + 1):
            options = (
                (
                    max(best[start][0], cost(start, stop)),
                    best[start][1] + cost(start, stop) ** 2,
                    (*best[start][2], start),
                )
                for start in range(stage, stop)
                if len(best[start][2]) == stage
            )
            longer[stop] = min(options, default=(float("inf"), 0.0, ()))
        best = longer
    return list(best[len(costs)][2])


def check_count(blocks: int, stages: int) -> None:
    """Refuse fewer blocks than stages.

    Raises:
        UnsupportedError: with the number of stages that would work.
    """
    if blocks >= stages:
        return
    raise UnsupportedError(
        explain(
            f"{blocks} blocks for {stages} pipeline stages",
            "each stage holds at least one block",
            f"use at most {blocks} stages (pipeline ranks times stages per rank)"
            if blocks
            else "use pipeline_parallel_size=1: the model has no chain of repeated blocks, or name it by blocks=",
        )
    )
