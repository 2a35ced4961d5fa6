"""Models and clusters by name. Sizes are those of the papers and model cards named beside them."""

from __future__ import annotations

from lightning_4d.planner.cluster import ClusterFacts, device_facts
from lightning_4d.planner.model import ModelFacts

__all__ = ["CLUSTERS", "MODELS"]


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 50_257, seq_len: int = 1024) -> ModelFacts:
    return ModelFacts(
        layers,
        hidden,
        heads,
        heads,
        hidden // heads,
        4 * hidden,
        2,
        vocab,
        seq_len,
        tied=1,
        positions=seq_len,
        name=name,
    )


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq_len: int
) -> ModelFacts:
    return ModelFacts(layers, hidden, heads, kv_heads, hidden // heads, ffn, 3, vocab, seq_len, name=name)


def _vit(name: str, layers: int, hidden: int, heads: int, tokens: int = 197) -> ModelFacts:
    patches = 3 * 16 * 16 * hidden
    return ModelFacts(
        layers,
        hidden,
        heads,
        heads,
        hidden // heads,
        4 * hidden,
        2,
        1000,
        tokens,
        tied=1,
        causal=0,
        positions=tokens,
        head_tokens=1,
        extra_parameters=patches,
        name=name,
    )


# GPT-2: Radford et al. 2019; GPT-3: Brown et al. 2020, table 2.1; Llama 2 and 3: their papers and model cards; ViT:
# Dosovitskiy et al. 2021, table 1 (patches of 16 x 16 in images of 224 x 224: 196 and a class token).
MODELS: dict[str, ModelFacts] = {
    each.name: each
    for each in (
        _gpt("gpt2", 12, 768, 12),
        _gpt("gpt2-medium", 24, 1024, 16),
        _gpt("gpt2-large", 36, 1280, 20),
        _gpt("gpt2-xl", 48, 1600, 25),
        _gpt("gpt3-1.3b", 24, 2048, 16, seq_len=2048),
        _gpt("gpt3-2.7b", 32, 2560, 32, seq_len=2048),
        _gpt("gpt3-6.7b", 32, 4096, 32, seq_len=2048),
        _gpt("gpt3-13b", 40, 5120, 40, seq_len=2048),
        _gpt("gpt3-175b", 96, 12288, 96, seq_len=2048),
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32_000, 4096),
        _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32_000, 4096),
        _llama("llama2-70b", 80, 8192, 64, 8, 28672, 32_000, 4096),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128_256, 8192),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128_256, 8192),
        _llama("llama3-405b", 126, 16384, 128, 8, 53248, 128_256, 8192),
        _llama("internlm-7b", 32, 4096, 32, 32, 11008, 103_168, 2048),
        _llama("internlm-20b", 60, 5120, 40, 40, 13824, 103_168, 2048),
        _vit("vit-b16", 12, 768, 12),
        _vit("vit-l16", 24, 1024, 16),
        _vit("vit-h16", 32, 1280, 16),
    )
}


def _cluster(
    name: str, device: str, nodes: int, devices_per_node: int | None = None, network_gbs: float | None = None
) -> ClusterFacts:
    facts = device_facts(device)
    network = facts.usual_network_gbs if network_gbs is None else network_gbs
    return ClusterFacts(facts, nodes, devices_per_node or facts.usual_node, network, name=name)


# Meta's Llama 3 cluster (arXiv:2407.21783, section 3.3.1): servers of 8 GPUs on NVLink, 2 servers in a rack, 192 racks in
# a pod of 3,072 GPUs at 50 GB/s each, 8 pods. NVLink's 900 GB/s count both directions. DGX systems: their data sheets.
CLUSTERS: dict[str, ClusterFacts] = {
    each.name: each
    for each in (
        _cluster("dgx-v100", "V100-SXM-32GB", 1),
        _cluster("dgx-a100", "A100-SXM-80GB", 1),
        _cluster("dgx-a100-40gb", "A100-SXM-40GB", 1),
        _cluster("dgx-h100", "H100-SXM-80GB", 1),
        _cluster("dgx-h200", "H200", 1),
        _cluster("dgx-b200", "B200", 1),
        _cluster("gb200-nvl72", "GB200", 1),
        _cluster("gcp-a3-high", "H100-SXM-80GB", 1, network_gbs=100.0),
        _cluster("meta-llama3-pod", "H100-SXM-80GB", 384, 8, 400.0),
        _cluster("meta-llama3", "H100-SXM-80GB", 3072, 8, 400.0),
        _cluster("tpu-v5p-pod", "TPU v5p", 1, 8960),
    )
}
