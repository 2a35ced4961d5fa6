"""Names, placements and legal numbers of the schedules agree with what torch's own classes accept."""

from __future__ import annotations

import pytest

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.pipeline.schedule import (
    action_list,
    check_microbatches,
    choose_microbatches,
    find_schedule,
    for_microbatches,
    in_flight,
    schedule_names,
    stage_ranks,
)
from lightning_4d.parallel.pipeline.timeline import efficiency, simulate

ONE = {"forward": 1.0, "backward": 2.0, "input_gradient": 1.0, "weight_gradient": 1.0}


def actions(name: str, ranks: int, microbatches: int):
    kind = find_schedule(name)
    return action_list(kind, ranks, ranks * kind.default_stages_per_rank, microbatches)


def test_torchs_spellings_are_known():
    names = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
    assert [find_schedule(name).name for name in names] == schedule_names()
    with pytest.raises(UnsupportedError, match=r"2f2b.*1f1b"):
        find_schedule("2f2b")


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_called_legal_is_what_torch_accepts(name, ranks):
    kind = find_schedule(name)
    for count in range(1, 3 * ranks + 2):
        try:
            torchs = bool(actions(name, ranks, count))
        except ValueError:
            torchs = False
        assert kind.allows_microbatches(count, ranks) == torchs, count


@pytest.mark.parametrize("name", schedule_names())
def test_every_action_happens_once_and_in_a_possible_order(name):
    spans = simulate(actions(name, 4, 8), ONE)
    stages = 4 * find_schedule(name).default_stages_per_rank
    forwards = [(span.stage, span.microbatch) for span in spans if span.kind == "forward"]
    assert sorted(forwards) == [(s, m) for s in range(stages) for m in range(8)]
    placed = stage_ranks(find_schedule(name), 4, stages)
    assert {(span.stage, span.rank) for span in spans} == set(enumerate(placed))


@pytest.mark.parametrize(("microbatches", "expected"), [(1, 0.25), (4, 4 / 7), (8, 8 / 11), (16, 16 / 19)])
def test_gpipe_is_as_busy_as_theory_says(microbatches, expected):
    assert efficiency(simulate(actions("gpipe", 4, microbatches), ONE)) == pytest.approx(expected)


def test_bubbles_shrink_from_schedule_to_schedule():
    busy = [efficiency(simulate(actions(n, 4, 8), ONE)) for n in ("1f1b", "interleaved_1f1b", "zbv")]
    assert busy[0] == pytest.approx(8 / 11)
    assert busy == sorted(busy)
    assert busy[0] < busy[1] < busy[2]


def test_microbatches_in_flight():
    assert [in_flight(actions("1f1b", 4, 8)[rank]) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight(actions("gpipe", 4, 8)[rank]) for rank in range(4)] == [8] * 4


def test_automatic_microbatches():
    f1b = find_schedule("1f1b")
    assert choose_microbatches(f1b, 64, 4) == 16
    assert choose_microbatches(f1b, 12, 4) == 12
    assert choose_microbatches(f1b, 18, 4) == 9  # all equal, rather than 16
    assert choose_microbatches(f1b, 3, 4) == 3  # fewer than stages
    assert for_microbatches(f1b, 3, 4).name == "gpipe"
    assert for_microbatches(f1b, 4, 4).name == "1f1b"


def test_an_illegal_number_names_the_legal_ones():
    with pytest.raises(UnsupportedError, match=r"num_microbatches=3.*takes 4, 5, 6.*num_microbatches=4"):
        check_microbatches(find_schedule("1f1b"), 3, 4)
    with pytest.raises(UnsupportedError, match="num_microbatches=8"):
        check_microbatches(find_schedule("interleaved_1f1b"), 9, 4)
