"""Models and clusters as users name them: presets, files, Hugging Face configurations, classes."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from lightning_4d.errors import PlanError
from lightning_4d.parallel.blocks import find_blocks
from lightning_4d.planner import cluster_facts, from_hugging_face, model_facts
from lightning_4d.planner.cluster import device_facts
from lightning_4d.planner.counted import build_module, count_module, parse_batch

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
VIT = {
    "model_type": "vit",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
}


@pytest.mark.parametrize(
    ("config", "preset"), [(LLAMA, "llama3-8b"), (GPT2, "gpt2"), (VIT, "vit-b16")], ids=["llama", "gpt2", "vit"]
)
def test_hugging_face(tmp_path, config, preset):
    known = model_facts(preset)
    facts = from_hugging_face(config)
    assert float(facts.parameters) == pytest.approx(float(known.parameters), rel=0.01)
    assert float(facts.flops) == pytest.approx(float(known.flops), rel=0.01)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert float(model_facts(str(tmp_path)).parameters) == float(facts.parameters)


def test_a_configuration_without_a_size_is_refused():
    with pytest.raises(PlanError, match="num_hidden_layers or n_layer"):
        from_hugging_face({"model_type": "llama", "hidden_size": 64})


def test_yaml(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("layers: 4\nhidden: 256\nheads: 4\nvocab: 1000\nseq_len: 128\n")
    facts = model_facts(str(path))
    assert (facts.name, facts.head_dim, facts.ffn_hidden) == ("mine", 64, 1024)
    path.write_text("layers: 4\nhidden: 256\nwidth: 3\n")
    with pytest.raises(PlanError, match="width"):
        model_facts(str(path))
    path.write_text("layers: 4\n")
    with pytest.raises(PlanError, match="without hidden, vocab, seq_len"):
        model_facts(str(path))
    path.write_text("[1, 2]")
    with pytest.raises(PlanError, match="names and values"):
        model_facts(str(path))


def test_unknown_names_are_answered_with_known_ones():
    with pytest.raises(PlanError, match="use 'llama3-8b'"):
        model_facts("lama3-8b")
    with pytest.raises(PlanError, match="use 'dgx-h100'"):
        cluster_facts("dgx-h10")
    with pytest.raises(PlanError, match="a node has 8 devices; use 16"):
        cluster_facts("dgx-h100", 15)


def test_clusters(tmp_path):
    meta = cluster_facts("meta-llama3")
    assert (meta.devices, meta.devices_per_node, meta.network_gbs, meta.device.link_gbs) == (24_576, 8, 400, 450)
    assert cluster_facts("meta-llama3-pod").devices == 3_072
    tpu = cluster_facts("tpu-v5p-pod")
    assert (tpu.devices, tpu.device.peak / 1e12, tpu.device.memory_gb) == (8_960, 459, 95)
    assert cluster_facts("H100", 4).devices_per_node == 4
    path = tmp_path / "mine.yaml"
    path.write_text("device: A100-SXM-80GB\nnodes: 2\nnetwork_gbs: 100\nmatmul_tflops: 250\n")
    mine = cluster_facts(str(path))
    assert (mine.devices, mine.machine().matmul_share) == (16, pytest.approx(250 / 312))
    path.write_text("device: A100-SXM-80GB\nspeed: 3\n")
    with pytest.raises(PlanError, match="speed"):
        cluster_facts(str(path))
    local = cluster_facts("local-cpu", 4)
    assert local.devices == 4
    assert local.device.memory_gb > 0


@pytest.mark.parametrize(
    ("name", "memory", "tflops"),
    [
        ("A100-SXM-40GB", 40, 312),
        ("A800-80GB", 80, 312),
        ("H100-SXM-96GB-HBM2e-500W", 96, 989.4),
        ("V100-SXM-32GB", 32, 125),
        ("NVIDIA H200", 141, 989.4),
        ("B200", 180, 2250),
        ("TPUv5e", 16, 197),
        ("MI300X", 192, 1307.4),
    ],
)
def test_devices(name, memory, tflops):
    device = device_facts(name)
    assert (device.memory_gb, device.peak / 1e12) == (memory, pytest.approx(tflops))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Encoder(nn.Module):
    """Blocks without attention around a classifier: no transformer at all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(20, 32)
        self.blocks = nn.Sequential(*(Feed() for _ in range(5)))
        self.head = nn.Linear(32, 10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.blocks(self.stem(x))), y)


def test_a_module_is_counted_on_fake_tensors():
    module = build_module("examples.train_gpt.GPT", {"dim": 64, "n_layers": 3, "n_heads": 4})
    assert all(parameter.is_meta for parameter in module.parameters())
    blocks = {block.name: block.module for block in find_blocks(module, "auto")}
    facts = count_module(module, parse_batch("int64:4x32,int64:4x32"), blocks, "GPT")
    assert (facts.layers, facts.hidden, facts.heads, facts.head_dim) == (3, 64, 4, 16)
    assert (facts.vocab, facts.seq_len, facts.causal) == (256, 32, 1)
    assert float(facts.parameters) == sum(parameter.numel() for parameter in module.parameters())
    # Three matrices of the gated feed-forward part compute what two wider ones do.
    assert float(facts.ffn_parameters) == pytest.approx(3 * 64 * 160, rel=0.01)
    assert "log" not in module.__dict__


def test_a_module_that_is_no_transformer_is_counted_too():
    module = Encoder()
    blocks = {block.name: block.module for block in find_blocks(module, "auto")}
    facts = count_module(module, parse_batch("float32:8x20,int64:8"), blocks)
    assert (facts.layers, facts.hidden, facts.heads, facts.seq_len) == (5, 32, 0, 1)
    assert float(facts.parameters) == sum(parameter.numel() for parameter in module.parameters())
    assert facts.ffn_hidden == 64


def test_errors_of_counting():
    with pytest.raises(PlanError, match="must be importable"):
        build_module("no.such.Module", {})
    with pytest.raises(PlanError, match="use for instance int64:8x128"):
        parse_batch("int64-8")
    with pytest.raises(PlanError, match="correct init_args"):
        build_module("examples.train_gpt.GPT", {"dim": 63, "n_heads": 4})
    module = Encoder()
    with pytest.raises(PlanError, match="fake tensors"):
        count_module(module, [(torch.float32, (8, 19)), (torch.int64, (8,))], {"b": module.blocks[0]})
