"""Why not the others: for each family of layouts, how far its best is from the best of all, or why it does not fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_4d.planner.facts import SCHEDULES, Plan
from lightning_4d.planner.legal import axis_conflict
from lightning_4d.planner.numbers import gib_text
from lightning_4d.planner.search import Candidate, Search
from lightning_4d.planner.space import model_sizes

__all__ = ["Rejection", "rejections"]

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Rejection:
    """A family of layouts that the best plan does not belong to.

    Attributes:
        family: what its layouts have in common.
        reason: why none of them was taken, with numbers.
        best: its fastest candidate that fits, if there is one.
    """

    family: str
    reason: str
    best: Candidate | None = None

    def __str__(self) -> str:
        return f"{self.family}: {self.reason}"


def rejections(found: Search) -> list[Rejection]:
    """Return a reason for each family that the best plan does not belong to."""
    plan, best = found.space.plan, int(found.order[0])
    rejected = []
    for name, mask in _families(found).items():
        if not len(mask) or mask[best]:
            continue
        if mask.any():
            rejected.append(_compared(found, name, mask))
    return [*rejected, *_impossible(found, plan)]


def _families(found: Search) -> dict[str, Mask]:
    plan, node = found.space.plan, found.cluster.devices_per_node
    pp, replicate, shard, cp, tp = (
        np.asarray(size) for size in (plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp)
    )
    data_only = (pp == 1) & (cp == 1) & (tp == 1)
    families = {
        "plain data parallelism": data_only & (shard == 1),
        "FSDP over all devices": data_only & (replicate == 1) & (shard > 1),
        "HSDP": data_only & (replicate > 1) & (shard > 1),
        "no pipeline (pp=1)": pp == 1,
        "pipeline (pp>1)": pp > 1,
        "no tensor parallelism (tp=1)": tp == 1,
        f"tp inside a node (tp<={node})": (tp > 1) & (tp <= node),
        f"tp across nodes (tp>{node})": tp > node,
        "no context parallelism (cp=1)": cp == 1,
        "context parallelism (cp>1)": cp > 1,
    }
    families |= {f"recompute {name}": found.space.policy == index for index, name in enumerate(found.space.policies)}
    schedules = np.asarray(plan.schedule, int)
    best = int(found.order[0])
    if pp[best] > 1:
        families |= {f"schedule {each.name}": (pp > 1) & (schedules == i) for i, each in enumerate(SCHEDULES)}
    return families


def _compared(found: Search, name: str, mask: Mask) -> Rejection:
    row = found.of(mask)
    if row is None:
        least = found.candidate(int(np.flatnonzero(mask)[np.argmin(found.bytes[mask])]))
        most = max(least.memory, key=lambda part: least.memory[part])
        held = f"{most} {gib_text(least.memory[most])}"
        sizes = f"needs {gib_text(least.bytes)} GiB of {gib_text(least.capacity)}, {held} of it, by {least}"
        return Rejection(name, sizes)
    other, best = found.candidate(row), found.best
    slower = found.seconds[row] / found.seconds[int(found.order[0])] - 1
    if slower < 0.005:
        return Rejection(name, f"as fast by {other}: the simpler one is taken", other)
    return Rejection(name, f"{slower:+.0%} step time by {other}, {_difference(other, best)}", other)


def _difference(other: Candidate, best: Candidate) -> str:
    """What grew most, per sample."""
    scale = best.layout.data_parallel_size * best.micro_batch * best.microbatches
    own = other.layout.data_parallel_size * other.micro_batch * other.microbatches
    grown = {part: other.parts[part] * scale / own - best.parts[part] for part in best.parts}
    part = max(grown, key=lambda each: grown[each])
    if grown[part] < 0.005 * best.seconds:
        return "a little of everything"
    return f"mostly {_NAMES.get(part, part)} ({grown[part] / best.seconds:+.0%})"


_NAMES = {
    "matmul": "less efficient matrix products",
    "head": "the head on the last stage",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "sharding": "gathering of parameters that computation does not hide",
    "pipeline": "transfers between stages",
    "bubble": "the pipeline bubble",
    "data": "reduction of gradients",
}


def _impossible(found: Search, plan: Plan) -> list[Rejection]:
    """The first power of two of each axis that does not fit the model."""
    sizes, rejected = model_sizes(found.model), []
    for axis, column in (("tp", plan.tp), ("pp", plan.pp), ("cp", plan.cp)):
        tried = set(np.unique(np.asarray(column)).astype(int).tolist())
        powers = (2**k for k in range(1, 15) if found.cluster.devices % 2**k == 0)
        first = next((size for size in powers if size not in tried and axis_conflict(axis, size, sizes)), None)
        if first is not None:
            rejected.append(Rejection(f"{axis}={first} and more", axis_conflict(axis, first, sizes) or ""))
    return rejected
