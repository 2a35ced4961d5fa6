"""Models and clusters as a user names them: a preset, a YAML file, a Hugging Face configuration, this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from lightning_4d.errors import PlanError, explain
from lightning_4d.planner.cluster import ClusterFacts, DeviceFacts, device_facts
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.presets import CLUSTERS, MODELS

LOCAL_CPU = "local-cpu"

__all__ = ["LOCAL_CPU", "cluster_facts", "from_hugging_face", "model_facts"]


def model_facts(name: str) -> ModelFacts:
    """Return a model by a preset's name, or from a file: YAML of `ModelFacts`, or a Hugging Face ``config.json``.

    Raises:
        PlanError: no such preset or file, or a size is missing.

    >>> round(float(model_facts("llama3-8b").parameters) / 1e9, 2)
    8.03
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        rule = f"a model is a preset ({', '.join(MODELS)}), a YAML file of sizes or a Hugging Face config.json"
        raise PlanError(explain(f"model {name!r}", rule, f"use {_closest(name, MODELS)!r}"))
    content = _read(path)
    if "model_type" in content or "architectures" in content:
        return from_hugging_face(content, path.parent.name)
    return _from_sizes(content, path)


def _closest(name: str, known: Mapping[str, Any]) -> str:
    from difflib import get_close_matches

    return next(iter(get_close_matches(name.lower(), known, 1, 0.0)))


def _read(path: Path) -> dict[str, Any]:
    text = path.read_text()
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise PlanError(explain(f"{path}", f"it must be readable ({why})", "correct the file")) from error
    if not isinstance(content, dict):
        raise PlanError(explain(f"{path}", "it holds names and values", "write lines like 'layers: 32'"))
    return content


def _from_sizes(content: dict[str, Any], path: Path) -> ModelFacts:
    _check_names(content, path, "model", [field.name for field in fields(ModelFacts)])
    needed = ("layers", "hidden", "vocab", "seq_len")
    missing = [name for name in needed if name not in content]
    if missing:
        raise PlanError(explain(f"{path} without {', '.join(missing)}", f"a model needs {needed}", "add them"))
    _check_numbers(content, path, needed)
    heads = content.get("heads", max(1, content["hidden"] // 128))
    usual = {
        "heads": heads,
        "kv_heads": heads,
        "head_dim": content["hidden"] // max(1, heads),
        "ffn_hidden": 4 * content["hidden"],
        "ffn_matrices": 2,
        "name": path.stem,
    }
    return ModelFacts(**(usual | content))


def _check_names(content: Mapping[str, Any], path: Path, what: str, known: Sequence[str]) -> None:
    """Refuse an unknown name, with the nearest known one."""
    for name in content:
        if name not in known:
            rule = f"facts of a {what} are {', '.join(known)}"
            raise PlanError(explain(f"{path}: {name!r}", rule, f"use {_closest(str(name), dict.fromkeys(known))!r}"))


def _check_numbers(content: Mapping[str, Any], path: Path, positive: Sequence[str]) -> None:
    """Refuse a fact that is no number, or a size that is not above 0."""
    for name, value in content.items():
        if name in ("name", "matmul_kind", "device") or value is None:
            continue
        if not isinstance(value, (int, float)):
            rule = f"{name} is a number"
            raise PlanError(explain(f"{path}: {name}: {value!r}", rule, f"write a line like '{name}: 8'"))
        if value < 0 or (value == 0 and name in positive):
            above = "above 0" if name in positive else "not negative"
            raise PlanError(explain(f"{path}: {name}: {value}", f"{name} is {above}", f"use {name}: 1"))


# The names by which configurations call a size; the first that is there counts.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    "ffn_hidden": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "vocab": ("vocab_size", "num_labels"),
    "seq_len": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"),
}
_UNGATED = ("gpt2", "gpt_neox", "gptj", "gpt_neo", "opt", "bloom", "falcon", "mpt", "bert", "roberta", "vit", "phi")
_TWO_WAY = ("bert", "roberta", "vit", "distilbert", "electra", "deit", "dinov2")


def from_hugging_face(config: Mapping[str, Any], name: str = "") -> ModelFacts:
    """Return the sizes that a Hugging Face configuration (its ``to_dict()``, or ``config.json``) holds.

    Raises:
        PlanError: a size is missing under every name that configurations use.
    """
    kind = str(config.get("model_type", ""))
    sizes = {size: _first(config, size, kind) for size in ("layers", "hidden", "heads")}
    hidden, heads = sizes["hidden"], sizes["heads"]
    is_image = "patch_size" in config and "image_size" in config
    tokens = (config["image_size"] // config["patch_size"]) ** 2 + 1 if is_image else 0
    gated = not kind.startswith(_UNGATED)
    tied = bool(config.get("tie_word_embeddings", not gated)) or is_image
    return ModelFacts(
        layers=sizes["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=_first(config, "kv_heads", kind, heads),
        head_dim=config.get("head_dim") or hidden // heads,
        ffn_hidden=_first(config, "ffn_hidden", kind, 4 * hidden),
        ffn_matrices=3 if gated else 2,
        vocab=1000 if is_image else _first(config, "vocab", kind),
        seq_len=tokens or _first(config, "seq_len", kind, 2048),
        tied=float(tied),
        causal=float(not kind.startswith(_TWO_WAY)),
        positions=tokens or (_first(config, "seq_len", kind, 0) if kind.startswith(("gpt2", "opt", "bert")) else 0),
        head_tokens=1 if is_image else None,
        extra_parameters=config.get("num_channels", 3) * config["patch_size"] ** 2 * hidden if is_image else 0,
        name=str(config.get("_name_or_path") or name or kind),
    )


def _first(config: Mapping[str, Any], size: str, kind: str, default: int | None = None) -> int:
    found = next((config[name] for name in _NAMES[size] if config.get(name)), default)
    if found is None:
        rule = f"{size} stands in a configuration as {' or '.join(_NAMES[size])}"
        raise PlanError(
            explain(f"Hugging Face configuration {kind!r} without it", rule, "write the sizes into a YAML file")
        )
    return int(found)


def cluster_facts(name: str, devices: int | None = None) -> ClusterFacts:
    """Return a cluster by a preset's or a device's name ("H100"), from a YAML file of `ClusterFacts`, or this machine.

    Args:
        name: the name, or the path of the file, or "local-cpu". In a file ``device`` is a name, or a mapping of
            `DeviceFacts`.
        devices: how many devices; whole nodes, or less than one. None: what the preset or the file says.

    Raises:
        PlanError: no such preset, device or file, or a number of devices that does not fill nodes.

    >>> cluster_facts("dgx-h100", 16).nodes
    2
    """
    if name.lower() == LOCAL_CPU:
        return _local_cpu(devices or os.cpu_count() or 1)
    if name.lower() in CLUSTERS:
        cluster = CLUSTERS[name.lower()]
    elif Path(name).is_file():
        cluster = _cluster_from(_read(Path(name)), Path(name))
    else:
        cluster = _of_device(name)
    return cluster if devices is None else with_devices(cluster, devices)


def _local_cpu(processes: int) -> ClusterFacts:
    """This machine's processor and memory, shared by so many processes."""
    cores = (os.cpu_count() or 1) / processes
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    # Tens of GFLOP/s and GB/s for each core: good enough to compare layouts of one machine.
    rate = 40e9 * cores
    device = DeviceFacts(
        "CPU", rate, rate, rate, memory / 2**30, 10 * cores, 5.0, 1, measured_share=0.9, usual_node=processes
    )
    return ClusterFacts(device, 1, processes, 5.0, name=LOCAL_CPU)


def _of_device(name: str) -> ClusterFacts:
    try:
        device = device_facts(name)
    except PlanError as error:
        rule = f"a cluster is a preset ({', '.join(CLUSTERS)}), a device's name or a YAML file"
        raise PlanError(explain(f"cluster {name!r}", rule, f"use {_closest(name, CLUSTERS)!r}")) from error
    return ClusterFacts(device, 1, device.usual_node, device.usual_network_gbs, name=device.name)


def _cluster_from(content: dict[str, Any], path: Path) -> ClusterFacts:
    _check_names(content, path, "cluster", [field.name for field in fields(ClusterFacts)])
    sizes = ("nodes", "devices_per_node", "network_gbs", "matmul_tflops", "measured_link_gbs", "measured_network_gbs")
    _check_numbers(content, path, sizes)
    if "device" not in content:
        rule = "a cluster consists of devices: a name, or facts of your own"
        raise PlanError(explain(f"{path} without device", rule, "add a line like 'device: H100-SXM-80GB'"))
    device = content.pop("device")
    facts = _device_from(device, path) if isinstance(device, dict) else device_facts(str(device))
    usual = {
        "nodes": 1,
        "devices_per_node": facts.usual_node,
        "network_gbs": facts.usual_network_gbs,
        "name": path.stem,
    }
    return ClusterFacts(facts, **(usual | content))


def _device_from(content: dict[str, Any], path: Path) -> DeviceFacts:
    """A device of the user's own; rates that are left out are usual shares of the 16-bit peak."""
    _check_names(content, path, "device", [field.name for field in fields(DeviceFacts)])
    needed = ("name", "peak", "memory_gb", "bandwidth_gbs", "link_gbs")
    missing = [name for name in needed if name not in content]
    if missing:
        rule = f"a device of your own needs {', '.join(needed)}"
        raise PlanError(explain(f"{path}: device without {', '.join(missing)}", rule, "add them"))
    _check_numbers(content, path, needed[1:])
    usual = {"peak_fp8": content["peak"], "peak_fp32": content["peak"] / 16, "sms": 128}
    return DeviceFacts(**(usual | content))


def with_devices(cluster: ClusterFacts, devices: int) -> ClusterFacts:
    """Return the same cluster with another number of devices: part of one node, or whole nodes.

    Raises:
        PlanError: the number does not fill nodes.
    """
    per_node = cluster.devices_per_node
    if devices < 1:
        raise PlanError(explain(f"devices={devices}", "a plan is for at least one device", "use devices=1"))
    if devices < per_node:
        return replace(cluster, nodes=1, devices_per_node=devices)
    if devices % per_node:
        near = max(1, round(devices / per_node)) * per_node
        raise PlanError(explain(f"devices={devices}", f"a node has {per_node} devices", f"use {near}"))
    return replace(cluster, nodes=devices // per_node)
