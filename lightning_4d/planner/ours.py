"""What the strategies of lightning_4d do, as the facts that the cost model takes."""

from __future__ import annotations

import numpy as np

from lightning_4d.errors import PlanError, explain
from lightning_4d.planner.cluster import ClusterFacts
from lightning_4d.planner.facts import ATTENTION, Machine, Plan, Recompute, Software
from lightning_4d.planner.numbers import Number

__all__ = ["POLICIES", "PRECISIONS", "machine_for", "software_for"]

PRECISIONS = ("bf16-mixed", "16-mixed", "bf16-true", "32-true")
"""Lightning's names of the precisions that can be planned for."""

POLICIES: dict[str, Recompute] = {
    "none": Recompute(0.0, 0.0, 0.0, 1.0),
    # The callback's "selective" keeps the results of matrix products and attention.
    "selective": Recompute(0.0, 0.0, 1.0, 0.45),
    "full": Recompute(1.0, 1.0, 1.0, 0.0),
}
"""Policies of the callback `ActivationCheckpointing` that the search tries."""


def software_for(plan: Plan, precision: str = "bf16-mixed", *, compiled: bool = False, seq_len: Number = 0) -> Software:
    """Return how a plan's layers run under NDStrategy; with sequence parallelism where tensor ranks divide the tokens.

    Mixed: parameters and gradients are fp32, and autocast casts weights. Data-parallel and context-parallel ranks
    gather them in 16 bit already; with tensor or pipeline ranks, or nothing to gather, each forward casts them. True:
    everything is of one dtype.
    """
    is_mixed, width = precision.endswith("-mixed"), 4.0 if precision == "32-true" else 2.0
    stored = 4.0 if is_mixed else width
    wrapped = np.asarray(plan.dp * plan.cp) > 1
    whole = (np.asarray(plan.pp) > 1) | (np.asarray(plan.tp) > 1) | ~wrapped  # these weights stay as they are stored
    divides = (np.asarray(plan.tp) > 1) & (np.mod(np.asarray(seq_len) / plan.cp, plan.tp) == 0)
    casts = np.where(whole, float(is_mixed), 0.0)
    return Software(
        attention=ATTENTION.index("flash2"),
        eager=0.0 if compiled else 1.0,
        gradient_bytes=stored,
        parameter_bytes=width + (stored - width) * casts,
        sequence_parallel=np.where(divides, 1.0, 0.0),
        casts=casts,
        early_stop=1.0,
        balances_stages=1.0,
        master_bytes=4.0 + 2 * stored,  # Adam's two moments
        step_bytes=stored,
        fp32_parameters=1.0,
        fp32_copies=0.0 if compiled else 1.0,
        logit_memory=12.0,
        width_bytes=width,
        plain_torch=1.0,
        stored_bytes=stored,
        residual_bytes=stored,
    )


def machine_for(cluster: ClusterFacts, precision: str = "bf16-mixed") -> Machine:
    """Return a cluster as the cost model takes it, at the rate of a precision.

    Raises:
        PlanError: the precision is not known, or the device has no rate for it.
    """
    if precision not in PRECISIONS:
        raise PlanError(explain(f"precision={precision!r}", f"plans are made for {PRECISIONS}", "use 'bf16-mixed'"))
    return cluster.machine(fp32=precision == "32-true")
