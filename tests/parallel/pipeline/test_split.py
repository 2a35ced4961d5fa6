"""Stages are divided by cost."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.pipeline.split import divide


def worst(costs, starts, before, after):
    stops = [*starts[1:], len(costs)]
    sums = [sum(costs[a:b]) for a, b in zip(starts, stops, strict=True)]
    sums[0] += before
    sums[-1] += after
    return max(sums)


def test_equal_blocks_are_divided_equally():
    assert divide([1.0] * 8, 4) == [0, 2, 4, 6]


def test_a_costly_head_takes_the_place_of_blocks():
    assert divide([1.0] * 8, 2, after=2.0) == [0, 5]
    assert divide([1.0] * 8, 2, before=2.0) == [0, 3]


def test_no_division_is_better():
    random.seed(0)
    for _ in range(50):
        costs = [random.random() for _ in range(7)]
        before, after, stages = random.random(), 3 * random.random(), random.randint(1, 4)
        found = divide(costs, stages, before=before, after=after)
        assert len(found) == stages
        every = ([0, *rest] for rest in itertools.combinations(range(1, 7), stages - 1))
        assert worst(costs, found, before, after) == pytest.approx(min(worst(costs, s, before, after) for s in every))


def test_fewer_blocks_than_stages():
    with pytest.raises(UnsupportedError, match=r"3 blocks for 4 pipeline stages.*at most 3"):
        divide([1.0] * 3, 4)
