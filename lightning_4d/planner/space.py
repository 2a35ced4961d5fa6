"""All layouts that are legal for a model on a cluster, with every way to run a step on them, as columns of numbers.

Which sizes fit a model is judged by `lightning_4d.planner.legal`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_4d.errors import PlanError, explain
from lightning_4d.layout import ParallelLayout
from lightning_4d.planner.facts import SCHEDULES, Plan, Recompute
from lightning_4d.planner.legal import ModelSizes, axis_conflict, model_conflicts
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.ours import POLICIES

__all__ = ["Limits", "Space", "enumerate_plans", "model_sizes"]

Axes = NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """What the search may try; None means everything.

    Attributes:
        pp, dp_replicate, dp_shard, cp, tp: the size of an axis, fixed.
        micro_batch: samples of a microbatch, fixed.
        schedules: names of pipeline schedules; by default those that train any model that pipelines.
        policies: names of `POLICIES`.
        compiled: whether blocks are compiled, which NDStrategy does without tensor and context parallelism only.
    """

    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = None
    tp: int | None = None
    micro_batch: int | None = None
    schedules: Sequence[str] = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
    policies: Sequence[str] = tuple(POLICIES)
    compiled: bool = False

    def check(self, devices: int, batch: int | None) -> None:
        """Refuse what is no limit at all.

        Raises:
            PlanError: a count below 1, an unknown name, sizes whose product is not the devices, a microbatch that
                divides no rank's samples.
        """
        counts = {"devices": devices, "batch": batch, "micro_batch": self.micro_batch}
        counts |= {axis: getattr(self, axis) for axis in _AXES}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise PlanError(explain(f"{name}={count}", "it is a whole number of at least 1", f"use {name}=1"))
        _check_names("schedule", self.schedules, [schedule.name for schedule in SCHEDULES])
        _check_names("recompute", self.policies, list(POLICIES))
        sizes = [getattr(self, axis) for axis in _AXES]
        if None not in sizes and prod(sizes) != devices:
            given = f"layout {ParallelLayout(*sizes)} on {devices} devices"
            raise PlanError(explain(given, f"its sizes make {prod(sizes)} processes", f"use devices={prod(sizes)}"))
        if batch is not None and self.micro_batch is not None and batch % self.micro_batch:
            near = max(size for size in range(1, self.micro_batch + 1) if batch % size == 0)
            given = f"micro_batch={self.micro_batch} with batch={batch}"
            raise PlanError(explain(given, "microbatches make up the batch", f"use micro_batch={near}"))


_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.0)[0]
            raise PlanError(explain(f"{what} {name!r}", f"known are {', '.join(known)}", f"use {near!r}"))


@dataclass(frozen=True)
class Space:
    """Candidates as columns.

    Attributes:
        plan: the columns, for the cost model.
        policy: index into `policies` for each candidate.
        policies: names.
    """

    plan: Plan
    policy: NDArray[np.int64]
    policies: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.policy)

    def take(self, rows: Any) -> Space:
        """Return some of the candidates."""
        columns: dict[str, Any] = {}
        for field in fields(self.plan):
            value = getattr(self.plan, field.name)
            columns[field.name] = _taken(value, rows) if isinstance(value, Recompute) else np.asarray(value)[rows]
        return Space(Plan(**columns), self.policy[rows], self.policies)

    def layout(self, row: int) -> ParallelLayout:
        """Return the layout of a candidate."""
        plan = self.plan
        sizes = (plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp)
        return ParallelLayout(*(int(np.asarray(size)[row]) for size in sizes))


def _taken(recompute: Recompute, rows: Any) -> Recompute:
    return Recompute(*(np.asarray(getattr(recompute, field.name))[rows] for field in fields(recompute)))


def model_sizes(model: ModelFacts) -> ModelSizes:
    """Return what of a model the axes must fit."""
    sizes = (model.layers, model.heads, model.kv_heads, model.ffn_hidden, model.seq_len)
    return ModelSizes(*(int(np.asarray(size)) for size in sizes))


def enumerate_plans(model: ModelFacts, devices: int, batch: int | None, limits: Limits | None = None) -> Space:
    """Return every legal layout of `devices` devices with every microbatch, schedule and policy.

    Args:
        model: its sizes, as plain numbers.
        devices: in the cluster.
        batch: samples of a step, of all ranks together; None: one for each data-parallel rank.
        limits: what may be tried.

    Raises:
        PlanError: see `Limits.check`.
    """
    limits = limits or Limits()
    limits.check(devices, batch)
    layouts = _layouts(model_sizes(model), devices, limits)
    steps = _microbatches(layouts, batch, limits)
    pipelines = _pipelines(steps, int(np.asarray(model.layers)), limits)
    policies = tuple(limits.policies)
    rows, policy = np.repeat(pipelines, len(policies), axis=0), np.tile(np.arange(len(policies)), len(pipelines))
    return Space(_plan(rows, policy, policies), policy, policies)


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _sizes(axis: str, devices: int, sizes: ModelSizes, fixed: int | None) -> list[int]:
    options = _divisors(devices) if fixed is None else [fixed]
    return [size for size in options if devices % size == 0 and axis_conflict(axis, size, sizes) is None]


def _layouts(sizes: ModelSizes, devices: int, limits: Limits) -> Axes:
    """Rows of (pp, dp_replicate, dp_shard, cp, tp)."""
    rows: list[tuple[int, ...]] = []
    fixed = [getattr(limits, axis) for axis in ("pp", "cp", "tp")]
    options = [_sizes(axis, devices, sizes, size) for axis, size in zip(("pp", "cp", "tp"), fixed)]
    if limits.compiled:
        options[1:] = [[size for size in found if size == 1] for found in options[1:]]
    for pp, cp, tp in product(*options):
        if devices % (pp * cp * tp):
            continue
        dp = devices // (pp * cp * tp)
        rows += [(pp, dp // shard, shard, cp, tp) for shard in _divisors(dp) if _allowed(dp // shard, shard, limits)]
    return np.array(rows, np.int64).reshape(-1, 5)


def _allowed(replicate: int, shard: int, limits: Limits) -> bool:
    return limits.dp_replicate in (None, replicate) and limits.dp_shard in (None, shard)


def _microbatches(layouts: Axes, batch: int | None, limits: Limits) -> Axes:
    """Append (micro_batch, microbatches) to each row in every way that makes the batch."""
    rows: list[Axes] = []
    dp = layouts[:, 1] * layouts[:, 2]
    for size in np.unique(dp):
        total = 1 if batch is None else batch // int(size)
        if batch is not None and batch % int(size):
            continue
        per_rank = [limits.micro_batch] if limits.micro_batch else _powers(total)
        pairs = np.array([(micro, total // micro) for micro in per_rank if total % micro == 0], np.int64).reshape(-1, 2)
        chosen = layouts[dp == size]
        rows.append(np.hstack([np.repeat(chosen, len(pairs), axis=0), np.tile(pairs, (len(chosen), 1))]))
    return np.concatenate(rows) if rows else np.zeros((0, 7), np.int64)


def _powers(total: int) -> list[int]:
    """Microbatches that are tried: powers of two up to 64 that divide a rank's samples, and all of them at once."""
    powers = [2**k for k in range(7) if total % 2**k == 0]
    return sorted({*powers, *([total] if total <= 64 else [])})


def _pipelines(steps: Axes, layers: int, limits: Limits) -> Axes:
    """Append (virtual, schedule) to each row: every schedule that fits its stages and microbatches."""
    pp, microbatches = steps[:, 0], steps[:, 6]
    parts = [_with(steps[pp == 1], 1, 0)]
    for index, schedule in enumerate(SCHEDULES):
        if schedule.name not in limits.schedules:
            continue
        for chunks in (schedule.chunks,) if schedule.chunks else (2, 4, 8):
            fits = (pp > 1) & (pp * chunks <= layers) & (microbatches >= pp)
            if chunks > 1:
                fits &= microbatches % pp == 0
            if schedule.name == "dualpipev":
                fits &= microbatches >= 2 * pp
            parts.append(_with(steps[fits], chunks, index))
    return np.concatenate(parts)


def _with(rows: Axes, *values: int) -> Axes:
    return np.hstack([rows, np.tile(np.array(values, np.int64), (len(rows), 1))])


def _plan(rows: Axes, policy: NDArray[np.int64], policies: Iterable[str]) -> Plan:
    pp, replicate, shard, cp, tp, micro, microbatches, virtual, schedule = rows.astype(float).T
    table = {field.name: [getattr(POLICIES[name], field.name) for name in policies] for field in fields(Recompute)}
    recompute = Recompute(**{name: np.array(values, float)[policy] for name, values in table.items()})
    # A pipeline gathers its stages once for all microbatches of a step.
    zero = np.where(shard * cp > 1, np.where(pp > 1, 2.0, 3.0), 0.0)
    return Plan(pp, replicate, shard, cp, tp, zero, micro, microbatches, virtual, schedule, recompute)


def conflicts(layout: ParallelLayout, model: ModelFacts) -> list[str]:
    """Return why a layout does not fit a model; empty where it does."""
    return model_conflicts(layout, model_sizes(model))
