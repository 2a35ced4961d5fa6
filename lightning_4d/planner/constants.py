"""The constants of the cost model: few, physical, each with its meaning; none belongs to a source of data.

`FITTED` names those that tests/planner/fit.py fits on published runs, with the bounds that physics sets them; the values
here are the fit's result, and tests check that it finds them again. The others are taken from the named sources.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT", "FITTED", "FITTED_MEMORY", "Constants"]


@dataclass(frozen=True)
class Constants:
    """All constants of the time model. Shares are of a datasheet figure, times in seconds.

    Attributes:
        matmul_a100: share of the peak that large matrix products reach in training.
        matmul_h100: likewise.
        matmul_h100_500w: likewise for Hopper parts held at 500 W, of the 700 W part's peak.
        matmul_v100: likewise.
        matmul_of_measured: for other devices: share of the best measured rate of a matrix product.
        matmul_fp8: share of the fp8 peak.
        tile_waves: waves of tiles at which a matrix product loses half its rate (tail and start of a kernel).
        short_reduction: length of the reduced dimension at which a matrix product loses half its rate.
        flash1_a100: share of the peak that attention reaches, forward + 2.5 x for backward; Triton or FlashAttention 1.
        flash2_a100: likewise, FlashAttention 2.
        flash1_h100: likewise, Triton or FlashAttention 1.
        flash2_h100: likewise, FlashAttention 2.
        flash3_h100: likewise, FlashAttention 3 or cuDNN.
        narrow_heads: how the rate of fused attention falls with heads narrower than 128, as a power of the width.
        unfused_bytes: bytes moved per attention score, forward and backward, without a fused attention kernel.
        elementwise: multiple of the bytes that norms, activations and residuals must move, with fused kernels.
        elementwise_eager: likewise, one kernel per operation.
        logit_bytes: bytes moved per logit by the loss, forward and backward.
        memory_share: share of the memory bandwidth that kernels reach.
        layer_seconds: launch overhead of one pass through a block.
        blocking_seconds: likewise, added where launches are blocking: 97.2 against 91.0 TFLOP/s of one 200B model.
        step_seconds: what a step costs whatever it computes.
        straggler_seconds: what a step waits for the slowest rank, for each doubling of the number of nodes.
        nvlink_share: share of the fast domain's bandwidth that collectives reach.
        rdma_share: likewise across nodes, InfiniBand and RoCE with GPUDirect.
        slow_fabric_share: likewise, Omni-Path, TCP and other fabrics without it.
        intra_latency: a collective inside the fast domain, whatever its size.
        inter_latency: a collective that crosses nodes, of a group of one rank; it grows with the group.
        latency_power: how it grows: 1 for a ring's steps, less where trees are used.
        fsdp_overlap_loss: share of the shorter of computation and communication that does not overlap.
        dp_hidden: share of the last microbatch's backward that can hide the reduction of gradients.
        p2p_exposed: share of the transfers between stages that is not hidden.
        optimizer_bytes: bytes moved per parameter by the optimizer's step.
        activation_slack: activations in memory, as a multiple of those that are needed (fragments, temporaries).
        runtime_memory: bytes of the runtime, its libraries and communication buffers.
        activation_slack: float = 1.2
    runtime_memory: float = 5.684e+09
    zero_bubble_split: extra time of a backward that is split into its two halves.
    """

    matmul_a100: float = 0.7026
    matmul_h100: float = 0.6187
    matmul_h100_500w: float = 0.5189
    matmul_v100: float = 0.8156
    matmul_of_measured: float = 0.83
    matmul_fp8: float = 0.60
    tile_waves: float = 0.5179
    short_reduction: float = 39.19
    flash1_a100: float = 0.3249
    flash2_a100: float = 0.4255
    flash1_h100: float = 0.174
    flash2_h100: float = 0.2753
    flash3_h100: float = 0.45
    narrow_heads: float = 0.05651
    unfused_bytes: float = 14.84
    elementwise: float = 0.5943
    elementwise_eager: float = 2.036
    logit_bytes: float = 11.17
    memory_share: float = 0.8
    layer_seconds: float = 2.706e-05
    blocking_seconds: float = 0.84e-3
    step_seconds: float = 0.04988
    straggler_seconds: float = 0.001283
    nvlink_share: float = 0.8155
    rdma_share: float = 0.697
    slow_fabric_share: float = 0.2256
    intra_latency: float = 4.516e-05
    inter_latency: float = 5.227e-05
    latency_power: float = 0.7506
    fsdp_overlap_loss: float = 0.1579
    dp_hidden: float = 0.589
    p2p_exposed: float = 0.112
    optimizer_bytes: float = 34.0
    activation_slack: float = 1.002
    runtime_memory: float = 5.684e09
    zero_bubble_split: float = 0.03


FITTED: dict[str, tuple[float, float]] = {
    "matmul_a100": (0.5, 0.87),
    "matmul_h100": (0.4, 0.80),
    "matmul_h100_500w": (0.35, 0.80),
    "matmul_v100": (0.5, 0.95),
    "tile_waves": (0.5, 1.5),
    "short_reduction": (30, 300.0),
    "flash1_a100": (0.15, 0.7),
    "flash2_a100": (0.42, 0.65),
    "flash1_h100": (0.1, 0.5),
    "flash2_h100": (0.25, 0.42),
    "narrow_heads": (0.0, 1.0),
    "unfused_bytes": (8.0, 60.0),
    "elementwise": (0.3, 3.0),
    "elementwise_eager": (0.6, 6.0),
    "logit_bytes": (8.0, 40.0),
    "layer_seconds": (0.02e-3, 0.6e-3),
    "step_seconds": (2e-3, 60e-3),
    "straggler_seconds": (1e-3, 30e-3),
    "nvlink_share": (0.65, 0.84),
    "rdma_share": (0.5, 0.85),
    "slow_fabric_share": (0.15, 0.6),
    "intra_latency": (10e-6, 0.3e-3),
    "inter_latency": (1e-6, 60e-6),
    "latency_power": (0.3, 1.0),
    "fsdp_overlap_loss": (0.03, 0.5),
    "dp_hidden": (0.2, 1.0),
    "p2p_exposed": (0.1, 1.0),
}
"""Bounds of the constants that are fitted."""

FITTED_MEMORY: dict[str, tuple[float, float]] = {
    "activation_slack": (1.0, 1.1),
    "runtime_memory": (1.5e9, 6e9),
}
"""Likewise of the memory model."""

DEFAULT = Constants()
