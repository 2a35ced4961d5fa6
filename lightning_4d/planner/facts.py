"""What the cost model is told beside the model's sizes: the machine, the software, and the plan, as plain numbers.

Every field may be an array; see `lightning_4d.planner.numbers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_4d.planner.numbers import Number

__all__ = ["ATTENTION", "MATMUL", "RECOMPUTE", "SCHEDULES", "Machine", "Plan", "Recompute", "Software"]

MATMUL = ("a100", "h100", "h100_500w", "v100", "other")
"""Kinds of devices by the share of their peak that matrix products reach."""

ATTENTION = ("unfused", "flash1", "flash2", "flash3")
"""Attention kernels: scores in memory, Triton or FlashAttention 1, FlashAttention 2, FlashAttention 3 or cuDNN."""


@dataclass(frozen=True)
class Machine:
    """The devices and what joins them.

    Attributes:
        peak: dense peak in FLOP/s, for 16-bit matrix products.
        peak_fp8: likewise for fp8.
        matmul_kind: index into `MATMUL`.
        measured_share: best measured share of the peak, for the kind "other".
        matmul_share: the user's own measured share of the peak; NaN where there is none.
        bandwidth: of the device's memory, bytes/s.
        memory: of the device, bytes.
        sms: multiprocessors.
        hopper: 1 for Hopper and later.
        link: of the fast domain, one direction, bytes/s for each device.
        node: devices of a fast domain.
        network: of a node, one direction, bytes/s for all its devices together.
        slow_fabric: 1 for fabrics without GPUDirect RDMA.
        network_share: the user's own measured share of the network's bandwidth; NaN where there is none.
        link_share: likewise of the fast domain's.
    """

    peak: Number
    peak_fp8: Number
    matmul_kind: Number
    measured_share: Number
    bandwidth: Number
    memory: Number
    sms: Number
    hopper: Number
    link: Number
    node: Number
    network: Number
    slow_fabric: Number = 0
    matmul_share: Number = float("nan")
    network_share: Number = float("nan")
    link_share: Number = float("nan")


@dataclass(frozen=True)
class Software:
    """How the layers are computed: facts about a training program, not about its layout.

    Attributes:
        attention: index into `ATTENTION`.
        eager: 1 where norms, activations and rotations run as one kernel per operation.
        fp8: 1 where the blocks' matrix products run in fp8.
        gradient_bytes: bytes of a gradient on the wire and in memory.
        parameter_bytes: bytes of a parameter as it is gathered.
        sequence_parallel: 1 where tensor parallelism also shards norms and the residual stream.
        async_tensor: 1 where tensor-parallel communication overlaps matrix products.
        casts: 1 where parameters are gathered in fp32 and cast by autocast in every forward.
        early_stop: 1 where the recomputation of a block ends at the last tensor that the backward needs, which leaves
            out the block's last matrix product.
        collectives: collectives by which one block's parameters are gathered.
        overlaps_gradients: 1 where gradients are reduced while the last microbatch's backward runs.
        overlaps_gathers: 1 where sharded parameters are gathered ahead, while other blocks compute.
        blocking: 1 where every kernel launch waits for the kernel (CUDA_LAUNCH_BLOCKING).
        balances_stages: 1 where blocks are dealt to pipeline ranks by cost, the head's included.
        master_bytes: bytes of optimizer state for each parameter, with the fp32 copy of the parameter if there is one.
        gradient_memory: bytes of a gradient in memory; more than on the wire where 16-bit ones are added to fp32 ones.
        dropout: 1 where blocks have dropout.
        logit_memory: bytes of memory per logit: 4 with a fused loss, 6 with Megatron's, about 12 with plain torch.
        bucket_bytes: of fixed communication buffers.
        fp32_copies: 1 where norms and rotations keep copies in fp32.
        width_bytes: bytes of an activation: 2, or 4 in fp32.
        step_bytes: bytes of temporaries of the optimizer's step for each of its parameters.
        fp32_parameters: 1 where parameters are fp32 and cast for computation, also without FSDP.
        plain_torch: 1 where layers are ordinary torch modules under NDStrategy: what autograd keeps of them, and what
            FSDP2 gathers when, is `lightning_4d.planner.plain`; 0 for programs with layers of their own.
        stored_bytes: bytes of a parameter and of its gradient at rest, with plain_torch.
        residual_bytes: bytes of an element of the residual stream, with plain_torch: 4 under autocast.
    """

    attention: Number = 2
    eager: Number = 0
    fp8: Number = 0
    gradient_bytes: Number = 4
    parameter_bytes: Number = 2
    sequence_parallel: Number = 1
    async_tensor: Number = 0
    casts: Number = 0
    early_stop: Number = 1
    collectives: Number = 1
    overlaps_gradients: Number = 1
    overlaps_gathers: Number = 1
    blocking: Number = 0
    balances_stages: Number = 1
    master_bytes: Number = 12
    gradient_memory: Number = 4
    fp32_parameters: Number = 0
    width_bytes: Number = 2
    dropout: Number = 0
    logit_memory: Number = 4
    bucket_bytes: Number = 0
    step_bytes: Number = 0
    fp32_copies: Number = 0
    plain_torch: Number = 0
    stored_bytes: Number = 4
    residual_bytes: Number = 2


@dataclass(frozen=True)
class Recompute:
    """A policy of activation checkpointing: which share of a block's forward runs again, and what is kept.

    Attributes:
        matmul: share of the matrix products that run again.
        attention: share of the attention kernel's work that runs again.
        elementwise: share of the other operations that run again.
        kept: share of a block's activations that is kept until its backward, beside the block's input.
    """

    matmul: Number
    attention: Number
    elementwise: Number
    kept: Number


RECOMPUTE: dict[str, Recompute] = {
    "none": Recompute(0.0, 0.0, 0.0, 1.0),
    "full": Recompute(1.0, 1.0, 1.0, 0.0),
    "attention": Recompute(0.0, 1.0, 0.1, 1.0),  # the attention core only
    "selective": Recompute(0.5, 0.0, 1.0, 0.33),  # torch's operator policy: every second matrix product is kept
    "every_2": Recompute(0.5, 0.5, 0.5, 0.5),  # every other block
    "minimal": Recompute(0.0, 0.0, 1.0, 0.6),  # matrix products and attention are kept, the rest runs again
}


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: how much of its bubble is left, how many activations it holds.

    Attributes:
        name: the strategy's own name of it.
        chunks: stages of each rank; 0: any number of 2 or more.
        bubble: of the classic bubble, (p - 1)(forward + backward) / chunks, this share is left.
        splits_backward: whether input and weight gradients run apart.
        holds_all: whether every microbatch's activations are held at once.
    """

    name: str
    chunks: int
    bubble: float
    splits_backward: bool = False
    holds_all: bool = False


# Zero-bubble schedules put weight gradients into 1F1B's bubble (p - 1)(F + B + W): with F = B = W a third is left. Of V
# schedules the first forwards' way through the ranks is left, which is as much (tests simulate it).
SCHEDULES: tuple[Schedule, ...] = (
    Schedule("1f1b", 1, 1.0),
    Schedule("gpipe", 1, 1.0, holds_all=True),
    Schedule("interleaved_1f1b", 0, 1.0),
    Schedule("looped_bfs", 0, 1.0, holds_all=True),
    Schedule("interleaved_zero_bubble", 0, 1 / 3, splits_backward=True),
    Schedule("zbv", 2, 1 / 3, splits_backward=True),
    Schedule("dualpipev", 2, 1 / 3, splits_backward=True),
)


@dataclass(frozen=True)
class Plan:
    """A layout and how a step runs on it.

    Attributes:
        pp, dp_replicate, dp_shard, cp, tp: sizes of the axes.
        zero: what dp_shard shards: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters.
        micro_batch: samples of a microbatch on each data-parallel rank.
        microbatches: how many of them a step has, on each data-parallel rank.
        virtual: stages of each pipeline rank.
        schedule: index into `SCHEDULES`.
        recompute: the policy of activation checkpointing.
    """

    pp: Number
    dp_replicate: Number
    dp_shard: Number
    cp: Number
    tp: Number
    zero: Number
    micro_batch: Number
    microbatches: Number
    virtual: Number
    schedule: Number
    recompute: Recompute

    @property
    def dp(self) -> Number:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def devices(self) -> Number:
        """Devices of the layout."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def samples(self) -> Number:
        """Samples of a step, of all ranks together."""
        return self.dp * self.micro_batch * self.microbatches

    def of_schedule(self, name: str) -> Number:
        """Return a field of `Schedule` for each plan, as a number."""
        table = np.array([float(getattr(schedule, name)) for schedule in SCHEDULES])
        return table[np.asarray(self.schedule, int)]
