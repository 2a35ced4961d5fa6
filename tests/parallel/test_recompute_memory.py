"""What policies hold at the peak of a step, counted from outside, follows the arithmetic that they plan by."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_4d.parallel.recompute import BlockBytes, RecomputePolicy, best_plan, install, installed, peak_bytes
from lightning_4d.parallel.recompute.plan import make_plan
from tests.saved_bytes import TinyStack, peak_of_step

COUNTS = (4, 16, 36, 64, 100, 144)
INPUT = 8 * 16 * 4  # bytes of a block's input
INTERIOR = 14  # block inputs that a block saves, its own included


def measure(policy: RecomputePolicy, count: int) -> tuple[float, float]:
    """The peaks of the step that measures and of the next, in block inputs."""
    module, x = TinyStack(count), torch.randn(8, 16)
    install(module, policy)
    return peak_of_step(module, x) / INPUT, peak_of_step(module, x) / INPUT


def exponent(values: dict[int, float]) -> float:
    """The slope of the straight line through the logarithms."""
    x = torch.tensor([math.log(count) for count in values])
    y = torch.tensor([math.log(value) for value in values.values()])
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def test_none_grows_as_the_number_of_blocks():
    peaks = {count: measure(RecomputePolicy("none"), count)[1] for count in COUNTS}
    assert peaks == {count: count * INTERIOR for count in COUNTS}


def test_sqrt_is_near_the_best_segment_length_and_never_above_full():
    for count in COUNTS:
        best = min(count / k + k * INTERIOR for k in range(1, count + 1))
        first, later = measure(RecomputePolicy("sqrt"), count)
        full = measure(RecomputePolicy("full"), count)[1]
        assert abs(later - best) <= 0.1 * best
        assert first <= full, "the step that measures holds more than full"
        assert later <= full


def test_nested_grows_as_the_root():
    peaks = {count: measure(RecomputePolicy("sqrt", nested=True), count)[1] for count in COUNTS}
    # The first block of the segment at work is in N/k and in k, but there once: 2√N - 1 inputs, and one interior.
    roots = {count: peak - (INTERIOR - 1) + 1 for count, peak in peaks.items()}
    assert 0.45 <= exponent(roots) <= 0.55
    assert all(peaks[count] <= measure(RecomputePolicy("full"), count)[1] for count in COUNTS if count >= 16)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("count", [5, 23])
def test_the_plan_predicts_what_is_held(nested, count):
    module, x = TinyStack(count), torch.randn(8, 16)
    install(module, RecomputePolicy("sqrt", nested=nested))
    peak_of_step(module, x)
    held = peak_of_step(module, x)
    recompute = installed(module)
    assert held == peak_bytes(recompute.plan, [recompute.sizes[i] for i in range(count)])
    assert recompute.sizes[2] == BlockBytes(INPUT, (INTERIOR - 1) * INPUT, 0)


@pytest.mark.parametrize("budget", [22, 30, 60, 150, 1000])
def test_budget_is_kept_with_the_least_recompute(budget):
    count = 20
    module, x = TinyStack(count), torch.randn(8, 16)
    install(module, RecomputePolicy("budget", budget_bytes=budget * INPUT))
    peak_of_step(module, x)
    assert peak_of_step(module, x) <= budget * INPUT
    untouched = sum(value == 0 for value in installed(module).extra_forwards.values())
    one_more = untouched + 1  # leaving one more block alone does not fit, in any division of the others
    if untouched < count:
        kept = INTERIOR * one_more
        rest = count - one_more
        least = min(math.ceil(rest / k) + max(kept, k * INTERIOR - 1) for k in range(1, rest + 1)) if rest else kept
        assert least > budget


def test_larger_batches_are_measured_again():
    module = TinyStack(64)
    install(module, RecomputePolicy("sqrt"))
    for rows in (8, 8, 32, 32, 8):
        module(torch.randn(rows, 16, requires_grad=True)).backward()
    assert installed(module).sizes[3].input == 4 * INPUT


def test_code_between_blocks_is_kept_and_planned_for():
    class Between(TinyStack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x) * 1.5
            return x.sum()

    module, x = Between(64), torch.randn(8, 16)
    install(module, RecomputePolicy("sqrt"))
    peak_of_step(module, x)
    held = peak_of_step(module, x)
    assert installed(module).sizes[3].unlinked == INPUT
    assert {segment.stop - segment.start for segment in installed(module).plan} == {1}
    assert held <= 1.1 * (64 + INTERIOR) * INPUT


def test_plans_of_two_chains_and_unequal_blocks():
    sizes = [BlockBytes(1, 9)] * 8 + [BlockBytes(4, 100)] * 4
    plan = best_plan([8, 4], sizes, nested=False)
    assert [s.start for s in plan] == [0, *[s.stop for s in plan[:-1]]]
    assert any(s.stop == 8 for s in plan), "a segment crosses from one chain to the other"
    assert all(s.stop - s.start == 1 for s in plan if s.start >= 8)
    assert len(make_plan(RecomputePolicy("sqrt", segments=4), [12], None)) == 4
    assert len(make_plan(RecomputePolicy("sqrt", segments=99), [12], None)) == 12
