"""The mesh: named axes and groups hold the ranks that the layout says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_4d.layout import AXES, ParallelLayout
from lightning_4d.mesh import Mesh


def describe(layout):
    mesh = Mesh(layout, "cpu")
    votes = torch.tensor([1.0])
    dist.all_reduce(votes, group=mesh.data_parallel_group)
    return {
        "axes": {axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in AXES},
        "data": dist.get_process_group_ranks(mesh.data_parallel_group),
        "data_rank": mesh.data_parallel_rank,
        "data_size": mesh.data_parallel_size,
        "source": mesh.data_parallel_source,
        "parameters": dist.get_process_group_ranks(mesh.parameter_group),
        "parameter_size": mesh.parameter_size,
        "parameter_source": mesh.parameter_source,
        "context": mesh.context_parallel_ranks,
        "sharding": mesh.parameter_sharding.mesh.tolist(),
        "coordinate": mesh.coordinate,
        "votes": int(votes),
        "text": repr(mesh),
    }


@pytest.mark.parametrize("text", ["dp2x4", "dp1x8", "dp8x1", "pp2.dp1x2.tp2", "dp2x1.cp2.tp2"])
def test_axes_and_groups_are_those_of_the_layout(pool, text):
    layout = ParallelLayout.parse(text)
    for rank, found in enumerate(pool.run(8, describe, layout)):
        assert found["coordinate"] == layout.coordinate(rank)
        for axis in AXES:
            assert found["axes"][axis] == layout.group_ranks(axis, rank)
        data = layout.group_ranks(("dp_replicate", "dp_shard"), rank)
        assert found["data"] == data
        assert found["votes"] == found["data_size"] == len(data)
        assert found["data_rank"] == data.index(rank)
        assert found["source"] == data[0]
        shards = layout.group_ranks(("dp_shard", "cp"), rank)
        assert shards in (found["sharding"], *found["sharding"])
        parameters = layout.group_ranks(("dp_replicate", "dp_shard", "cp"), rank)
        assert found["parameters"] == parameters
        assert (found["parameter_size"], found["parameter_source"]) == (len(parameters), parameters[0])
        assert layout.group_ranks("cp", rank) in found["context"]
        assert sorted(rank for group in found["context"] for rank in group) == list(range(8))
        assert str(layout) in found["text"]
