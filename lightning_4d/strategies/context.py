"""`CPStrategy`: context parallelism."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, final

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from typing_extensions import override

from lightning_4d.layout import ParallelLayout
from lightning_4d.strategies.nd import NDStrategy, Size


@final
class CPStrategy(NDStrategy):
    """Let ranks share each sequence, and shard parameters over them and over what remains (FSDP2).

    Args:
        size: ranks that share a sequence; ``"auto"``: the devices of a node. What remains reads different data.
        context_parallel_attention: see :class:`NDStrategy`, as all that follow.
        ulysses_size: the Ulysses part of "hybrid".
        sequence_dim: of the blocks' inputs.
        blocks: where sequences are divided.
        compile_blocks: compile each block.
        reshard_after_forward: free gathered parameters between forward and backward.
        save_distributed_checkpoint: a folder, or one file.
        process_group_backend: the communication backend.
        timeout: how long a collective may wait for a rank.
    """

    strategy_name = "cp"

    def __init__(
        self,
        size: Size = "auto",
        context_parallel_attention: Literal["ring", "ulysses", "hybrid"] = "ring",
        ulysses_size: Size = "auto",
        sequence_dim: Size = "auto",
        blocks: str | list[str] = "auto",
        compile_blocks: bool = False,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            context_parallel_attention=context_parallel_attention,
            ulysses_size=ulysses_size,
            sequence_dim=sequence_dim,
            blocks=blocks,
            compile_blocks=compile_blocks,
            reshard_after_forward=reshard_after_forward,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._size: Size = size

    @override
    def _resolve_layout(self) -> ParallelLayout:
        size = self.num_processes if self._size == "auto" else self._size
        return ParallelLayout.resolve(self.world_size, context_parallel_size=size, data_parallel_shard_size="auto")
