"""Plans: found for every kind of model with the collectives of the ideal one, or written and checked against it."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from examples.train_gpt import GPT
from lightning_4d import _torch_private as private
from lightning_4d.cli import main
from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.blocks import find_blocks
from lightning_4d.parallel.tensor import (
    TensorPlan,
    block_collectives,
    divisions,
    explicit_plan,
    find_plan,
    whole_fraction,
)
from lightning_4d.parallel.tensor import plan as plans
from tests.modules import EncoderStack, TinyGPT, ViT, WithBuffers
from tests.parallel.tensor.modules import Llama, NanoGPT, Perceptron, SkipStack

fused = pytest.mark.skipif(not private.HAS_STRIDED_SHARDS, reason="fused weights are divided since torch 2.13")
IDEAL = {"all_reduce": 2}
PAIRS = {"all_gather": 2, "reduce_scatter": 2}


def collectives(module: nn.Module, size: int = 2, **kwargs):
    blocks = find_blocks(module)
    (found,) = block_collectives(module, blocks, find_plan(module, blocks, size), **kwargs)
    assert found.error is None
    assert found.gathered == []
    return found.forward, found.backward


@pytest.mark.parametrize(
    "module",
    [
        GPT,
        partial(TinyGPT, fused_qkv=False),
        pytest.param(TinyGPT, marks=fused),
        pytest.param(NanoGPT, marks=fused),
        partial(Llama, qk_norm=""),
        pytest.param(partial(Llama, qk_norm="", fused=True), marks=fused),
        pytest.param(EncoderStack, marks=fused),
        ViT,
    ],
    ids=["example", "separate", "tiny", "nano", "llama", "gate_up", "encoder", "vit"],
)
def test_a_block_costs_two_collectives_each_way(module):
    assert collectives(module()) == (IDEAL, IDEAL)


def test_a_parallel_block_reduces_one_input_gradient():
    assert collectives(Llama(parallel=True, qk_norm="")) == (IDEAL, {"all_reduce": 1})


@fused
def test_sequence_parallel_blocks_gather_and_scatter():
    forward, backward = collectives(NanoGPT(), sequence_parallel=True)
    assert forward == PAIRS
    assert {kind: count for kind, count in backward.items() if kind != "all_reduce"} == PAIRS


def test_norms_of_queries_and_keys_add_their_own_small_reductions():
    assert collectives(Llama(qk_norm="head")) == (IDEAL, {"all_reduce": 4})


def found_plan(module: nn.Module, size: int) -> TensorPlan:
    return find_plan(module, find_blocks(module), size)


def styles(module: nn.Module, size: int) -> dict[str, str]:
    return {name: choice.style for name, choice in found_plan(module, size).choices.items()}


@fused
def test_fused_weights_are_divided_by_parts():
    plan = found_plan(NanoGPT(), 2)
    assert plan.choices["h.0.attn.c_attn"].style == "fused_colwise"
    assert plan.choices["h.0.attn.c_attn"].parts == 3
    assert plan.choices["lm_head"].why == "vocabulary of 24, tied to wte"
    rows = {row.name: row for row in divisions(NanoGPT(), plan)}
    assert rows["h.*.attn.c_attn"].shapes["weight"] == ((96, 32), (48, 32))
    assert rows["h.*.ln_1"].style == "replicate"
    assert 0.0 < whole_fraction(rows.values()) < 0.05


def test_before_torch_2_13_fused_weights_stay_whole_or_are_refused():
    with mock.patch.object(private, "HAS_STRIDED_SHARDS", False), mock.patch.object(plans, "HAS_STRIDED_SHARDS", False):
        found = styles(NanoGPT(), 2)
        assert found["h.0.attn.c_attn"] == found["h.0.attn.c_proj"] == "replicate"
        assert found["h.0.mlp.c_fc"] == "colwise"
        assert styles(EncoderStack(), 2)["encoder.layers.0.self_attn"] == "replicate"
        with pytest.raises(UnsupportedError, match=r"needs torch 2\.13"):
            explicit_plan(NanoGPT(), {"h.*.attn.c_attn": "fused_colwise:3"}, 2)


def test_what_does_not_divide_is_left_whole_with_a_reason():
    found = found_plan(Llama(), 4)  # 2 heads of keys over 4 ranks
    assert found.choices["layers.0.attention.wq"].style == "colwise"
    assert found.choices["layers.0.attention.wk"].style == "replicate"
    one_key = styles(Llama(kv_heads=1), 2)
    assert one_key["layers.0.attention.wq"] == "colwise"
    assert one_key["layers.0.attention.wv"] == "replicate"
    assert styles(TinyGPT(vocab=31), 2)["embedding"] == "replicate"
    assert "does not divide by 2" in found_plan(TinyGPT(vocab=31), 2).choices["head"].why
    odd = styles(TinyGPT(dim=48, heads=3), 2)
    assert odd["blocks.0.attention.qkv"] == odd["blocks.0.attention.out"] == "replicate"
    assert odd["blocks.0.mlp.0"] == "colwise"


def test_weights_that_are_computed_stay_whole():
    module = TinyGPT(vocab=32, fused_qkv=False)
    for block in module.blocks:
        for layer in (block.mlp[0], block.mlp[2]):  # type: ignore[index]
            nn.utils.parametrizations.weight_norm(layer)
    nn.utils.parametrizations.weight_norm(module.head)
    found = styles(module, 2)
    assert not [name for name in found if "mlp" in name or name == "head"]
    assert found["blocks.0.attention.q"] == "colwise"


def _computed(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.utils.parametrizations.weight_norm(module)


def test_chains_of_layers_beside_blocks_do_not_make_the_model_one_block():
    found = styles(SkipStack(), 2)
    assert found["blocks.0.mlp.0"] == found["blocks.3.mlp.0"] == "colwise"


def test_nothing_to_divide_is_refused_with_sizes_that_work():
    with pytest.raises(UnsupportedError, match=r"tensor_parallel_size=3 for TinyGPT.*use tensor_parallel_size=2 or 4"):
        found_plan(TinyGPT(), 3)
    with pytest.raises(UnsupportedError, match=r"use tensor_parallel_size=1\.$"):  # 2 was given, and 4 does not work
        found_plan(TinyGPT(dim=6, heads=2, layers=1, vocab=31).requires_grad_(False).apply(_computed), 2)
    with pytest.raises(UnsupportedError, match="batch_norm"):
        find_plan(WithBuffers(), [], 2)


def test_models_without_blocks_are_one_block():
    assert styles(Perceptron(), 2) == {
        "net.0": "colwise", "net.2": "rowwise", "net.3": "colwise", "net.6": "rowwise"
    }  # fmt: skip


def test_a_tied_parameter_is_one_tensor_in_a_model_that_is_one_block():
    found = styles(TinyGPT(vocab=7, layers=1, tied=True), 2)
    assert found["blocks.0.mlp.0"] == "colwise"
    assert found["head"] == found["embedding"] == "replicate"


def test_dropout_in_attention_leaves_it_divided():
    for fused in (False, True):
        without, dropping = (styles(TinyGPT(fused_qkv=fused, dropout=p), 2) for p in (0.0, 0.5))
        assert dropping == without
        assert dropping["blocks.0.attention.out"] == "rowwise"


def test_finding_a_plan_leaves_no_trace():
    module = NanoGPT(dropout=0.5)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    state = torch.get_rng_state()
    find_plan(module, find_blocks(module), 2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


def test_meta_modules_need_no_memory():
    with torch.device("meta"):
        module = TinyGPT()
    assert styles(module, 2)["blocks.0.mlp.0"] == "colwise"


PLAN = {"h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise", "h.*.attn.c_attn": "fused_colwise:3", "wte": "vocab"}


@fused
def test_a_written_plan():
    plan = explicit_plan(NanoGPT(), PLAN, 2)
    assert plan.choices["h.1.attn.c_attn"].parts == 3
    assert plan.splits(NanoGPT())["h.0.mlp.c_proj.weight"].dim == 1


@pytest.mark.parametrize(
    ("plan", "size", "message"),
    [
        ({"h.*.mlp.c_fcc": "colwise"}, 2, r"matches no module.*'h\.\*\.mlp\.c_fc'"),
        ({"h.*.mlp.c_fc": "columnwise"}, 2, "use 'colwise'"),
        ({"h.*.ln_1": "colwise"}, 2, "a LayerNorm: such a module can be sequence, replicate"),
        ({"h.*.mlp.c_fc": "colwise"}, 3, r"bias has 128 features|weight has 128 features.*use 1, 2, 4, 8"),
        ({"h.*.mlp.c_fc": "colwise", "h.0.mlp.c_fc": "rowwise"}, 2, "one style"),
        ({"h.*.attn.c_attn": "fused_colwise:0"}, 2, "fused_colwise:2 for two parts"),
    ],
)
def test_written_plans_are_checked_against_the_module(plan, size, message):
    with pytest.raises(UnsupportedError, match=message):
        explicit_plan(NanoGPT(), plan, size)


@fused
def test_heads_of_an_attention_layer_have_to_divide():
    with pytest.raises(UnsupportedError, match=r"num_heads has 2 features.*use 1 or 2"):
        explicit_plan(EncoderStack(dim=16, heads=2), {"encoder.layers.*.self_attn": "attention"}, 4)


@fused
def test_explain(capsys):
    command = ["explain", "tests.parallel.tensor.modules.NanoGPT", "--tensor-parallel-size", "2"]
    assert main([*command, "--init-args", '{"layers": 3}']) == 0
    printed = capsys.readouterr().out
    assert "h.*.attn.c_attn (x3)" in printed
    assert "fused_colwise:3" in printed
    assert "weight 48x32 of 96x32" in printed
    assert "block h.0 and 2 like it: collectives forward 2 all_reduce; backward 2 all_reduce" in printed
    assert main([*command, "--tensor-parallel-plan", '{"h.*.mlp.c_fcc": "colwise"}']) == 1
    assert "nearest names" in capsys.readouterr().err
    assert main(["explain", "tests.no_such.Model", "--tensor-parallel-size", "2"]) == 1
    assert "cannot be imported" in capsys.readouterr().err
