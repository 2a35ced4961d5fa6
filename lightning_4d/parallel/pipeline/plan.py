"""Which stage holds which blocks and parameters, and what crosses each cut between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.pipeline.flow import Output
from lightning_4d.parallel.pipeline.record import StepRecord


@dataclass(frozen=True)
class StagePlan:
    """A division of the blocks into stages.

    Attributes:
        order: names of the blocks in the order of calls.
        starts: number of the first block of each stage.
        ranks: the pipeline rank of each stage.
    """

    order: tuple[str, ...]
    starts: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.starts)

    def blocks(self, stage: int) -> range:
        """Return the numbers of the blocks of a stage."""
        stops = (*self.starts[1:], len(self.order))
        return range(self.starts[stage], stops[stage])

    def stage_of(self, block: int | None) -> int:
        """Return the stage of a block; of the tail if None."""
        if block is None:
            return self.stages - 1
        return max(stage for stage, start in enumerate(self.starts) if start <= block)

    def on_rank(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank, in order."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    def parameter_stages(self, record: StepRecord, names: Sequence[str]) -> dict[str, frozenset[int]]:
        """Return the stages that need each parameter; one that nothing needs is the first stage's."""
        return {name: frozenset(self.stage_of(user) for user in record.users(name)) or frozenset([0]) for name in names}

    def carried(self, record: StepRecord) -> list[tuple[Output, ...]]:
        """Return, for the cut after each stage but the last, the block outputs that cross it, in order."""
        needed = [self._needed(record, stage) for stage in range(self.stages)]
        return [
            tuple(
                sorted(output for output in set().union(*needed[stage + 1 :]) if self.stage_of(output.block) <= stage)
            )
            for stage in range(self.stages - 1)
        ]

    def _needed(self, record: StepRecord, stage: int) -> set[Output]:
        found = set().union(*(record.outputs_needed(block) for block in self.blocks(stage)))
        return found | (record.outputs_needed(None) if stage == self.stages - 1 else set())

    def check_same_order(self, record: StepRecord, step: str) -> None:
        """Refuse a step that calls the blocks in another order than the one the stages were made for.

        Raises:
            UnsupportedError: names the step and the first block that differs.
        """
        if record.order == self.order:
            return
        here = next((b for a, b in zip(self.order, record.order, strict=False) if a != b), "none")
        raise UnsupportedError(
            explain(
                f"{step} calls the blocks in another order ({here!r} first differs)",
                "pipeline stages are runs of blocks in the order of the training step",
                "call the same blocks in the same order, or use pipeline_parallel_size=1",
            )
        )
