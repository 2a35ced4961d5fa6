"""Say how a module would be divided into pipeline stages, without running it: stages, their shares, what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.blocks import find_blocks
from lightning_4d.parallel.pipeline.plan import StagePlan
from lightning_4d.parallel.pipeline.record import StepRecord
from lightning_4d.parallel.pipeline.schedule import find_schedule
from lightning_4d.parallel.pipeline.split import check_count, divide
from lightning_4d.strategies.fake_step import record_step
from lightning_4d.strategies.pipeline_split import block_costs, plan_stages


@dataclass(frozen=True)
class StageReport:
    """One stage.

    Attributes:
        stage: its number.
        rank: its pipeline rank.
        first: name of its first block.
        last: name of its last block.
        parameters: how many it needs; tied and shared ones count on every stage that needs them.
        flops: forward FLOPs of one batch, those of modules outside the blocks included.
        sends: elements that it sends to the next stage for one batch.
    """

    stage: int
    rank: int
    first: str
    last: str
    parameters: int
    flops: float
    sends: int


def explain_stages(
    module: LightningModule,
    ranks: int,
    schedule: str = "1f1b",
    split: Sequence[str | int] | Literal["auto"] = "auto",
    blocks: str | Sequence[str] = "auto",
) -> list[StageReport]:
    """Return the stages of a module that can make its own training loader.

    Args:
        module: on any device; nothing of it changes.
        ranks: pipeline ranks.
        schedule: as ``pipeline_schedule=``.
        split: as ``pipeline_split=``.
        blocks: as ``blocks=``.

    Raises:
        UnsupportedError: the step cannot run in stages.
    """
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    batch = _batch(module)
    found = find_blocks(module, blocks)
    kind = find_schedule(schedule)
    check_count(len(found), ranks)
    record = record_step(trainer, module, "training_step", batch, found, 0)
    costs, before, after = block_costs(trainer, module, batch, record)
    plan = plan_stages(record, kind, ranks, split, lambda stages: divide(costs, stages, before=before, after=after))
    return [_report(module, plan, record, stage, costs, before, after) for stage in range(plan.stages)]


def _batch(module: LightningModule) -> Any:
    try:
        return next(iter(module.train_dataloader()))
    except Exception as error:
        raise UnsupportedError(
            explain(
                f"{type(module).__name__}.train_dataloader() gives no batch ({type(error).__name__}: {error})",
                "stages are divided by the FLOPs that a batch costs",
                "name a class that makes its own training loader",
            )
        ) from error


def _report(
    module: nn.Module,
    plan: StagePlan,
    record: StepRecord,
    stage: int,
    costs: Sequence[float],
    before: float,
    after: float,
) -> StageReport:
    own = plan.blocks(stage)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    needed = plan.parameter_stages(record, list(sizes))
    flops = sum(costs[block] for block in own)
    flops += (before if stage == 0 else 0.0) + (after if stage == plan.stages - 1 else 0.0)
    sent = plan.carried(record)[stage] if stage < plan.stages - 1 else ()
    specs = [record.blocks[output.block].slots()[output.slot].spec for output in sent]
    return StageReport(
        stage,
        plan.ranks[stage],
        plan.order[own.start],
        plan.order[own.stop - 1],
        sum(size for name, size in sizes.items() if stage in needed[name]),
        flops,
        sum(_elements(spec.shape) for spec in specs),
    )


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
