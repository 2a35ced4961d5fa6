"""The published worked examples of MFU and HFU, each with its published answer; ratings and hints."""

from __future__ import annotations

import pytest

from lightning_4d.utilization import Utilization, gpt_parameters, hfu, hints, lookup, mfu, rating, transformer_flops

A100, TPU_V4, H100, H100_ROUNDED = 312e12, 275e12, 989.5e12, 989e12


def percent(value: float) -> float:
    return 100 * value


# ------------------------------------------------------------------------------------------- PaLM, arXiv:2204.02311 B

PALM = {"layers": 118, "attention_width": 48 * 256, "length": 2048}


def test_palm_540b():
    flops = transformer_flops(parameters=540e9, tokens=238.3e3, **PALM)
    without = 6 * 540e9 * 238.3e3
    executed = transformer_flops(
        parameters=540e9, tokens=238.3e3, recomputed_parameters=0.75 * 540e9, recomputed_attention=1, **PALM
    )
    assert percent(mfu(without, 1.0, TPU_V4, 6144)) == pytest.approx(45.7, abs=0.05)
    assert percent(mfu(flops, 1.0, TPU_V4, 6144)) == pytest.approx(46.2, abs=0.05)
    assert percent(hfu(executed, 1.0, TPU_V4, 6144)) == pytest.approx(57.8, abs=0.05)


def test_palm_table_22():
    N = 540.35e9
    assert transformer_flops(parameters=N, tokens=1, **PALM) / 1e12 == pytest.approx(3.28, abs=0.005)
    remat = transformer_flops(parameters=N, tokens=1, recomputed_parameters=0.75 * N, recomputed_attention=1, **PALM)
    assert remat / 1e12 == pytest.approx(4.10, abs=0.005)


def test_megatron_turing_530b_in_palms_convention():
    tokens = 1920 * 2048
    plain = 6 * 530e9 * tokens
    flops = transformer_flops(parameters=530e9, tokens=tokens, layers=105, attention_width=20480, length=2048)
    assert percent(mfu(plain, 60.1, A100, 2240)) == pytest.approx(29.7, abs=0.1)
    assert percent(mfu(flops, 60.1, A100, 2240)) == pytest.approx(30.2, abs=0.1)


def test_nanogpt():
    flops = transformer_flops(parameters=124e6, tokens=178e3, layers=12, attention_width=12 * 64, length=1024)
    assert percent(mfu(6 * 124e6 * 178e3, 1.0, A100)) == pytest.approx(42.4, abs=0.1)
    assert percent(mfu(flops, 1.0, A100)) == pytest.approx(48.9, abs=0.1)


# ------------------------------------------------------------------------- Korthikanti et al. 2022, arXiv:2205.05198


@pytest.mark.parametrize(
    ("batch", "layers", "hidden", "gpus", "seconds", "published_mfu", "published_hfu"),
    [
        (4, 48, 6144, 8, 1.10, 41.5, 43.7),
        (64, 96, 12288, 64, 13.75, 51.4, 52.8),
        (280, 105, 20480, 280, 37.83, 56.0, 57.0),
        (512, 128, 25600, 512, 71.49, 56.3, 57.0),
    ],
    ids=["22B", "175B", "530B", "1T"],
)
def test_korthikanti_with_selective_recomputation(batch, layers, hidden, gpus, seconds, published_mfu, published_hfu):
    s, v = 2048, 51200
    shape = {
        "parameters": gpt_parameters(layers, hidden, v),
        "tokens": batch * s,
        "layers": layers,
        "attention_width": hidden,
        "length": s,
    }
    model = transformer_flops(**shape)
    formula = 72 * batch * layers * s * hidden**2 * (1 + s / (6 * hidden) + v / (12 * hidden * layers))
    assert model == pytest.approx(formula, rel=1e-12)
    assert percent(mfu(model, seconds, A100, gpus)) == pytest.approx(published_mfu, abs=0.2)
    # The paper doubles the whole attention term, so it counts its repetition as a forward and a backward.
    executed = transformer_flops(**shape, recomputed_attention=3)
    paper = 72 * batch * layers * s * hidden**2 * (1 + s / (3 * hidden) + v / (12 * hidden * layers))
    assert executed == pytest.approx(paper, rel=1e-12)
    assert percent(hfu(executed, seconds, A100, gpus)) == pytest.approx(published_hfu, abs=0.2)


# ------------------------------------------------------------ Megatron, arXiv:2104.04473: a whole recompute included


def test_bloom_176b_tflops():
    layers, hidden, s, v, batch = 70, 14336, 2048, 250880, 2048
    flops = transformer_flops(
        parameters=gpt_parameters(layers, hidden, v),
        tokens=batch * s,
        layers=layers,
        attention_width=hidden,
        length=s,
        recomputed_parameters=12 * layers * hidden**2,
        recomputed_attention=1,
    )
    formula = 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    assert flops == pytest.approx(formula, rel=1e-12)
    assert flops / 104.50 / 384 / 1e12 == pytest.approx(150.05, abs=0.05)


# ----------------------------------------------------------------------------------------------------- Llama-3 rows

LLAMA_8B = {"layers": 32, "attention_width": 4096, "length": 8192}
EMBEDDING_8B, ALL_8B = 128256 * 4096, 8_030_261_248
HEAD_ONLY_8B = ALL_8B - EMBEDDING_8B


def test_llama3_8b_conventions_per_token():
    matrices = 6 * HEAD_ONLY_8B
    assert matrices == pytest.approx(4.503e10, rel=1e-3)
    full = transformer_flops(parameters=HEAD_ONLY_8B, tokens=1, **LLAMA_8B)
    causal = transformer_flops(parameters=HEAD_ONLY_8B, tokens=1, attention="causal", **LLAMA_8B)
    with_embedding = transformer_flops(parameters=ALL_8B, tokens=1, **LLAMA_8B)
    assert full == pytest.approx(5.791e10, rel=1e-3)
    assert causal == pytest.approx(5.147e10, rel=1e-3)
    assert with_embedding == pytest.approx(6.106e10, rel=1e-3)


@pytest.mark.parametrize(("rate", "published"), [(5762, 33.7), (6667, 39.0)])
def test_torchtitan_llama3_8b(rate, published):
    flops = transformer_flops(parameters=HEAD_ONLY_8B, tokens=rate, **LLAMA_8B)
    assert flops / rate == pytest.approx(5.791445e10, rel=1e-4)
    assert percent(mfu(flops, 1.0, H100_ROUNDED)) == pytest.approx(published, abs=0.06)


def test_megatron_bridge_and_nemo_llama3_8b_tflops():
    causal = transformer_flops(parameters=HEAD_ONLY_8B, tokens=14451, attention="causal", **LLAMA_8B)
    full = transformer_flops(parameters=HEAD_ONLY_8B, tokens=12273, **LLAMA_8B)
    assert causal / 1e12 == pytest.approx(744, abs=1)
    assert full / 1e12 == pytest.approx(711, abs=1)


def test_llm_foundry_70b():
    N, tokens = 64862437376, 1007
    flops = transformer_flops(parameters=N, tokens=tokens, layers=80, attention_width=8192, length=2048)
    assert percent(mfu(flops, 1.0, H100)) == pytest.approx(41.25, abs=0.05)
    assert percent(hfu(4 / 3 * flops, 1.0, H100)) == pytest.approx(55.0, abs=0.05)


def test_megascale_baseline_175b():
    for batch, gpus, seconds, published in ((768, 256, 40.0, 53.0), (6144, 12288, 8.57, 41.2)):
        flops = transformer_flops(
            parameters=gpt_parameters(96, 12288, 64000),
            tokens=batch * 2048,
            layers=96,
            attention_width=12288,
            length=2048,
        )
        assert percent(mfu(flops, seconds, A100, gpus)) == pytest.approx(published, abs=0.1)


def test_maxtext_on_tpu_v5p():
    v5p = lookup("TPU v5p")
    assert v5p is not None
    assert percent(mfu(764.67e12, 5.667, v5p.tflops["bf16"] * 1e12)) == pytest.approx(29.40, abs=0.01)


# ------------------------------------------------------------------------------------------------ ratings and hints


def test_rating():
    assert [rating(x) for x in (0.1, 0.30, 0.31, 0.40, 0.41)] == ["low", "low", "good", "good", "excellent"]


@pytest.mark.parametrize("wrong", [{"seconds": 0.0}, {"peak_flops": 0.0}, {"devices": 0}])
def test_impossible_arguments_are_refused_by_name(wrong):
    good = {"model_flops": 1.0, "seconds": 1.0, "peak_flops": 1.0, "devices": 1}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        mfu(**(good | wrong))


def test_hints_name_what_stands_out_and_nothing_else():
    h100 = lookup("NVIDIA H100 80GB HBM3")
    assert h100 is not None

    def kinds(**seen):
        return [hint.kind for hint in hints(Utilization(**seen))]

    assert kinds() == []
    assert kinds(dtype="fp32", faster_dtypes=h100.tflops) == ["fp32"]
    assert kinds(dtype="tf32", faster_dtypes=h100.tflops) == []
    assert kinds(data_wait_fraction=0.11) == ["data_wait"]
    assert kinds(data_wait_fraction=0.10) == []
    assert kinds(mfu=0.3, hfu=0.4) == ["recompute"]
    assert kinds(mfu=0.3, hfu=0.31) == []
    assert kinds(small_matmul_fraction=0.6) == ["small_matmuls"]
