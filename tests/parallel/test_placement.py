"""FSDP2 shards a dim that no other axis divides in parts: else a DTensor would describe another tensor."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_4d._torch_private import strided_shard
from lightning_4d.parallel.data.placement import shard_placement

CASES = {
    "plain": (None, (4, 6), Shard(0)),
    "rows divided": (Shard(0), (4, 6), Shard(0)),
    "rows divided, odd shares": (Shard(0), (3, 6), Shard(1)),
    "columns divided": (Shard(1), (4, 6), Shard(0)),
    "rows in parts": (strided_shard(0, 3), (6, 4), Shard(1)),
    "columns in parts": (strided_shard(1, 3), (4, 6), Shard(0)),  # a fused projection that keeps inputs in rows
    "a bias in parts": (strided_shard(0, 3), (6,), None),
}


def placements() -> dict[str, object]:
    mesh = init_device_mesh("cpu", (1,))
    found = {}
    for name, (placement, shape, _) in CASES.items():
        parameter = torch.zeros(shape)
        if placement is not None:
            parameter = DTensor.from_local(parameter, mesh, [placement], run_check=False)
        found[name] = shard_placement(nn.Parameter(parameter), 2)
    return found


def test_dim_that_is_sharded(pool):
    assert pool.run(1, placements)[0] == {name: expected for name, (_, _, expected) in CASES.items()}
