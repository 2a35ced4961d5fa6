"""Hugging Face models in pipeline stages, on padded batches and with tied weights. Needs `transformers`."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from tests.strategies.test_pipeline import check_each

pytest.importorskip("transformers")
from tests.strategies.test_huggingface import HuggingFace  # it needs them as well

KINDS = ["llama", "qwen2 tied", "gpt2", "vit"]  # the tokens of each batch are padded; labels ignore what is padded


class WithoutDropout(HuggingFace):
    """Pipelines draw other dropout masks than one process does."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"pipeline_schedule": "gpipe", "num_microbatches": 4}, marks=pytest.mark.slow)],
    ids=["1f1b", "gpipe"],
)
def test_equal_one_process(pool, options):
    cases = {kind: {"module": partial(WithoutDropout, kind)} for kind in KINDS}
    check_each(pool, cases, 2, options=options, rtol=1e-6)  # these models compute their loss in float32
