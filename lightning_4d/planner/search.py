"""The search: score every candidate, keep those that fit in memory, sort by predicted speed.

All candidates are scored at once, as columns; 16,384 devices take about a second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_4d.errors import PlanError, explain
from lightning_4d.layout import ParallelLayout
from lightning_4d.planner.cluster import ClusterFacts
from lightning_4d.planner.constants import DEFAULT, Constants
from lightning_4d.planner.facts import SCHEDULES, Plan
from lightning_4d.planner.memory import MEMORY_COMPONENTS, memory_bytes
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.numbers import gib_text
from lightning_4d.planner.ours import machine_for, software_for
from lightning_4d.planner.space import Limits, Space, conflicts, enumerate_plans
from lightning_4d.planner.stages import first_blocks, head_in_blocks
from lightning_4d.planner.step_time import COMPONENTS, step_seconds, total_seconds

__all__ = ["Candidate", "Search", "search", "smallest"]

CPU_RUNTIME = 0.4e9  # of a process with torch and Lightning, in bytes
# Processes of one machine talk through memory, by gloo; kernels start at once and are small.
_CPU = {"layer_seconds": 50e-6, "step_seconds": 5e-3, "intra_latency": 0.2e-3}

Floats = NDArray[np.float64]
MARGIN = 0.01  # how much faster a plan must be for each further axis
HEADROOM = (
    0.95  # of the memory that a plan may take: the model is off by a few per cent, and allocators leave fragments
)


@dataclass(frozen=True)
class Candidate:
    """One way to train the model on the cluster, with its predicted cost.

    Attributes:
        layout: sizes of the axes.
        micro_batch: samples of a microbatch on each data-parallel rank.
        microbatches: of a step, on each data-parallel rank.
        schedule: of the pipeline; "" without one.
        virtual: stages of each pipeline rank.
        policy: of activation checkpointing.
        seconds: of a step.
        parts: of those, seconds by component (`step_time.COMPONENTS`).
        memory: bytes of the fullest device by component (`memory.MEMORY_COMPONENTS`).
        capacity: bytes of a device.
        mfu: model FLOPs utilization, causal attention counted by half.
        samples_per_second: of all devices together.
        first_blocks: the first block of each pipeline stage.
        fullest: which rank is the fullest: "every rank", "first stage" or "last stage".
    """

    layout: ParallelLayout
    micro_batch: int
    microbatches: int
    schedule: str
    virtual: int
    policy: str
    seconds: float
    parts: dict[str, float]
    memory: dict[str, float]
    capacity: float
    mfu: float
    samples_per_second: float
    fullest: str = "every rank"
    first_blocks: tuple[int, ...] = ()

    @property
    def bytes(self) -> float:
        """Memory of the fullest device."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the fullest device holds it."""
        return self.bytes <= self.capacity

    def __str__(self) -> str:
        pipeline = f" {self.schedule}" + (f"/{self.virtual}" if self.virtual > 1 else "") if self.schedule else ""
        return f"{self.layout} micro-batch {self.micro_batch} x {self.microbatches}{pipeline} recompute {self.policy}"


@dataclass(frozen=True)
class Search:
    """What a search found; candidates are columns in `space`.

    Attributes:
        model, cluster, batch, precision: what was asked.
        space: all candidates.
        bytes: memory of the fullest device of each.
        seconds: step time of each; infinite where it does not fit.
        order: candidates that fit, fastest first; of nearly equal ones the simpler first.
    """

    model: ModelFacts
    cluster: ClusterFacts
    batch: int | None
    precision: str
    compiled: bool
    constants: Constants
    space: Space
    bytes: Floats
    seconds: Floats
    order: NDArray[np.int64]

    @property
    def capacity(self) -> float:
        """Bytes that a plan may take on a device."""
        return float(machine_for(self.cluster, self.precision).memory) * HEADROOM

    @cached_property
    def best(self) -> Candidate:
        """The fastest that fits.

        Raises:
            PlanError: nothing fits; the message says what would.
        """
        if not len(self.order):
            raise PlanError(_nothing_fits(self))
        return self.candidate(int(self.order[0]))

    def top(self, count: int = 10) -> list[Candidate]:
        """Return the fastest candidates, of each layout and microbatch only the fastest."""
        found: list[Candidate] = []
        seen: set[tuple[Any, ...]] = set()
        for row in self.order:
            plan = self.space.plan
            key = (plan.pp[row], plan.dp_replicate[row], plan.dp_shard[row], plan.cp[row], plan.tp[row])  # type: ignore[index]
            if key not in seen:
                seen.add(key)
                found.append(self.candidate(int(row)))
            if len(found) == count:
                break
        return found

    def candidate(self, row: int) -> Candidate:
        """Return one candidate with its cost by component."""
        one = self.space.take([row])
        return _priced(self, one, row)

    def of(self, mask: NDArray[np.bool_]) -> int | None:
        """Return the fastest fitting candidate among `mask`, or None."""
        rows = np.flatnonzero(mask & np.isfinite(self.seconds))
        return int(rows[np.argmin(self.seconds[rows])]) if len(rows) else None


def search(
    model: ModelFacts,
    cluster: ClusterFacts,
    batch: int | None,
    *,
    precision: str = "bf16-mixed",
    compiled: bool = False,
    limits: Limits | None = None,
    constants: Constants = DEFAULT,
) -> Search:
    """Score every legal way to train `model` on `cluster` with `batch` samples in each step.

    Args:
        model: its sizes.
        cluster: all of its devices are used.
        batch: samples of a step, of all devices together; None: one for each data-parallel rank.
        precision: one of `ours.PRECISIONS`.
        compiled: whether blocks are compiled, which fuses norms and activations.
        limits: what may be tried.
        constants: of the cost model.

    Raises:
        PlanError: no legal layout at all (the batch divides none, or the limits contradict each other).
    """
    if cluster.device.name == "CPU":
        constants = replace(constants, runtime_memory=CPU_RUNTIME, **_CPU)
    limits = replace(limits or Limits(), compiled=compiled)
    space = enumerate_plans(model, cluster.devices, batch, limits)
    if not len(space):
        raise PlanError(_no_layout(model, cluster, batch, limits))
    software = software_for(space.plan, precision, compiled=compiled, seq_len=model.seq_len)
    machine = machine_for(cluster, precision)
    bytes_ = np.asarray(memory_bytes(model, software, space.plan, constants).total)
    fits = np.flatnonzero(bytes_ <= float(machine.memory) * HEADROOM)
    seconds = np.full(len(space), np.inf)
    if len(fits):
        chosen = space.take(fits)
        software = software_for(chosen.plan, precision, compiled=compiled, seq_len=model.seq_len)
        time = np.asarray(total_seconds(step_seconds(model, machine, software, chosen.plan, constants)))
        seconds[fits] = time / (np.asarray(chosen.plan.samples) if batch is None else 1.0)
    order = fits[np.argsort(seconds[fits] * _simplicity(space, fits), kind="stable")]
    return Search(model, cluster, batch, precision, compiled, constants, space, bytes_, seconds, order)


def _simplicity(space: Space, rows: NDArray[np.int64]) -> Any:
    """A penalty for each axis beside replication: differences below the model's accuracy decide nothing."""
    plan = space.plan
    used = sum((np.asarray(size)[rows] > 1).astype(float) for size in (plan.pp, plan.dp_shard, plan.cp, plan.tp))
    return 1 + MARGIN * used


def _no_layout(model: ModelFacts, cluster: ClusterFacts, batch: int | None, limits: Limits) -> str:
    fixed = ", ".join(f"{name}={value}" for name, value in vars(limits).items() if type(value) is int)
    given = f"batch={batch} on {cluster.devices} devices" + (f" with {fixed}" if fixed else "")
    layout = ParallelLayout(
        *(getattr(limits, axis, None) or 1 for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    )
    reasons = conflicts(layout, model)
    if limits.compiled and layout.context_parallel_size * layout.tensor_parallel_size > 1:
        reasons.append("compiled blocks allow neither tensor nor context parallelism")
    rule = "; ".join(reasons) or "the data-parallel size divides the batch, and the product of all sizes is the devices"
    near = max(1, round((batch or 1) / cluster.devices)) * cluster.devices
    return explain(given, rule, f"use batch={near}, or leave sizes open")


def _priced(found: Search, one: Space, row: int) -> Candidate:
    plan, machine = one.plan, machine_for(found.cluster, found.precision)
    software = software_for(plan, found.precision, compiled=found.compiled, seq_len=found.model.seq_len)
    parts = step_seconds(found.model, machine, software, plan, found.constants)
    memory = memory_bytes(found.model, software, plan, found.constants)
    seconds = _scalar(total_seconds(parts))
    samples = _scalar(plan.samples)
    schedule = SCHEDULES[int(_scalar(plan.schedule))].name
    pipelined = _scalar(plan.pp) > 1
    return Candidate(
        layout=one.layout(0),
        micro_batch=int(_scalar(plan.micro_batch)),
        microbatches=int(_scalar(plan.microbatches)),
        schedule=schedule if pipelined else "",
        virtual=int(_scalar(plan.virtual)),
        policy=one.policies[int(one.policy[0])],
        seconds=seconds,
        parts={name: _scalar(parts[name]) for name in COMPONENTS},
        memory={name: _scalar(memory.parts[name]) for name in MEMORY_COMPONENTS},
        capacity=found.capacity,
        mfu=samples * _scalar(found.model.flops) / (seconds * _scalar(machine.peak) * found.cluster.devices),
        samples_per_second=samples / seconds,
        first_blocks=_first_blocks(found.model, plan) if pipelined else (),
        fullest=("last stage" if _scalar(memory.is_last) else "first stage") if pipelined else "every rank",
    )


def _first_blocks(model: ModelFacts, plan: Plan) -> tuple[int, ...]:
    stages = int(_scalar(plan.pp) * _scalar(plan.virtual))
    return tuple(first_blocks(int(_scalar(model.layers)), stages, _scalar(head_in_blocks(model))))


def _scalar(value: Any) -> float:
    return float(np.asarray(value).reshape(-1)[0])


def _nothing_fits(found: Search) -> str:
    least = found.candidate(int(np.argmin(found.bytes)))
    rule = f"no layout fits: the least memory, by {least}, is {gib_text(least.bytes)} of {gib_text(least.capacity)} GiB"
    given = f"{found.model.name} on {found.cluster.devices} x {found.cluster.device.name}"
    enough = smallest(found.model, found.cluster, precision=found.precision, compiled=found.compiled)
    if enough is None:
        return explain(given, rule, "use devices with more memory, or a shorter sequence")
    return explain(given, rule, f"use at least {enough.layout.world_size} of these devices, by {enough}")


def smallest(
    model: ModelFacts,
    cluster: ClusterFacts,
    *,
    precision: str = "bf16-mixed",
    compiled: bool = False,
    limits: Limits | None = None,
    most: int = 65_536,
) -> Candidate | None:
    """Return a layout of the smallest number of the cluster's devices whose memory holds the model, or None.

    The batch is one sample for each data-parallel rank. Numbers of devices are parts of a node, then whole nodes: first
    doubled until it fits, then every number below down to half.

    Args:
        model: its sizes.
        cluster: whose devices and links; its number of devices does not matter.
        precision: as for `search`.
        compiled: as for `search`.
        limits: as for `search`.
        most: where to give up.
    """
    node = cluster.devices_per_node

    def of(devices: int) -> Candidate | None:
        part = replace(cluster, nodes=max(1, devices // node), devices_per_node=min(node, devices))
        try:
            found = search(model, part, None, precision=precision, compiled=compiled, limits=limits)
        except PlanError:
            return None
        return found.best if len(found.order) else None

    counts = [size for size in (2**k for k in range(20)) if size < node] + [node]
    while counts[-1] < most:
        counts.append(counts[-1] * 2)
    for index, devices in enumerate(counts):
        enough = of(devices)
        if enough is None:
            continue
        step = node if devices > node else 1
        below = range((counts[index - 1] if index else 0) + step, devices, step)
        return next((each for count in below if (each := of(count))), enough)
    return None
