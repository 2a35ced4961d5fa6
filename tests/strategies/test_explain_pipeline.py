"""What is said of stages is what training does with them."""

from __future__ import annotations

import pytest

from lightning_4d.errors import UnsupportedError
from lightning_4d.strategies.explain_pipeline import explain_stages
from tests.modules import TinyGPT


def test_stages_of_a_gpt():
    module = TinyGPT(layers=4, vocab=31)
    stages = explain_stages(module, 2)
    assert [(stage.first, stage.last, stage.rank) for stage in stages] == [
        ("blocks.0", "blocks.1", 0),
        ("blocks.2", "blocks.3", 1),
    ]
    whole = sum(parameter.numel() for parameter in module.parameters())
    assert sum(stage.parameters for stage in stages) == whole
    assert stages[1].flops > stages[0].flops  # the head
    assert [stage.sends for stage in stages] == [4 * 12 * 16, 0]


def test_a_large_head_takes_the_place_of_blocks():
    stages = explain_stages(TinyGPT(layers=6, vocab=2000), 2)
    assert [stage.first for stage in stages] == ["blocks.0", "blocks.5"]


def test_tied_weights_count_on_both_stages():
    module = TinyGPT(layers=4, tied=True)
    stages = explain_stages(module, 2)
    whole = sum(parameter.numel() for parameter in module.parameters())
    assert sum(stage.parameters for stage in stages) == whole + module.head.weight.numel()


def test_a_split_of_the_users():
    stages = explain_stages(TinyGPT(layers=4), 2, split=["blocks.1"])
    assert [stage.first for stage in stages] == ["blocks.0", "blocks.1"]
    with pytest.raises(UnsupportedError, match=r"'blocks.7'.*blocks.3"):
        explain_stages(TinyGPT(layers=4), 2, split=["blocks.7"])
