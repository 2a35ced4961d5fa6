"""Bytes on the fullest device, by component: states, gathered parameters, activations, logits, buffers, the runtime.

Of a pipeline's ranks the first holds most activations (of up to pp microbatches) and the embedding, the last holds the
head and the logits. Both are computed; the fuller one is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_4d.planner.constants import DEFAULT, Constants
from lightning_4d.planner.facts import Plan, Software
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.numbers import Number
from lightning_4d.planner.plain import block_bytes_per_token, gathered_bytes, vocabulary_parts
from lightning_4d.planner.stages import Stages, stages_of

__all__ = ["MEMORY_COMPONENTS", "Memory", "activation_bytes", "memory_bytes"]

MEMORY_COMPONENTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "buffers", "runtime")
"""What a device's memory holds, in the order of a stacked bar."""


@dataclass(frozen=True)
class Memory:
    """Bytes by component on the fullest rank.

    Attributes:
        parts: bytes by component (`MEMORY_COMPONENTS`).
        is_last: 1 where the fullest rank is one of the last pipeline stage, 0 where it is one of the first.
    """

    parts: dict[str, Number]
    is_last: Number

    @property
    def total(self) -> Number:
        """All bytes."""
        return sum(np.asarray(part) for part in self.parts.values())


def memory_bytes(model: ModelFacts, software: Software, plan: Plan, c: Constants = DEFAULT) -> Memory:
    """Return the memory of the fullest device."""
    stages = stages_of(model, software, plan)
    first = _rank_parts(model, software, plan, stages, c, is_last=False)
    last = _rank_parts(model, software, plan, stages, c, is_last=True)
    is_last = sum(np.asarray(part) for part in last.values()) > sum(np.asarray(part) for part in first.values())
    return Memory({name: np.where(is_last, last[name], first[name]) for name in MEMORY_COMPONENTS}, is_last)


def _rank_parts(
    model: ModelFacts, software: Software, plan: Plan, stages: Stages, c: Constants, *, is_last: bool
) -> dict[str, Number]:
    blocks = stages.last if is_last else stages.first
    pipelined = np.asarray(plan.pp) > 1
    tables = np.where(pipelined, model.embedding_parameters, model.other_parameters) / vocabulary_parts(
        model, software, plan
    )
    held = blocks * model.block_parameters / plan.tp + tables
    in_flight = np.where(pipelined & is_last & (plan.of_schedule("holds_all") == 0), _chunks(plan), _in_flight(plan))
    parts = _states(model, software, plan, held, tables, in_flight)
    working, kept = activation_bytes(model, software, plan)
    # While a block runs backward its activations and their gradients are whole; the logits are gone by then, so that
    # only what they take beyond that counts.
    is_plain = np.asarray(software.plain_torch) > 0
    backward = working * np.where(np.asarray(plan.recompute.kept) < 1, np.where(is_plain, 1.5, 2), ~is_plain)
    parts["activations"] = c.activation_slack * (in_flight * blocks * kept + backward)
    has_logits = np.where(pipelined, float(is_last), 1.0)
    tokens = plan.micro_batch * model.head_rows / plan.cp
    logits = has_logits * software.logit_memory * tokens * model.vocab / vocabulary_parts(model, software, plan)
    parts["logits"] = np.maximum(0.0, logits - c.activation_slack * backward)
    # Outputs are kept until their backward, and one is on its way in each direction.
    hidden = software.width_bytes * plan.micro_batch * model.seq_len / plan.cp * model.hidden
    split = np.where(np.asarray(software.sequence_parallel) > 0, plan.tp, 1)
    step = software.step_bytes * held / np.where(np.asarray(plan.zero) >= 1, plan.dp_shard * plan.cp, 1)
    step = np.maximum(0.0, step - parts["activations"] - parts["logits"])  # those are gone when the optimizer steps
    parts["buffers"] = step + np.where(pipelined, (in_flight * plan.virtual + 2) * hidden / split, 0.0)
    parts["runtime"] = c.runtime_memory + np.asarray(software.bucket_bytes, float)
    return parts


def _states(
    model: ModelFacts, software: Software, plan: Plan, held: Number, tables: Number, in_flight: Number
) -> dict[str, Number]:
    """Parameters, gradients and optimizer states of a rank that holds `held` parameters before sharding.

    Either 16-bit parameters with fp32 master copies in the optimizer, or fp32 parameters that are gathered in 16 bit
    (FSDP); Adam has two fp32 moments.
    """
    zero, group = np.asarray(plan.zero), np.asarray(plan.dp_shard * plan.cp, float)
    shards = np.where(zero >= 1, group, 1.0)
    is_fsdp = (zero >= 2) | (np.asarray(software.fp32_parameters) > 0)
    gradient = np.asarray(software.gradient_memory, float)
    is_plain = np.asarray(software.plain_torch) > 0
    # Gradients stay whole until the step's last backward; those of the step before exist meanwhile.
    per_step = (zero == 2) & (np.asarray(plan.microbatches) > 1) & ~is_plain
    stored = np.asarray(software.stored_bytes, float)
    gathered = np.where(
        is_plain,
        gathered_bytes(model, software, plan, held, tables, in_flight),
        _gathered(model, software, plan, held, tables),
    )
    return {
        "parameters": np.where(is_fsdp, held * stored / shards, held * 2),
        "gradients": np.where(is_fsdp, held * stored / np.where(per_step, 1.0, shards), held * gradient),
        "optimizer": held * np.where(is_fsdp, software.master_bytes - 4, software.master_bytes) / shards,
        "gathered": gathered,
    }


def _gathered(model: ModelFacts, software: Software, plan: Plan, held: Number, tables: Number) -> Number:
    """Gathered blocks and gradients of a program with layers of its own; without shards, autocast's copies."""
    zero = np.asarray(plan.zero)
    shards = np.where(zero >= 1, np.asarray(plan.dp_shard * plan.cp, float), 1.0)
    is_fsdp = (zero >= 2) | (np.asarray(software.fp32_parameters) > 0)
    whole = np.where(zero == 2, held, np.minimum(2 * model.block_parameters / plan.tp + tables, held))
    copied = np.where(shards > 1, software.parameter_bytes, 2.0 * np.asarray(software.casts))
    copies = np.where(is_fsdp, copied * np.where(shards > 1, whole, held), 0.0)
    return copies + np.where(is_fsdp & (shards > 1), model.block_parameters / plan.tp * 4.0, 0.0)


def _chunks(plan: Plan) -> Number:
    """Microbatches whose activations the last rank of a pipeline holds."""
    return np.minimum(1.0, plan.microbatches)


def _in_flight(plan: Plan) -> Number:
    """Microbatches whose activations the first rank of a pipeline holds: pp with 1F1B, more when interleaved."""
    pp, virtual = np.asarray(plan.pp, float), np.asarray(plan.virtual, float)
    warm = np.where(virtual > 1, pp * (1 + (pp - 1) / (pp * virtual)), pp)
    warm = np.where(plan.of_schedule("chunks") == 2, pp, warm)  # V schedules are balanced: the same on every rank
    return np.where(plan.of_schedule("holds_all") > 0, plan.microbatches, np.minimum(plan.microbatches, warm))


def activation_bytes(model: ModelFacts, software: Software, plan: Plan) -> tuple[Number, Number]:
    """Return bytes of one block's activations for one microbatch: all of them, and those kept until its backward.

    Per token of a GPT block in 16 bit that is 32 hidden: 8 of the residual stream and norms, 8 of attention, 16 of the
    feed-forward part; 2 more with dropout; without a fused kernel 5 bytes per score.
    """
    tokens = plan.micro_batch * model.seq_len / plan.cp
    split = np.where(np.asarray(software.sequence_parallel) > 0, plan.tp, 1)
    stream = (8 + 2 * np.asarray(software.dropout)) * model.hidden / split
    attention = 4 * (model.query_width + model.key_width) / plan.tp
    inner = np.where(np.asarray(model.ffn_matrices) > 2, 8.0, 4.0)  # gate, up, their product, and the activation's
    ffn = inner * model.ffn_hidden / plan.tp
    scores = 5 * model.heads * model.seq_len / plan.tp * (np.asarray(software.attention) == 0)
    copies = 1 + 0.25 * np.asarray(software.fp32_copies)
    wide = np.asarray(software.width_bytes) / 2
    is_plain = np.asarray(software.plain_torch) > 0
    theirs = wide * (copies * (stream + attention + ffn) + scores)
    whole = tokens * np.where(is_plain, block_bytes_per_token(model, software, plan), theirs)
    block_input = np.where(is_plain, software.residual_bytes, wide * 2) * tokens * model.hidden / split
    core_again = np.asarray(plan.recompute.attention) * np.asarray(plan.recompute.matmul < 0.25)
    kept = plan.recompute.kept * (whole - core_again * wide * tokens * scores)
    is_whole = np.asarray(plan.recompute.kept) >= 1
    return whole, np.where(is_whole, kept, kept + block_input)
