"""Memory of ordinary torch modules under NDStrategy: what autograd keeps of a block, and what FSDP2 gathers when.

Counted tensor by tensor; tests compare it with rehearsed steps, in which every tensor is seen.
"""

from __future__ import annotations

import numpy as np

from lightning_4d.planner.facts import Plan, Software
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.numbers import Number

__all__ = ["block_bytes_per_token", "gathered_bytes", "vocabulary_parts"]


def block_bytes_per_token(model: ModelFacts, software: Software, plan: Plan) -> Number:
    """Return bytes that autograd keeps of one token in one block, on one tensor-parallel rank.

    Of the residual stream what each of two norms reads, and half as much for norms that are no fused kernel; what
    products read: under autocast each keeps a cast of its own, else queries, keys and values share theirs; queries,
    keys, values, the attention's output, and that in the layout of the next product; the feed-forward part's inner
    tensors.
    """
    width = np.asarray(software.width_bytes, float)
    is_mixed = np.asarray(software.residual_bytes) > width
    split = np.where(np.asarray(software.sequence_parallel) > 0, plan.tp, 1)
    stream = 3 * np.asarray(software.residual_bytes) * model.hidden / split
    gates = np.asarray(model.ffn_matrices) - 1
    inputs = np.where(is_mixed, (3 + gates) * width, 2 * width) * model.hidden
    attention = width * (3 * model.query_width + 2 * model.key_width) / plan.tp
    inner = width * np.where(gates > 1, 4.0, 2.0) * model.ffn_hidden / plan.tp
    return np.where(np.asarray(software.eager) > 0, stream + inputs, 8 * model.hidden) + attention + inner


def vocabulary_parts(model: ModelFacts, software: Software, plan: Plan) -> Number:
    """Return into how many parts tables over the vocabulary are divided: one where the ranks do not divide it."""
    divides = np.mod(model.vocab, plan.tp) == 0
    return np.where(divides | (np.asarray(software.plain_torch) == 0), plan.tp, 1)


def gathered_bytes(
    model: ModelFacts, software: Software, plan: Plan, held: Number, tables: Number, in_flight: Number
) -> Number:
    """Return bytes of whole parameters and whole gradients, and of autocast's copies of weights.

    FSDP2 gathers the root's parameters for a step, and each block's for its forward and its backward. In a pipeline,
    and where data-parallel ranks share nothing, all blocks are whole at once; gradients of a pipeline too.

    Args:
        model: its sizes.
        software: with plain_torch.
        plan: the layout, and how a step runs.
        held: parameters of a rank's stages before sharding, those outside the blocks included.
        tables: of these, those outside the blocks.
        in_flight: microbatches whose activations are held.
    """
    stored = np.asarray(software.stored_bytes, float)
    wrapped, pipelined = np.asarray(plan.dp * plan.cp) > 1, np.asarray(plan.pp) > 1
    shares = np.asarray(plan.dp_shard * plan.cp) > 1
    blocks = held - tables
    two = np.minimum(2 * model.block_parameters / plan.tp, blocks)
    weights = stored * tables + software.parameter_bytes * np.where(pipelined | ~shares, blocks, two)
    # A block's gradient; and the head's, which is made before anything else is freed.
    passing = stored * (two / 2 + model.embedding_parameters / vocabulary_parts(model, software, plan))
    gradients = np.where(pipelined, stored * held, np.where(shares, passing, 0.0))
    is_mixed = np.asarray(software.residual_bytes) > np.asarray(software.width_bytes)
    runs = np.where(np.asarray(plan.recompute.kept) < 1, np.minimum(two / 2, blocks), in_flight * blocks)
    head = np.where(pipelined, 0.0, model.embedding_parameters / vocabulary_parts(model, software, plan))
    copies = 2.0 * (np.asarray(software.casts) * runs + np.where(is_mixed, head, 0.0))
    return np.where(wrapped, weights + gradients, 0.0) + copies
