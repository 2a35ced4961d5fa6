"""`PipelineTimeline`: a picture of when each pipeline rank computed what, from measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.pipeline.clock import Clock
from lightning_4d.parallel.pipeline.engine import Pipeline
from lightning_4d.parallel.pipeline.timeline import Span
from lightning_4d.strategies import NDStrategy
from lightning_4d.visual import Cell, draw_schedule, efficiency


class PipelineTimeline(Callback):
    """Draw one training step as a Gantt chart: a row for each pipeline rank, forwards, backwards and bubbles.

    Written by global rank 0, once, as ``pipeline_step_N.png`` and ``.svg``. The step that is drawn begins with a
    barrier of the pipeline ranks; other steps are untouched. Needs matplotlib (the extra ``visual``).

    Args:
        step: number of the training batch that is drawn, from 0; not among the first, which compile and allocate.
        dirpath: folder for the pictures; by default the Trainer's log folder.

    Raises:
        UnsupportedError: at the start of ``fit``, a strategy without pipeline stages.
    """

    def __init__(self, step: int = 3, dirpath: str | None = None) -> None:
        self.step = step
        self.dirpath = dirpath
        self.spans: list[Span] = []

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, NDStrategy) or not strategy.has_stages:
            raise UnsupportedError(
                explain(
                    f"PipelineTimeline with {type(strategy).__name__}",
                    "it draws pipeline stages",
                    "use PPStrategy, or NDStrategy with pipeline_parallel_size above 1",
                )
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.step or (self.step == 0 and batch_idx == 0):
            pipeline = _pipeline(trainer)
            dist.barrier(group=pipeline.group)  # the ranks' clocks start together
            pipeline.clock = Clock(pipeline.device, pipeline.rank)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        pipeline = _pipeline(trainer)
        if pipeline.clock is None:
            return
        mine, pipeline.clock = pipeline.clock.spans(), None
        gathered: list[Any] = [None] * pipeline.ranks
        dist.all_gather_object(gathered, mine, group=pipeline.group)
        self.spans = [span for spans in gathered for span in spans]
        if trainer.is_global_zero:
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        cells = [Cell(*span) for span in self.spans]  # pyright: ignore[reportArgumentType]  # the kinds are Cell's
        strategy = trainer.strategy
        assert isinstance(strategy, NDStrategy)
        folder = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        title = f"{strategy.pipeline_schedule}, step {self.step}, measured"
        for suffix in ("png", "svg"):
            draw_schedule(cells, folder / f"pipeline_step_{self.step}.{suffix}", title)
        rank_zero_info(f"Pipeline of step {self.step}: {efficiency(cells):.1%} busy, drawn in {folder}")


def _pipeline(trainer: Trainer) -> Pipeline:
    strategy = trainer.strategy
    assert isinstance(strategy, NDStrategy)
    return strategy.pipeline
