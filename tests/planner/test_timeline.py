"""Simulated schedules: each piece of work once and after what it needs, and the bubble that the cost model charges."""

from __future__ import annotations

import itertools

import pytest

from lightning_4d.errors import PlanError
from lightning_4d.planner.facts import SCHEDULES
from lightning_4d.planner.timeline import bubble, timeline


def by_key(work):
    return {(each.kind, each.stage, each.microbatch): each for each in work}


@pytest.mark.parametrize("schedule", [each.name for each in SCHEDULES])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_a_schedule_is_a_schedule(schedule, ranks, microbatches):
    known = next(each for each in SCHEDULES if each.name == schedule)
    chunks = known.chunks or 2
    work = timeline(schedule, ranks, microbatches, chunks)
    done, stages = by_key(work), ranks * chunks
    kinds = ("forward", "input_gradient", "weight_gradient") if known.splits_backward else ("forward", "backward")
    assert len(work) == len(done) == len(kinds) * stages * microbatches
    for rank in range(ranks):  # one thing at a time
        own = [each for each in work if each.rank == rank]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own))
    back = kinds[1]
    for (kind, stage, microbatch), each in done.items():
        if kind == "forward" and stage:
            assert done["forward", stage - 1, microbatch].end <= each.start + 1e-9
        if kind == back:
            needed = done.get((back, stage + 1, microbatch)) or done["forward", stage, microbatch]
            assert needed.end <= each.start + 1e-9
        if kind == "weight_gradient":
            assert done[back, stage, microbatch].end <= each.start + 1e-9


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2)]
)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_the_bubble_is_the_cost_models(schedule, chunks, ranks, microbatches):
    """(p - 1)(F + B)/v of it is left where the cost model says so."""
    known = next(each for each in SCHEDULES if each.name == schedule)
    work = timeline(schedule, ranks, microbatches, chunks, forward=1 / chunks, backward=2 / chunks)
    idle = known.bubble * (ranks - 1) * 3 / chunks
    assert bubble(work) == pytest.approx(idle / (idle + 3 * microbatches), abs=1e-9)


def test_zero_bubbles_are_smaller():
    plain, zero = (bubble(timeline(name, 4, 8, 2)) for name in ("interleaved_1f1b", "interleaved_zero_bubble"))
    assert zero < 0.75 * plain


def test_unknown_schedule():
    with pytest.raises(PlanError, match="use '1f1b'"):
        timeline("2f2b", 2, 4)
