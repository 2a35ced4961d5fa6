"""The device mesh: which rank sits where, and the named groups of ranks that communicate.

One ``torch.distributed`` device mesh with the axes of :data:`lightning_4d.layout.AXES`, outermost first, plus the
flattened axes that mechanisms need. Built once per strategy; all ranks must build it together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_4d._torch_private import flatten_mesh
from lightning_4d.layout import AXES, ParallelLayout

_T = TypeVar("_T")


class _Made:
    """The process groups of this process, for as long as there is one default process group."""

    def __init__(self) -> None:
        self.objects: dict[Hashable, Any] = {}
        self.forgotten = 0  # how often
        self._world: weakref.ref[Any] | None = None

    def of_now(self) -> _Made:
        """Begin anew where the default process group is another one."""
        world = dist.group.WORLD
        if self._world is None or self._world() is not world:
            self.objects, self.forgotten = {}, 0
            self._world = None if world is None else weakref.ref(world)
        return self


_MADE = _Made()


def made_once(key: Hashable, make: Callable[[], _T]) -> _T:
    """Return what ``make`` made for ``key`` before, by this or an earlier strategy of the process, or let it make it.

    Process groups live as long as the process and cost threads (gloo: three each, which wake a hundred times a second)
    or device memory (NCCL), so that a process that runs one Trainer after the other must not make new ones for each.

    Args:
        key: says what is made, with all that it depends on; equal on all ranks.
        make: creates process groups.

    Which ranks must call: all ranks of the default process group, together.
    """
    objects = _MADE.of_now().objects
    if key not in objects:
        objects[key] = make()
    return objects[key]


def forget_groups() -> None:
    """After an exception: messages of the run that failed may still be on their way in its groups."""
    made = _MADE.of_now()
    made.objects.clear()
    made.forgotten += 1


def agree_on_groups(device: torch.device) -> None:
    """Forget groups unless every rank remembers the same: some ranks may have failed where others did not.

    Args:
        device: of this rank, on which the default process group communicates.

    Which ranks must call: all ranks of the default process group, together.
    """
    made = _MADE.of_now()
    if dist.get_world_size() == 1:
        return
    counts = torch.tensor([made.forgotten, -made.forgotten], device=device)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    most, least = counts.tolist()
    if most != -least:
        made.objects.clear()
    made.forgotten = most


class Mesh:
    """The ranks of a job arranged by a :class:`~lightning_4d.layout.ParallelLayout`.

    Args:
        layout: the resolved sizes of all axes.
        device_type: ``"cpu"``, ``"cuda"``, ...: the kind of device whose process-group backend communicates.

    Which ranks must call: all ranks of the default process group, together (it creates process groups).
    """

    def __init__(self, layout: ParallelLayout, device_type: str) -> None:
        self.layout = layout
        self.device_mesh: DeviceMesh = init_device_mesh(device_type, layout.sizes, mesh_dim_names=AXES)
        self.rank: int = dist.get_rank()
        self.coordinate: dict[str, int] = layout.coordinate(self.rank)
        # Created here, not on first use, because creating a group is a collective of all ranks.
        self._data = flatten_mesh(self.device_mesh["dp_replicate", "dp_shard"], "dp")
        self._shards, self._parameters = self.device_mesh["dp_shard"], self._data
        if layout.context_parallel_size > 1:
            self._shards = flatten_mesh(self.device_mesh["dp_shard", "cp"], "dp_shard_cp")
            self._parameters = flatten_mesh(self.device_mesh["dp_replicate", "dp_shard", "cp"], "dp_cp")
        self._same_samples = self.device_mesh["tp"]
        if layout.context_parallel_size > 1:
            self._same_samples = self.device_mesh["cp"]
            if layout.tensor_parallel_size > 1:
                self._same_samples = flatten_mesh(self.device_mesh["cp", "tp"], "cp_tp")

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh of one axis name or of several, outermost first."""
        return self.device_mesh[axes]

    def __repr__(self) -> str:
        return f"Mesh({self.layout}, rank={self.rank}, coordinate={self.coordinate})"

    @cached_property
    def parameter_sharding(self) -> DeviceMesh:
        """The mesh that FSDP2 shards parameters over: 1-D (shard), or 2-D (replicate, shard) for HSDP.

        Context-parallel ranks hold shards too: with them ``dp_shard`` and ``cp`` are one flat axis.
        """
        if self.layout.data_parallel_replicate_size == 1:
            return self._shards
        names = self._shards.mesh_dim_names
        assert names is not None
        return self.device_mesh["dp_replicate", names[0]]

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank holds less than all of a parameter."""
        return self._shards.size() > 1

    @property
    def shard_size(self) -> int:
        """How many ranks a parameter is sharded over: ``dp_shard`` times ``cp``."""
        return self._shards.size()

    @property
    def parameter_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that train the same parameters, over which gradients are averaged."""
        return self._parameters.get_group()

    @property
    def parameter_size(self) -> int:
        """How many ranks train the same parameters: data-parallel times context-parallel ones."""
        return self._parameters.size()

    @property
    def parameter_source(self) -> int:
        """The global rank of the first rank in this rank's parameter group: the source of broadcasts."""
        return self.layout.group_ranks(("dp_replicate", "dp_shard", "cp"), self.rank)[0]

    @property
    def context_parallel_ranks(self) -> list[list[int]]:
        """The global ranks of each group that shares sequences, equal on all ranks."""
        ranks = range(self.layout.world_size)
        return [list(group) for group in sorted({tuple(self.layout.group_ranks("cp", rank)) for rank in ranks})]

    @property
    def same_samples(self) -> DeviceMesh:
        """The 1-D mesh of the ranks that run each step of a stage together: context- times tensor-parallel ones."""
        return self._same_samples

    @property
    def data_parallel(self) -> DeviceMesh:
        """The flattened 1-D mesh of the ranks that read different data (replicate x shard)."""
        return self._data

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that read different data."""
        return self._data.get_group()

    @property
    def data_parallel_rank(self) -> int:
        """This rank's index among the ranks that read different data."""
        return self.layout.data_parallel_rank(self.rank)

    @property
    def data_parallel_size(self) -> int:
        """How many ranks read different data."""
        return self.layout.data_parallel_size

    @property
    def data_parallel_source(self) -> int:
        """The global rank of data-parallel rank 0 in this rank's group: the source of broadcasts."""
        return self.layout.group_ranks(("dp_replicate", "dp_shard"), self.rank)[0]
