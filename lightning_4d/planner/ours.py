"""What the strategies of lightning_4d do, as the facts that the cost model takes."""

from __future__ import annotations

import numpy as np

from lightning_4d.errors import PlanError, explain
from lightning_4d.planner.cluster import ClusterFacts
from lightning_4d.planner.facts import ATTENTION, Machine, Plan, Recompute, Software

__all__ = ["POLICIES", "PRECISIONS", "machine_for", "software_for"]

PRECISIONS = ("bf16-mixed", "16-mixed", "32-true")
"""Lightning's names of the precisions that can be planned for."""

POLICIES: dict[str, Recompute] = {
    "none": Recompute(0.0, 0.0, 0.0, 1.0),
    # The callback's "selective" keeps the results of matrix products and attention.
    "selective": Recompute(0.0, 0.0, 1.0, 0.6),
    "full": Recompute(1.0, 1.0, 1.0, 0.0),
}
"""Policies of the callback `ActivationCheckpointing` that the search tries."""


def software_for(plan: Plan, precision: str = "bf16-mixed", *, compiled: bool = False) -> Software:
    """Return how a plan's layers run under NDStrategy: fp32 parameters and gradients, gathered in 16 bit when mixed.

    Without shards nothing is gathered, and autocast casts the parameters in each forward.
    """
    is_mixed = precision != "32-true"
    is_sharded = np.asarray(plan.dp_shard * plan.cp) > 1
    return Software(
        attention=ATTENTION.index("flash2"),
        eager=0.0 if compiled else 1.0,
        gradient_bytes=4.0,
        parameter_bytes=2.0 if is_mixed else 4.0,
        sequence_parallel=0.0,
        casts=np.where(is_sharded, 0.0, float(is_mixed)),
        early_stop=1.0,
        balances_stages=1.0,
        master_bytes=12.0,
        step_bytes=4.0,
        fp32_parameters=1.0,
        fp32_copies=0.0 if compiled else 1.0,
        logit_memory=12.0,
        width_bytes=2.0 if is_mixed else 4.0,
    )


def machine_for(cluster: ClusterFacts, precision: str = "bf16-mixed") -> Machine:
    """Return a cluster as the cost model takes it, at the rate of a precision.

    Raises:
        PlanError: the precision is not known, or the device has no rate for it.
    """
    if precision not in PRECISIONS:
        raise PlanError(explain(f"precision={precision!r}", f"plans are made for {PRECISIONS}", "use 'bf16-mixed'"))
    return cluster.machine(fp32=precision == "32-true")
