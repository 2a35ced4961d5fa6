"""Parameters, FLOPs and memory against figures that papers print."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_4d.planner.constants import Constants
from lightning_4d.planner.facts import RECOMPUTE, Plan, Software
from lightning_4d.planner.memory import activation_bytes, memory_bytes
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.presets import MODELS
from lightning_4d.planner.published import flops_per_token, program_of, read_run
from lightning_4d.planner.stages import Stages, first_blocks


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.124),
        ("gpt2-xl", 1.557),
        ("gpt3-175b", 174.6),
        ("llama2-7b", 6.738),
        ("llama2-70b", 68.98),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
        ("vit-b16", 0.0866),
        ("vit-l16", 0.304),
    ],
)
def test_parameters_of_presets(name, billions):
    assert float(MODELS[name].parameters) / 1e9 == pytest.approx(billions, rel=6e-3)


def test_flops_per_token_by_convention():
    """Llama 3 8B at 8,192 tokens: torchtitan's and Megatron's figures."""
    model = MODELS["llama3-8b"]
    assert flops_per_token(model, "nemo2407_full_attn") == pytest.approx(5.791e10, rel=2e-3)
    assert flops_per_token(model, "causal") == pytest.approx(5.147e10, rel=2e-3)
    assert float(model.flops) / 8192 == pytest.approx(5.147e10, rel=2e-3)


def test_korthikanti_activations_of_a_gpt3_layer():
    """Their table 2 for GPT-3, microbatch 1, tp 8: 552 MiB, with sequence parallelism 342, and with selective 102."""
    gpt3 = ModelFacts(96, 12288, 96, 96, 128, 49152, 2, 51200, 2048, tied=1)
    plan = Plan(1, 1, 1, 1, 8, 0, 1, 1, 1, 0, RECOMPUTE["none"])

    def mib(**software: float) -> float:
        return float(activation_bytes(gpt3, Software(dropout=1, **software), plan)[0]) / 2**20

    assert mib(attention=0, sequence_parallel=1) == pytest.approx(342, rel=0.01)
    assert mib(attention=2, sequence_parallel=1) == pytest.approx(102, rel=0.01)
    assert mib(attention=0, sequence_parallel=0) == pytest.approx(552, rel=0.01)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (3, 1.9)])
def test_states_of_the_zero_paper(zero, gigabytes):
    """7.5B parameters on 64 devices, 2 bytes for parameters and gradients and 12 for the optimizer."""
    model = ModelFacts(1, 1, 0, 0, 0, 0, 2, 1, 1, extra_parameters=7.5e9)
    plan = Plan(1, 1, 64, 1, 1, zero, 1, 1, 1, 0, RECOMPUTE["none"])
    parts = memory_bytes(model, Software(gradient_memory=2), plan, Constants(runtime_memory=0)).parts
    states = sum(float(np.asarray(parts[name])) for name in ("parameters", "gradients", "optimizer"))
    assert states / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_stages():
    assert (float(Stages.of(126, 16).most), float(Stages.of(126, 16).last)) == (8, 7)  # Llama 3 405B, and BLOOM's way
    assert (float(Stages.of(32, 4).most), float(Stages.of(32, 4).last)) == (8, 8)
    balanced = Stages.of(16, 2, 4.0)
    assert (float(balanced.most), float(balanced.last)) == (10, 6)
    for layers, stages, head in ((126, 64, 1.5), (32, 8, 4.0), (5, 5, 9.0)):
        starts = first_blocks(layers, stages, head)
        assert len(starts) == stages
        assert starts[0] == 0
        assert starts[-1] < layers
        assert all(b > a for a, b in itertools.pairwise(starts))


ROW = {
    "id": "x",
    "source": "",
    "model_name": "GPT",
    "params_total": "",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "kv_heads": "",
    "head_dim": "128",
    "ffn_hidden": "",
    "ffn_matrices": "",
    "vocab": "",
    "seq_len": "2048",
    "global_batch_sequences": "512",
    "micro_batch": "4",
    "gpus": "64",
    "gpu_type": "A100-SXM-80GB",
    "gpus_per_node": "8",
    "precision": "bf16",
    "dp_replicate": "",
    "dp_shard": "",
    "zero_stage": "",
    "tp": "2",
    "cp": "1",
    "pp": "4",
    "virtual_pp": "",
    "schedule": "",
    "activation_ckpt": "",
    "tflops_per_gpu": "",
    "mfu_pct": "",
    "tokens_per_s_per_gpu": "",
    "memory_gib_per_gpu": "",
    "step_time_s": "",
    "flops_convention": "",
    "interconnect": "",
    "status": "ok",
    "notes": "",
}


def test_what_was_measured_does_not_enter_a_prediction():
    told = ROW | {"step_time_s": "3.5", "tflops_per_gpu": "150", "mfu_pct": "48", "memory_gib_per_gpu": "40"}
    plain, measured = read_run(ROW), read_run(told)
    for name in ("model", "machine", "software", "plan"):
        assert repr(getattr(plain, name)) == repr(getattr(measured, name))
    assert measured.seconds == 3.5
    assert np.isnan(plain.seconds)


@pytest.mark.parametrize(
    ("interconnect", "gigabytes", "slow"),
    [
        ("NVLink3/NVSwitch; 8x200Gb/s HDR IB per node", 200, 0),
        ("NVLink4; RDMA 400Gb/s per GPU", 400, 0),
        ("1600Gb/s RoCE node-node", 200, 0),
        ("4x100Gb/s RoCE per node", 50, 0),
        ("NVLink; 4 Omni-Path links per node", 50, 1),
        ("", 200, 0),
    ],
)
def test_interconnects(interconnect, gigabytes, slow):
    machine = read_run(ROW | {"interconnect": interconnect}).machine
    assert (float(machine.network) / 1e9, float(machine.slow_fabric)) == (gigabytes, slow)


def test_a_row_of_an_unknown_source_and_blanks_is_read():
    run = read_run(ROW)
    assert program_of(ROW).pattern == ""
    assert float(run.plan.dp) == 8
    assert float(run.plan.microbatches) == 16
    assert read_run(ROW | {"layers": "", "hidden": "", "model_name": "Llama 3 8B"}).model.layers > 0
    assert read_run(ROW | {"seq_len": "", "gpus_per_node": "", "global_batch_sequences": "", "micro_batch": ""})
