"""Hugging Face models under every combination of axes, with padded batches and tied weights. Needs `transformers`."""

from __future__ import annotations

from functools import cache, partial

import pytest

from lightning_4d import ParallelLayout
from tests.grid import COMBINATIONS, Case, strategy_of
from tests.harness import compare, full_tensors, reference, staged_tensors, train

pytest.importorskip("transformers")
from tests.strategies.test_pipeline_huggingface import WithoutDropout  # it needs them as well

KINDS = ["llama", "qwen2 tied", "gpt2", "vit"]
CASES = [Case(axes, kind, "plain") for kind in KINDS for axes in COMBINATIONS]


@pytest.fixture(scope="module")
def expected(pool):
    """What each rank of DDP gives for a kind, on so many ranks: trained once."""
    return cache(lambda kind, data: reference(pool, data, partial(WithoutDropout, kind)))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_ddp(pool, expected, case):
    gather = staged_tensors if "pipeline" in case.axes else full_tensors
    model = partial(WithoutDropout, case.module)
    layout = ParallelLayout.resolve(case.world, **case.sizes)
    theirs = expected(case.module, layout.data_parallel_size)
    for rank, mine in enumerate(pool.run(case.world, train, model, strategy_of(case), gather=gather, timeout=240)):
        # In float32 these models compute their loss.
        compare(mine, theirs[layout.data_parallel_rank(rank)], rtol=1e-6, label=f"rank {rank} ")
