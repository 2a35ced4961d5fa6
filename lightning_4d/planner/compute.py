"""Seconds of computation of one microbatch on one rank: matrix products, attention, the rest of a block, the head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_4d.planner.constants import Constants
from lightning_4d.planner.facts import MATMUL, Machine, Plan, Software
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.numbers import Number, choose

__all__ = ["BlockSeconds", "block_seconds", "head_seconds", "matmul_seconds", "matmul_share"]


# Batched products over heads whose width is no multiple of 8 miss the tensor cores: one 200B model with heads of 150
# took 1.3 times as long as its like with heads of 144.
ODD_HEADS = 14.0

H100_500W = MATMUL.index("h100_500w")


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of one block for one microbatch, by kind of work; forward, and backward without recomputation."""

    matmul_forward: Number
    matmul_backward: Number
    attention_forward: Number
    attention_backward: Number
    elementwise_forward: Number
    elementwise_backward: Number


def matmul_share(machine: Machine, software: Software, c: Constants) -> Number:
    """Return the share of the 16-bit (or fp8) peak that large matrix products reach."""
    other = np.asarray(machine.measured_share) * c.matmul_of_measured
    known = choose(machine.matmul_kind, c.matmul_a100, c.matmul_h100, c.matmul_h100_500w, c.matmul_v100, other)
    own = np.asarray(machine.matmul_share, float)
    share = np.where(np.isnan(own), known, own)
    # What holds 16-bit products back (power, mostly) holds fp8 back too.
    return np.where(np.asarray(software.fp8) > 0, share * c.matmul_fp8 / c.matmul_h100, share)


def matmul_seconds(m: Number, k: Number, n: Number, rate: Number, machine: Machine, c: Constants) -> Number:
    """Return the seconds of (m x k) @ (k x n); `rate` in FLOP/s is that of a large product."""
    big = np.ceil(np.asarray(m) / 256) * np.ceil(np.asarray(n) / 128) / machine.sms
    wide = np.ceil(np.asarray(m) / 128) * np.ceil(np.asarray(n) / 256) / machine.sms
    small = np.ceil(np.asarray(m) / 128) * np.ceil(np.asarray(n) / 128) / machine.sms
    best = np.minimum(np.minimum(np.ceil(big), np.ceil(wide)) * 2, np.ceil(small) * 1.1)
    busy = (best + c.tile_waves) * machine.sms * 128 * 128 / (np.asarray(m, float) * n)
    startup = 1 + c.short_reduction / np.asarray(k, float)
    compute = 2.0 * m * k * n / rate * busy * startup
    moved = 2.0 * (m * k + k * n + m * n) / (machine.bandwidth * c.memory_share)
    return np.maximum(compute, moved)


def _both_ways(m: Number, k: Number, n: Number, rate: Number, machine: Machine, c: Constants) -> tuple[Number, Number]:
    """Seconds of a product's forward, and of its two products backward."""
    forward = matmul_seconds(m, k, n, rate, machine, c)
    backward = matmul_seconds(m, n, k, rate, machine, c) + matmul_seconds(k, m, n, rate, machine, c)
    return forward, backward


def block_seconds(model: ModelFacts, machine: Machine, software: Software, plan: Plan, c: Constants) -> BlockSeconds:
    """Return the seconds of one block's computation for one microbatch on one rank of the plan."""
    tokens = plan.micro_batch * model.seq_len / plan.cp
    peak = np.where(np.asarray(software.fp8) > 0, machine.peak_fp8, machine.peak)
    rate = peak * matmul_share(machine, software, c)
    gates = np.asarray(model.ffn_matrices) - 1
    shapes = (
        (model.hidden, (model.query_width + 2 * model.key_width) / plan.tp),
        (model.query_width / plan.tp, model.hidden),
        (model.hidden, gates * model.ffn_hidden / plan.tp),
        (model.ffn_hidden / plan.tp, model.hidden),
    )
    times = [_both_ways(tokens, np.maximum(k, 1), np.maximum(n, 1), rate, machine, c) for k, n in shapes]
    attention = _attention_seconds(model, machine, software, plan, c)
    elementwise = _elementwise_seconds(model, machine, software, plan, c)
    matmul_forward, matmul_backward = sum(t[0] for t in times), sum(t[1] for t in times)
    return BlockSeconds(matmul_forward, matmul_backward, attention, 2.5 * attention, elementwise, 2 * elementwise)


def _attention_seconds(model: ModelFacts, machine: Machine, software: Software, plan: Plan, c: Constants) -> Number:
    """Forward; the backward of a fused kernel is 2.5 times that: it makes the scores a second time."""
    flops = plan.micro_batch * model.attention_flops / (plan.cp * plan.tp)
    ampere = choose(software.attention, 1.0, c.flash1_a100, c.flash2_a100, c.flash2_a100)
    hopper = choose(software.attention, 1.0, c.flash1_h100, c.flash2_h100, c.flash3_h100)
    narrow = np.minimum(
        1.0, (np.asarray(model.head_dim) / 128) ** c.narrow_heads
    )  # short reductions feed the units badly
    held_back = np.where(np.asarray(machine.matmul_kind) == H100_500W, c.matmul_h100_500w / c.matmul_h100, 1.0)
    fused = flops / (machine.peak * held_back * np.where(np.asarray(machine.hopper) > 0, hopper, ampere) * narrow)
    return np.where(np.asarray(software.attention) > 0, fused, _unfused_seconds(model, machine, plan, c))


def _unfused_seconds(model: ModelFacts, machine: Machine, plan: Plan, c: Constants) -> Number:
    """Batched products over all scores (masked ones too), and passes over them in memory."""
    scores = plan.micro_batch * model.heads * model.seq_len**2 / (plan.cp * plan.tp)
    share = matmul_share(machine, Software(), c)
    odd = np.where(np.asarray(model.head_dim) % 8 == 0, 1.0, ODD_HEADS)
    products = odd * 4 * scores * model.head_dim / (machine.peak * share) * (1 + c.short_reduction / model.head_dim)
    moved = c.unfused_bytes / 3.5 * scores / (machine.bandwidth * c.memory_share)
    return products + moved


def _elementwise_seconds(model: ModelFacts, machine: Machine, software: Software, plan: Plan, c: Constants) -> Number:
    """Norms, residuals, rotations, activations: passes over (tokens x width) in 16 bit. Forward."""
    tokens = plan.micro_batch * model.seq_len / plan.cp
    split = np.where(np.asarray(software.sequence_parallel) > 0, plan.tp, 1)
    passes = (
        14 * model.hidden / split + (2 * model.ffn_hidden * (model.ffn_matrices - 1) + 4 * model.query_width) / plan.tp
    )
    factor = np.where(np.asarray(software.eager) > 0, c.elementwise_eager, c.elementwise)
    casts = np.asarray(software.casts) * 6 * model.block_parameters / plan.tp  # read in 4 bytes, written in 2
    return (factor * 2 * tokens * passes + casts) / (machine.bandwidth * c.memory_share)


def head_seconds(model: ModelFacts, machine: Machine, plan: Plan, c: Constants) -> Number:
    """Return the seconds of the last norm's and head's forward and backward, and of the loss, for one microbatch."""
    tokens = plan.micro_batch * model.head_rows / plan.cp
    rate = machine.peak * matmul_share(machine, Software(), c)
    width = model.vocab / plan.tp
    forward, backward = _both_ways(tokens, model.hidden, np.maximum(width, 1), rate, machine, c)
    return forward + backward + c.logit_bytes * tokens * width / (machine.bandwidth * c.memory_share)
