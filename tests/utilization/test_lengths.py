"""Counts at lengths between others follow from them exactly, or are not given."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_4d.utilization import Flops
from lightning_4d.utilization.batch import batch_key
from lightning_4d.utilization.lengths import CountsByLength
from tests.utilization.test_flops import GPT, StepFlops, count


def batch(length: int, samples: int = 2) -> torch.Tensor:
    return torch.zeros(samples, length, dtype=torch.long)


def known(counts: dict[int, StepFlops]) -> CountsByLength:
    lengths = CountsByLength()
    for length, flops in counts.items():
        lengths.add(batch_key([batch(length)]), length, flops)
    return lengths


def test_a_transformer_at_another_length():
    model = GPT(1)
    blocks = {"blocks.0": model.blocks[0]}
    counts = {length: count(model, batch(length), blocks=blocks) for length in (4, 6, 11, 16)}
    lengths = known(counts)
    expected = count(model, batch(9), blocks=blocks)
    found = lengths.get(batch_key([batch(9)]), 9)
    assert found is not None
    assert replace(found, small_fraction=0.0) == replace(expected, small_fraction=0.0)
    assert lengths.get(batch_key([batch(6)]), 6) == counts[6]
    assert lengths.get(batch_key([batch(17)]), 17) is None, "beyond what is known"
    assert lengths.get(batch_key([batch(9, samples=3)]), 9) is None, "another number of samples"
    assert known({n: counts[n] for n in (4, 6, 16)}).get(batch_key([batch(9)]), 9) is None, "three confirm nothing"


def test_no_guess_where_counts_are_no_parabola():
    zero = Flops()
    windowed = {n: StepFlops(Flops(n * min(n, 8)), zero, zero, zero) for n in (4, 6, 8, 12, 16)}
    assert known(windowed).get(batch_key([batch(7)]), 7) is None
