"""The mesh: named axes and groups hold the ranks that the layout says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_4d.layout import AXES, ParallelLayout
from lightning_4d.mesh import Mesh, agree_on_groups, forget_groups, made_once


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
        "together": dist.get_process_group_ranks(mesh.same_samples.get_group()),
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
        assert found["together"] == layout.group_ranks(("cp", "tp"), rank)
        assert layout.group_ranks("cp", rank) in found["context"]
        assert sorted(rank for group in found["context"] for rank in group) == list(range(8))
        assert str(layout) in found["text"]


def mesh_again(failing: int | None) -> tuple[bool, int]:
    """Whether a second mesh of the same layout is the first one, and how many threads it cost."""
    layout, cpu = ParallelLayout.parse("dp1x2.tp2"), torch.device("cpu")
    agree_on_groups(cpu)
    first = made_once("mesh", lambda: Mesh(layout, "cpu"))
    if failing in (dist.get_rank(), -1):
        forget_groups()
    agree_on_groups(cpu)
    before = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 0
    again = made_once("mesh", lambda: Mesh(layout, "cpu"))
    votes = torch.ones(())
    dist.all_reduce(votes, group=again.data_parallel_group)
    assert votes == 2
    after = len(os.listdir("/proc/self/task")) if before else 0
    return again is first, after - before


def test_groups_are_made_once_unless_a_rank_has_failed_since(pool):
    assert pool.run(4, mesh_again, None) == [(True, 0)] * 4
    for failing in (1, -1):  # one rank, all of them
        assert all(not same for same, _ in pool.run(4, mesh_again, failing))
