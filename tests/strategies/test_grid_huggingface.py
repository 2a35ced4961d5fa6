"""Hugging Face models under combinations of axes, on padded batches and with tied weights. Needs `transformers`."""

from __future__ import annotations

from functools import partial

import pytest

from lightning_4d import NDStrategy
from tests.harness import compare, full_tensors, reference, staged_tensors, train

pytest.importorskip("transformers")
from tests.strategies.test_pipeline_huggingface import WithoutDropout  # it needs them as well

PP, CP, TP = ({f"{axis}_parallel_size": 2} for axis in ("pipeline", "context", "tensor"))
LAYOUTS = {"pp.cp": PP | CP, "pp.tp": PP | TP, "cp.tp": CP | TP, "pp.cp.tp": PP | CP | TP}
KINDS = ["llama", "qwen2 tied", "gpt2", "vit"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_one_process(pool, layout, kind):
    sizes = LAYOUTS[layout]
    model = partial(WithoutDropout, kind)
    (expected,) = reference(pool, 1, model)
    gather = staged_tensors if "pipeline_parallel_size" in sizes else full_tensors
    strategy = partial(NDStrategy, data_parallel_shard_size=1, **sizes)
    for rank, found in enumerate(pool.run(2 ** len(sizes), train, model, strategy, gather=gather, timeout=240)):
        compare(found, expected, rtol=1e-6, label=f"rank {rank} ")  # these models compute their loss in float32
