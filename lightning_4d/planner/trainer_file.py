"""A plan as the YAML that a LightningCLI reads: strategy, precision, accumulation, callbacks."""

from __future__ import annotations

from typing import Any

import yaml

from lightning_4d.planner.cluster import ClusterFacts
from lightning_4d.planner.numbers import gib_text
from lightning_4d.planner.search import Candidate

__all__ = ["trainer_options", "trainer_yaml"]

_SIZES = {
    "data_parallel_replicate_size": "dp_replicate",
    "data_parallel_shard_size": "dp_shard",
    "context_parallel_size": "cp",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
}


def trainer_options(
    plan: Candidate, cluster: ClusterFacts, precision: str, accelerator: str, *, compiled: bool = False
) -> dict[str, Any]:
    """Return the ``trainer`` section: what of it the plan decides.

    Sizes of 1 are left out, except those of data parallelism, whose defaults are not 1. A pipeline takes its
    microbatches from the batch that the loader gives; without one they are accumulated.
    """
    sizes = {name: plan.layout.axis_sizes[axis] for name, axis in _SIZES.items()}
    arguments: dict[str, Any] = {
        name: size for name, size in sizes.items() if size > 1 or name.startswith("data_parallel")
    }
    if plan.layout.tensor_parallel_size > 1:
        arguments["sequence_parallel"] = True  # of no effect where the ranks do not divide the tokens
    if compiled:
        arguments["compile_blocks"] = True
    if plan.schedule:
        arguments |= {"pipeline_schedule": plan.schedule, "num_microbatches": plan.microbatches}
        if plan.virtual > 2:  # without a split, NDStrategy gives each rank two stages
            arguments["pipeline_split"] = list(plan.first_blocks)
    callbacks: list[dict[str, Any]] = []
    if plan.policy != "none":
        path = "lightning_4d.callbacks.ActivationCheckpointing"
        callbacks.append({"class_path": path, "init_args": {"policy": plan.policy}})
    callbacks.append({"class_path": "lightning_4d.callbacks.MFUMonitor"})
    return {
        "accelerator": accelerator,
        "devices": cluster.devices_per_node,
        "num_nodes": cluster.nodes,
        "precision": precision,
        "strategy": {"class_path": "lightning_4d.NDStrategy", "init_args": arguments},
        "accumulate_grad_batches": 1 if plan.schedule else plan.microbatches,
        "callbacks+": callbacks,
    }


def loader_batch(plan: Candidate) -> int:
    """Return the samples that the loader of each data-parallel rank gives at once."""
    return plan.micro_batch * (plan.microbatches if plan.schedule else 1)


def trainer_yaml(
    plan: Candidate,
    cluster: ClusterFacts,
    precision: str,
    accelerator: str = "gpu",
    batch_key: str | None = None,
    *,
    compiled: bool = False,
) -> str:
    """Return the file: comments with the prediction, then the options.

    Args:
        plan: what the search found.
        cluster: where it runs.
        precision: Lightning's name.
        accelerator: Lightning's name.
        batch_key: the option that sets the loader's batch size, for instance ``data.batch_size``; without it the size
            is a comment.
        compiled: whether blocks are compiled.
    """
    head = [
        f"# {plan}",
        f"# Predicted: {plan.seconds:.3g} s for each step, {plan.mfu:.1%} MFU, "
        f"{gib_text(plan.bytes)} of {gib_text(plan.capacity)} GiB on the fullest device.",
        f"# The loader of each process gives {loader_batch(plan)} samples at once.",
    ]
    content: dict[str, Any] = {"trainer": trainer_options(plan, cluster, precision, accelerator, compiled=compiled)}
    if batch_key:
        _set(content, batch_key.split("."), loader_batch(plan))
    return "\n".join(head) + "\n" + yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)


def _set(content: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        content = content.setdefault(key, {})
    content[keys[-1]] = value
