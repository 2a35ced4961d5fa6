"""Say at set-up which axes of a layout communicate between nodes, and what that costs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import nn

from lightning_4d.absent import is_absent
from lightning_4d.errors import PlanError
from lightning_4d.layout import ParallelLayout
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.tensor import TensorPlan
from lightning_4d.planner.cluster import DeviceFacts, device_facts

__all__ = ["SlowLinkWarning", "crossings", "say_what_crosses"]

_DEFAULT_DEVICE = "H100 SXM 80GB"  # of an H100 system with one 400 Gb/s adapter for each device
_TOKENS = 8192  # for which seconds are given, of a batch that is not known at set-up
_AXES = {"tp": "tensor parallelism", "cp": "context parallelism", "dp_shard": "sharding of parameters"}


class SlowLinkWarning(UserWarning):
    """An axis that communicates in every layer does so between nodes."""


@dataclass(frozen=True)
class _Traffic:
    """What one rank communicates along an axis for one block in one step.

    `per` is what the bytes are for: ``"token"`` or ``"step"``; None where they are not known before a step.
    """

    what: str
    bytes: int | None
    per: str


def say_what_crosses(
    layout: ParallelLayout, per_node: int, blocks: Sequence[Block], plan: TensorPlan | None, device: torch.device
) -> None:
    """Warn on rank 0 of tp and cp between nodes; only mention sharding, which overlaps with computation.

    Args:
        layout: of the job.
        per_node: ranks of a node.
        blocks: the repeated layers, before they are sharded.
        plan: how layers are divided, if they are.
        device: of this rank; its kind tells the bandwidths.

    Which ranks must call: none; rank 0 speaks.
    """
    messages = crossings(layout, per_node, blocks, plan, _facts(device))
    slow = [message for axis, message in messages.items() if axis != "dp_shard"]
    if slow:
        _warn(" ".join(slow))
    elif messages:
        rank_zero_info(messages["dp_shard"])


@rank_zero_only
def _warn(message: str) -> None:
    warnings.warn(message, SlowLinkWarning, stacklevel=2)


def crossings(
    layout: ParallelLayout,
    per_node: int,
    blocks: Sequence[Block] = (),
    plan: TensorPlan | None = None,
    device: DeviceFacts | None = None,
) -> dict[str, str]:
    """Return for each of tp, cp and dp_shard that crosses nodes what that costs, in words.

    Args:
        layout: of the job.
        per_node: ranks of a node.
        blocks: the repeated layers.
        plan: how layers are divided, if they are.
        device: whose links are used; by default an H100's.
    """
    facts = device or device_facts(_DEFAULT_DEVICE)
    return {
        axis: _message(layout, axis, per_node, _traffic(axis, blocks, plan, layout), facts)
        for axis in _AXES
        if layout.axis_link(axis, per_node).crosses
    }


def _message(layout: ParallelLayout, axis: str, per_node: int, traffic: _Traffic, device: DeviceFacts) -> str:
    link, size = layout.axis_link(axis, per_node), layout.axis_sizes[axis]
    fast, slow = device.link_gbs, device.usual_network_gbs / device.usual_node
    which = "all" if link.crossing == link.groups else f"{link.crossing} of {link.groups}"
    text = (
        f"layout {layout}: {_AXES[axis]} ({axis}={size}) crosses nodes of {per_node} ranks in {which} groups; "
        f"{traffic.what}"
    )
    if traffic.bytes is not None:
        text += f", {traffic.bytes:,} bytes for each {traffic.per} and block"
    text += f", at about {slow:g} GB/s between nodes instead of {fast:g} GB/s inside one ({device.name})"
    if traffic.bytes is not None and traffic.per == "step":
        text += f": {traffic.bytes / slow / 1e6:.3g} ms instead of {traffic.bytes / fast / 1e6:.3g} ms"
    elif traffic.bytes is not None:
        at = [_TOKENS * traffic.bytes / rate / 1e6 for rate in (slow, fast)]
        text += f": {at[0]:.3g} ms instead of {at[1]:.3g} ms for {_TOKENS} tokens"
    return f"{text}. {_remedy(layout, axis, per_node)}."


def _traffic(axis: str, blocks: Sequence[Block], plan: TensorPlan | None, layout: ParallelLayout) -> _Traffic:
    block = blocks[0].module if blocks else None
    if axis == "tp":
        elements = None if block is None or plan is None else _divided_outputs(blocks[0], plan)
        what = "each block sums its outputs over them in forward and its inputs' gradients in backward"
        return _Traffic(what, None if elements is None else 2 * elements * _width(block), "token")
    if axis == "cp":
        what = "keys and values of each block go round in forward, and with their gradients in backward"
        return _Traffic(what, None, "")
    held = None if block is None else sum(p.numel() * p.element_size() for p in block.parameters() if not is_absent(p))
    size = None if held is None else 3 * held // layout.tensor_parallel_size
    return _Traffic("parameters are gathered twice and gradients reduced once", size, "step")


def _divided_outputs(block: Block, plan: TensorPlan) -> int:
    """Elements for each token that the row-wise layers of a block sum over the ranks."""
    total = 0
    for name, choice in plan.choices.items():
        if name.startswith(f"{block.name}.") and choice.style in ("rowwise", "attention"):
            module = block.module.get_submodule(name.removeprefix(f"{block.name}."))
            sizes = (getattr(module, name, 0) for name in ("out_features", "nf", "embed_dim"))
            total += next((int(size) for size in sizes if size), 0)
    return total


def _width(module: nn.Module | None) -> int:
    return next((p.element_size() for p in module.parameters()), 4) if module is not None else 4


def _remedy(layout: ParallelLayout, axis: str, per_node: int) -> str:
    inner = layout.stride(axis)
    most = max((size for size in range(1, per_node + 1) if per_node % (size * inner) == 0), default=1)
    if axis == "dp_shard":
        return f"With data_parallel_shard_size={most} and more replicas shards stay inside a node, if memory allows"
    name = {"tp": "tensor_parallel_size", "cp": "context_parallel_size"}[axis]
    return f"Use {name}={most} to stay inside a node"


def _facts(device: torch.device) -> DeviceFacts | None:
    if device.type != "cuda":
        return None
    try:
        return device_facts(torch.cuda.get_device_name(device))
    except PlanError:
        return None
