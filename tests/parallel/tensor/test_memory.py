"""Each rank of a tensor-parallel group holds its share of divided parameters, gradients, states and activations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from examples.train_gpt import GPT
from lightning_4d import NDStrategy
from tests.parallel.tensor.memory import KINDS, Held, held

LENGTH, BATCH = 32, 4
SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4}
MODEL = partial(GPT, **SIZES)
TOLERANCE = 0.05
DIVIDED = 0.99  # of the example's parameters: all but the norms


def measured(pool, tp: int, **options: Any) -> Held:
    return pool.run(tp, held, MODEL, partial(NDStrategy, tensor_parallel_size=tp, **options), LENGTH, BATCH)[tp - 1]


@pytest.fixture(scope="module")
def whole(pool) -> Held:
    return measured(pool, 1)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"),
    [(2, False), (4, False), (2, True), pytest.param(4, True, marks=pytest.mark.slow)],
    ids=["tp2", "tp4", "tp2 sequence", "tp4 sequence"],
)
def test_a_rank_holds_its_share_of_what_is_divided(pool, whole, tp, sequence_parallel):
    share = measured(pool, tp, sequence_parallel=sequence_parallel)
    every = set(whole.tensors["parameters"])
    divided = {name for name in every if "norm" not in name}
    for kind in KINDS:
        assert set(share.tensors[kind]) == every
        assert share.of(kind, divided) == pytest.approx(whole.of(kind, divided) / tp, rel=TOLERANCE), kind
        assert share.of(kind, every - divided) == whole.of(kind, every - divided), kind
    assert whole.of("parameters", divided) > DIVIDED * whole.of("parameters", every)
    assert whole.of("optimizer states", divided) == 2 * whole.of("parameters", divided), "AdamW has two"

    assert share.inside == pytest.approx(whole.inside / tp, rel=TOLERANCE)
    if not sequence_parallel:
        assert share.between == whole.between
    assert whole.inside > whole.between, "most of a block's activations are divided"


def test_sequence_parallelism_divides_the_residual_stream(pool, whole):
    # Half of what stands between the layers is their inputs, which are gathered; the residual stream is in parts.
    plain, sequence = measured(pool, 2), measured(pool, 2, sequence_parallel=True)
    inputs = 2 * SIZES["n_layers"] * BATCH * LENGTH * SIZES["dim"] * 4
    assert sequence.between - inputs == pytest.approx((plain.between - inputs) / 2, rel=TOLERANCE)


def test_a_layer_left_whole_is_seen(pool, whole):
    attention = {"blocks.*.attention.[qkv]_proj": "colwise", "blocks.*.attention.o_proj": "rowwise"}
    plan = {key.replace("[qkv]", letter): style for key, style in attention.items() for letter in "qkv"}
    share = measured(pool, 2, tensor_parallel_plan=plan)
    assert share.inside > (1 + TOLERANCE) * whole.inside / 2
    mlp = {name for name in whole.tensors["gradients"] if "mlp." in name}
    for kind in KINDS:
        assert share.of(kind, mlp) == whole.of(kind, mlp)
