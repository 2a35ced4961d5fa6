"""A step communicates what the same model divided by hand with torch's parallelize_module does, with the ideal plan."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.benchmarks.tensor import COUNTED, SIZES, run_by_hand, run_strategy
from tests.collectives import CollectiveBytes, count_collectives


def both() -> tuple[dict[str, Any], dict[str, Any]]:
    with mock.patch.dict(SIZES, dim=64, n_layers=2, n_heads=4):
        return run_strategy(COUNTED, True), run_by_hand(COUNTED, True)


def test_a_step_communicates_what_the_loop_by_hand_does(pool):
    for ours, theirs in pool.run(2, both):
        assert ours["bytes"] == theirs["bytes"]
        assert set(ours["collectives"]) == set(theirs["collectives"]) == {"all_reduce"}
        # The loss sends the sum of exponentials and the target's logit in one message, not in two.
        assert ours["collectives"]["all_reduce"] == theirs["collectives"]["all_reduce"] - 1
        assert ours["parameters"] == theirs["parameters"]


def several() -> None:
    """Collectives of Python, functional ones, and those of DTensor in forward and backward."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.ones(3, 4, dtype=torch.float64)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.all_gather([torch.empty_like(x) for _ in range(2)], x)
    all_reduce(x, "sum", mesh.get_group()).wait()
    all_gather_tensor(x, 0, mesh.get_group()).wait()
    weight = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)]).requires_grad_()
    whole = (distribute_tensor(torch.ones(2, 4), mesh, [Replicate()]) @ weight).redistribute(placements=[Replicate()])
    (whole * whole).sum().backward()


def counted_twice() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    several()  # meshes and groups are made here, not below
    with count_collectives() as expected:
        several()
    with CollectiveBytes() as seen:
        several()
    return dict(expected), dict(seen.counts), dict(seen.bytes)


def test_counting_bytes_misses_no_collective(pool):
    for expected, counts, sizes in pool.run(2, counted_twice):
        assert counts == expected
        tensor = 3 * 4 * 8
        assert sizes["all_reduce"] == 2 * tensor
        assert sizes["all_gather"] == 2 * 2 * tensor + 2 * 6 * 4, "both lists of two, and the product"
