"""`HSDPStrategy`: hybrid sharded data parallelism."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, final

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from typing_extensions import override

from lightning_4d.layout import ParallelLayout, hsdp_sizes
from lightning_4d.strategies.nd import NDStrategy, Size


@final
class HSDPStrategy(NDStrategy):
    """Shard parameters among some ranks (FSDP2), and replicate these shards among groups of them.

    Args:
        replicate_size: how many copies of the model there are; ``"auto"``: one per node.
        shard_size: how many ranks share a copy; ``"auto"``: the devices of a node. When one is given, the other is what
            remains.
        blocks: see :class:`NDStrategy`, as all that follow.
        compile_blocks: compile each block.
        reshard_after_forward: free gathered parameters between forward and backward.
        save_distributed_checkpoint: a folder, or one file.
        process_group_backend: the communication backend.
        timeout: how long a collective may wait for a rank.
    """

    strategy_name = "hsdp"

    def __init__(
        self,
        replicate_size: Size = "auto",
        shard_size: Size = "auto",
        blocks: str | list[str] = "auto",
        compile_blocks: bool = False,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            blocks=blocks,
            compile_blocks=compile_blocks,
            reshard_after_forward=reshard_after_forward,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._replicate_size: Size = replicate_size
        self._shard_size: Size = shard_size

    @override
    def _resolve_layout(self) -> ParallelLayout:
        replicate, shard = hsdp_sizes(self._replicate_size, self._shard_size, self.world_size, self.num_nodes)
        return ParallelLayout(data_parallel_replicate_size=replicate, data_parallel_shard_size=shard)
