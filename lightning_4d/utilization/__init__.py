"""Utilization: what accelerators can do, what a model computes, and the share of one in the other.

Plain arithmetic and counting; no Lightning, no process group. The callback ``MFUMonitor`` measures a run with it.
"""

from lightning_4d.utilization.counter import AttentionFlops, FlopCounter, Flops
from lightning_4d.utilization.flops import (
    CountError,
    StepFlops,
    count_step,
    gpt_parameters,
    looked_up_parameters,
    optimizer_flops,
    transformer_flops,
)
from lightning_4d.utilization.hardware import ACCELERATORS, Accelerator, lookup, measured_matmul_flops, peak_flops
from lightning_4d.utilization.isolation import FakeRun
from lightning_4d.utilization.mfu import Hint, Utilization, hfu, hints, mfu, rating

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "AttentionFlops",
    "CountError",
    "FakeRun",
    "FlopCounter",
    "Flops",
    "Hint",
    "StepFlops",
    "Utilization",
    "count_step",
    "gpt_parameters",
    "hfu",
    "hints",
    "looked_up_parameters",
    "lookup",
    "measured_matmul_flops",
    "mfu",
    "optimizer_flops",
    "peak_flops",
    "rating",
    "transformer_flops",
]
