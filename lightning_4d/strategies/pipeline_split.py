"""Where a pipeline's stages begin: by cost, or as the user says."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.pipeline.plan import StagePlan
from lightning_4d.parallel.pipeline.record import StepRecord
from lightning_4d.parallel.pipeline.schedule import ScheduleKind, stage_ranks
from lightning_4d.parallel.pipeline.split import check_count, divide
from lightning_4d.strategies.fake_step import count_training_step
from lightning_4d.utilization import CountError


def plan_stages(
    record: StepRecord,
    kind: ScheduleKind,
    ranks: int,
    split: Sequence[str | int] | Literal["auto"],
    by_cost: Callable[[int], list[int]],
) -> StagePlan:
    """Return which stage holds which blocks of a recorded step, and which rank each stage.

    Args:
        record: of the step.
        kind: the schedule.
        ranks: pipeline ranks.
        split: as ``pipeline_split=``.
        by_cost: returns the first block of each of so many stages, for "auto".

    Raises:
        UnsupportedError: fewer blocks than stages, or a split that does not fit.
    """
    if split == "auto":
        stages = ranks * kind.default_stages_per_rank
        check_count(len(record.order), stages)
        starts = by_cost(stages)
    else:
        starts = split_by_name(split, record.order, kind, ranks)
    return StagePlan(record.order, tuple(starts), tuple(stage_ranks(kind, ranks, len(starts))))


def split_by_cost(trainer: Trainer, module: LightningModule, piece: Any, record: StepRecord, stages: int) -> list[int]:
    """Return the first block of each stage, by the FLOPs of blocks and of modules outside them."""
    costs, before, after = block_costs(trainer, module, piece, record)
    return divide(costs, stages, before=before, after=after)


def block_costs(
    trainer: Trainer, module: LightningModule, piece: Any, record: StepRecord
) -> tuple[list[float], float, float]:
    """Return the cost of each block, and of what runs before and after them: forward FLOPs, or else parameters."""
    outside = list(record.stubs)
    try:
        counted = count_training_step(
            trainer, module, piece, 0, {name: module.get_submodule(name) for name in (*record.order, *outside)}
        ).blocks
        flops = {name: float(counted[name].total) for name in counted}
    except CountError:
        flops = {}
    if not any(flops.get(name) for name in record.order):
        flops = {name: float(sum(p.numel() for p in module.get_submodule(name).parameters())) for name in record.order}
    before = sum(flops.get(name, 0.0) for name in outside if not _is_tail(module, name, record))
    after = sum(flops.get(name, 0.0) for name in outside if _is_tail(module, name, record))
    return [flops.get(name, 0.0) for name in record.order], before, after


def _is_tail(module: LightningModule, name: str, record: StepRecord) -> bool:
    """Whether the code after the last block needs the parameters of a module outside the blocks."""
    names = {id(p): n for n, p in module.named_parameters()}
    own = [names[id(p)] for p in module.get_submodule(name).parameters(recurse=False) if id(p) in names]
    return any(None in record.users(parameter) for parameter in own)


def split_by_name(firsts: Sequence[str | int], order: Sequence[str], kind: ScheduleKind, ranks: int) -> list[int]:
    """Return the numbers of the blocks that the user names as the first of each stage.

    Args:
        firsts: names or numbers of blocks; the first may be left out.
        order: names of all blocks.
        kind: the schedule.
        ranks: pipeline ranks.

    Raises:
        UnsupportedError: an unknown name, an order that is not rising, or a number of stages that does not fit.
    """
    starts = [_number(first, order) for first in firsts]
    if not starts or starts[0] != 0:
        starts.insert(0, 0)
    if any(b <= a for a, b in itertools.pairwise(starts)):
        raise UnsupportedError(
            explain(f"pipeline_split={list(firsts)!r}", "first blocks of stages come in rising order", "sort them")
        )
    per_rank, rest = divmod(len(starts), ranks)
    if rest or not kind.allows_stages_per_rank(per_rank):
        wanted = {"single": f"{ranks}", "loop": f"{2 * ranks}, {3 * ranks}, ...", "v": f"{2 * ranks}"}[kind.placement]
        raise UnsupportedError(
            explain(
                f"pipeline_split with {len(starts)} stages",
                f"the schedule {kind.name!r} on {ranks} pipeline ranks takes {wanted} stages",
                f"name {int(wanted.split(',')[0]) - 1} first blocks besides the very first",
            )
        )
    return starts


def _number(first: str | int, order: Sequence[str]) -> int:
    if isinstance(first, int) or str(first).isdigit():
        if 0 <= int(first) < len(order):
            return int(first)
    elif first in order:
        return list(order).index(first)
    near = difflib.get_close_matches(str(first), order, n=3, cutoff=0.0)
    raise UnsupportedError(
        explain(
            f"pipeline_split names the block {first!r}",
            f"blocks are called {order[0]!r} to {order[-1]!r}, or numbered 0 to {len(order) - 1}",
            f"use one of {near}",
        )
    )
