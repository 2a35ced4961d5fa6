"""`TPStrategy`: tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Literal, final

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from typing_extensions import override

from lightning_4d.layout import ParallelLayout
from lightning_4d.strategies.nd import NDStrategy, Size


@final
class TPStrategy(NDStrategy):
    """Divide each layer among the ranks of a group, by a plan that is found.

    The other ranks are data-parallel and share parameters (FSDP2).

    Args:
        size: ranks that share each layer; ``"auto"``: the devices of a node.
        plan: ``"auto"``, or ``{module pattern: style}``; see :class:`NDStrategy`.
        sequence_parallel: between the divided layers, keep each rank's part of the sequence only.
        blocks: see :class:`NDStrategy`, as all that follow.
        reshard_after_forward: free gathered parameters between forward and backward.
        save_distributed_checkpoint: a folder, or one file.
        process_group_backend: the communication backend.
        timeout: how long a collective may wait for a rank.
    """

    strategy_name = "tp"

    def __init__(
        self,
        size: Size = "auto",
        plan: Mapping[str, str] | Literal["auto"] = "auto",
        sequence_parallel: bool = False,
        blocks: str | list[str] = "auto",
        reshard_after_forward: bool | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            blocks=blocks,
            reshard_after_forward=reshard_after_forward,
            tensor_parallel_plan=plan,
            sequence_parallel=sequence_parallel,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._size: Size = size

    @override
    def _resolve_layout(self) -> ParallelLayout:
        size = self.world_size // self.num_nodes if self._size == "auto" else self._size
        return ParallelLayout.resolve(self.world_size, data_parallel_shard_size="auto", tensor_parallel_size=size)
