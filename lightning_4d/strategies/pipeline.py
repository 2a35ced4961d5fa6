"""`PPStrategy`: pipeline parallelism."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, final

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from typing_extensions import override

from lightning_4d.layout import ParallelLayout
from lightning_4d.strategies.nd import NDStrategy, Size


@final
class PPStrategy(NDStrategy):
    """Divide the blocks of a model into stages, and shard each stage (FSDP2) over the ranks that remain.

    Args:
        size: pipeline ranks; ``"auto"``: the devices of a node.
        blocks: see :class:`NDStrategy`, as all that follow.
        compile_blocks: compile each block.
        reshard_after_forward: free gathered parameters between forward and backward.
        pipeline_schedule: the order of the microbatches' forwards and backwards.
        num_microbatches: how many pieces of a batch pass through the stages.
        pipeline_split: the first block of each stage, or ``"auto"``: by cost.
        loss_reduction: how the losses of microbatches make the batch's loss.
        save_distributed_checkpoint: a folder, or one file.
        process_group_backend: the communication backend.
        timeout: how long a collective may wait for a rank.
    """

    strategy_name = "pp"

    def __init__(
        self,
        size: Size = "auto",
        blocks: str | list[str] = "auto",
        compile_blocks: bool = False,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        pipeline_schedule: str = "1f1b",
        num_microbatches: int | Literal["auto"] = "auto",
        pipeline_split: Literal["auto"] | list[str] | list[int] = "auto",
        loss_reduction: Literal["auto", "mean", "sum"] = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            blocks=blocks,
            compile_blocks=compile_blocks,
            reshard_after_forward=reshard_after_forward,
            pipeline_schedule=pipeline_schedule,
            num_microbatches=num_microbatches,
            pipeline_split=pipeline_split,
            loss_reduction=loss_reduction,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._size: Size = size

    @override
    def _resolve_layout(self) -> ParallelLayout:
        size = self.num_processes if self._size == "auto" else self._size
        return ParallelLayout.resolve(self.world_size, **(self._sizes | {"pipeline_parallel_size": size}))
