"""Seconds of one optimizer step, by component: the slowest pipeline stage, the bubble, what communication leaves exposed.

    T = m x (slowest stage) + bubble + exposed data-parallel communication + optimizer + fixed, times jitter

with m microbatches. Inside a block, gathering and scattering sharded parameters overlaps with computation.
"""

from __future__ import annotations

import numpy as np

from lightning_4d.planner.compute import BlockSeconds, block_seconds, head_seconds
from lightning_4d.planner.constants import DEFAULT, Constants
from lightning_4d.planner.facts import Machine, Plan, Software
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.network import Group, gather_seconds, transfer_seconds
from lightning_4d.planner.numbers import Number, ratio
from lightning_4d.planner.stages import Stages, stages_of

__all__ = ["COMPONENTS", "step_seconds", "total_seconds"]

COMPONENTS = (
    "matmul",
    "attention",
    "elementwise",
    "recompute",
    "head",
    "launch",
    "tensor",
    "context",
    "sharding",
    "pipeline",
    "bubble",
    "data",
    "optimizer",
    "fixed",
)
"""Where a step's time goes, in the order of a stacked bar."""


def total_seconds(parts: dict[str, Number]) -> Number:
    """Return the step's seconds, from `step_seconds`."""
    return sum(parts[name] for name in COMPONENTS)


def step_seconds(
    model: ModelFacts, machine: Machine, software: Software, plan: Plan, c: Constants = DEFAULT
) -> dict[str, Number]:
    """Return the seconds of a step by component (`COMPONENTS`), as the rank that all wait for spends them."""
    work = block_seconds(model, machine, software, plan, c)
    block = _block_parts(work, model, machine, software, plan, c)
    head = head_seconds(model, machine, plan, c)
    stages = stages_of(model, software, plan)
    exposed_p2p = _pipeline_seconds(model, machine, plan, c)
    accumulate = _accumulate_seconds(model, machine, software, plan, stages, c)
    middle, last = (n * sum(block.values()) for n in (stages.most, stages.last))
    head_is_slow = last + head > middle
    blocks = np.where(head_is_slow, stages.last, stages.most)
    m = plan.microbatches
    parts = {name: m * blocks * seconds for name, seconds in block.items()}
    parts["head"] = m * np.where(head_is_slow, head, 0.0)
    parts["elementwise"] = parts["elementwise"] + m * accumulate
    parts["pipeline"] = m * exposed_p2p
    parts["bubble"] = _bubble_seconds(middle + exposed_p2p, plan)
    backward = stages.most * (work.matmul_backward + work.attention_backward + work.elementwise_backward)
    parts["data"] = _data_seconds(model, machine, software, plan, stages, backward, c)
    parts["optimizer"] = _optimizer_seconds(model, machine, plan, stages, c)
    nodes = np.maximum(1.0, plan.devices / machine.node)
    parts["fixed"] = c.step_seconds + c.straggler_seconds * np.log2(nodes)
    return parts


def _block_parts(
    work: BlockSeconds, model: ModelFacts, machine: Machine, software: Software, plan: Plan, c: Constants
) -> dict[str, Number]:
    """Seconds of one block's forward and backward for one microbatch, communication that it waits for included."""
    again = plan.recompute
    last_product = np.asarray(software.early_stop) * model.hidden * model.ffn_hidden
    matrices = model.attention_parameters + model.ffn_parameters
    recompute = (
        again.matmul * (1 - last_product / matrices) * work.matmul_forward
        + again.attention * work.attention_forward
        + again.elementwise * work.elementwise_forward
    )
    split = 1 + c.zero_bubble_split * plan.of_schedule("splits_backward")
    forward = work.matmul_forward + work.attention_forward + work.elementwise_forward
    backward = split * (work.matmul_backward + work.attention_backward + work.elementwise_backward) + recompute
    runs_again = np.asarray(again.matmul) > 0
    parts: dict[str, Number] = {
        "matmul": work.matmul_forward + split * work.matmul_backward,
        "attention": work.attention_forward + split * work.attention_backward,
        "elementwise": work.elementwise_forward + split * work.elementwise_backward,
        "recompute": recompute,
        "launch": (c.layer_seconds + c.blocking_seconds * np.asarray(software.blocking))
        * (3 + np.asarray(again.matmul)),
        "tensor": _tensor_seconds(model, machine, software, plan, c) * (4 + 2 * runs_again),
        "context": _context_seconds(work, model, machine, plan, c),
    }
    parts["sharding"] = _sharding_seconds(forward, backward, model, machine, software, plan, c)
    return parts


def _tensor_seconds(model: ModelFacts, machine: Machine, software: Software, plan: Plan, c: Constants) -> Number:
    """One all-reduce of a microbatch's hidden state; with sequence parallelism a gather and a scatter, which is the same."""
    bytes_ = 2.0 * plan.micro_batch * model.seq_len / plan.cp * model.hidden
    seconds = 2 * gather_seconds(bytes_, Group(plan.tp, 1), machine, c)
    return seconds * np.where(np.asarray(software.async_tensor) > 0, 0.4, 1.0)


def _context_seconds(work: BlockSeconds, model: ModelFacts, machine: Machine, plan: Plan, c: Constants) -> Number:
    """What attention waits for keys and values to travel round the cp ranks; backward their gradients travel too."""
    bytes_ = 2 * 2.0 * plan.micro_batch * model.seq_len * model.key_width / plan.tp
    once = gather_seconds(bytes_, Group(plan.cp, plan.tp), machine, c)
    forward = _not_hidden(once, work.attention_forward, c)
    backward = _not_hidden(2 * once, work.attention_backward, c)
    # Each hop but the first merges its part of the output (fp32 and its logsumexp) into what is there; backward likewise.
    tokens = plan.micro_batch * model.seq_len / plan.cp
    merged = (np.asarray(plan.cp) - 1) * tokens * model.query_width / plan.tp
    merge = merged * (12 + 24) / (machine.bandwidth * c.memory_share) + 3 * (np.asarray(plan.cp) - 1) * c.layer_seconds
    return np.where(np.asarray(plan.cp) > 1, forward + backward + merge, 0.0)


def _not_hidden(communication: Number, computation: Number, c: Constants) -> Number:
    """What remains of communication beside computation: max(a, b) + loss x min(a, b), less the computation itself."""
    longer, shorter = np.maximum(communication, computation), np.minimum(communication, computation)
    return longer + c.fsdp_overlap_loss * shorter - computation


def _sharding_seconds(
    forward: Number, backward: Number, model: ModelFacts, machine: Machine, software: Software, plan: Plan, c: Constants
) -> Number:
    """What a block waits for its sharded parameters to be gathered (twice) and its gradients to be scattered."""
    parameters = model.block_parameters / plan.tp
    group = Group(plan.dp_shard * plan.cp, plan.tp)
    gather = gather_seconds(parameters * software.parameter_bytes, group, machine, c, software.collectives)
    scatter = gather_seconds(parameters * software.gradient_bytes, group, machine, c, software.collectives)
    once = np.asarray(plan.zero) == 2  # gathered before a step's first forward, kept, scattered after its last backward
    again = np.where(once, 0.0, gather) + scatter
    hidden = _not_hidden(gather, forward, c) + _not_hidden(again, backward, c)
    seconds = np.where(np.asarray(software.overlaps_gathers) > 0, hidden, gather + again)
    often = np.where(once, 1 / np.asarray(plan.microbatches, float), 1.0)
    return np.where((np.asarray(plan.zero) >= 2) & (np.asarray(group.size) > 1), seconds * often, 0.0)


def _pipeline_seconds(model: ModelFacts, machine: Machine, plan: Plan, c: Constants) -> Number:
    """Sending a microbatch's hidden state forward and its gradient back, as far as it is not hidden."""
    bytes_ = 2.0 * plan.micro_batch * model.seq_len / plan.cp * model.hidden / plan.tp
    once = transfer_seconds(bytes_, plan.tp * plan.cp * plan.dp, machine, c)
    return np.where(np.asarray(plan.pp) > 1, c.p2p_exposed * 2 * plan.virtual * once, 0.0)


def _bubble_seconds(stage: Number, plan: Plan) -> Number:
    left = plan.of_schedule("bubble")
    return left * (np.asarray(plan.pp) - 1) / plan.virtual * stage


def _held(model: ModelFacts, plan: Plan, stages: Stages) -> Number:
    """Parameters of the rank with most of them, before sharding over data-parallel ranks."""
    ends = np.where(np.asarray(plan.pp) > 1, model.embedding_parameters, model.other_parameters)
    return (stages.most * model.block_parameters + ends) / plan.tp


def _accumulate_seconds(
    model: ModelFacts, machine: Machine, software: Software, plan: Plan, stages: Stages, c: Constants
) -> Number:
    """Adding a microbatch's 16-bit gradients to those of the step: read both, write the sum."""
    held = _held(model, plan, stages)
    bytes_ = (
        (2 + 2 * np.asarray(software.gradient_bytes))
        * held
        / np.where(np.asarray(plan.zero) >= 3, plan.dp_shard * plan.cp, 1)
    )
    return np.where(np.asarray(plan.microbatches) > 1, bytes_ / (machine.bandwidth * c.memory_share), 0.0)


def _optimizer_seconds(model: ModelFacts, machine: Machine, plan: Plan, stages: Stages, c: Constants) -> Number:
    shards = np.where(np.asarray(plan.zero) >= 1, plan.dp_shard * plan.cp, 1)
    return c.optimizer_bytes * _held(model, plan, stages) / shards / (machine.bandwidth * c.memory_share)


def _data_seconds(
    model: ModelFacts,
    machine: Machine,
    software: Software,
    plan: Plan,
    stages: Stages,
    backward: Number,
    c: Constants,
) -> Number:
    """What a step waits for gradients to be reduced, and with sharded optimizer states for parameters to be gathered.

    Gradients are scattered inside dp_shard and reduced over dp_replicate; the last microbatch's backward hides part.
    """
    held = _held(model, plan, stages)
    shards = np.where(np.asarray(plan.zero) >= 1, plan.dp_shard * plan.cp, 1)
    is_fsdp = np.asarray(plan.zero) >= 2
    inner = Group(plan.dp_shard * plan.cp, plan.tp)
    outer = Group(plan.dp_replicate, inner.size * plan.tp)
    buckets = np.where(np.asarray(software.overlaps_gradients) > 0, stages.most, 1.0)  # else one flat buffer
    gradients = held * software.gradient_bytes
    scatter = gather_seconds(gradients, inner, machine, c, buckets)
    reduce = 2 * gather_seconds(gradients / inner.size, outer, machine, c, buckets)
    gather = gather_seconds(held * software.parameter_bytes, inner, machine, c, buckets * software.collectives)
    gather = np.where(shards > 1, gather, scatter)  # without shards the second half of an all-reduce
    hidden = c.dp_hidden * backward * np.asarray(software.overlaps_gradients)
    inside = np.where(is_fsdp, 0.0, scatter + gather)
    return np.maximum(inside + reduce - hidden, 0.05 * (inside + reduce))


def sharding_fraction(parts: dict[str, Number]) -> Number:
    """Return the share of a step that waits for communication of any axis."""
    waits = sum(np.asarray(parts[name]) for name in ("tensor", "context", "sharding", "pipeline", "data"))
    return ratio(waits, total_seconds(parts))
