"""Which dim of a parameter FSDP2 shards, where it is divided over another axis already."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lightning_4d._torch_private import strided_shard_parts


def shard_placement(parameter: nn.Parameter, size: int) -> Shard | None:
    """Return the dim to shard over ``size`` data-parallel ranks; None if no dim gives what DTensor can describe.

    The first dim, as FSDP2 does by itself, unless another axis divides it in parts (a fused projection), or into
    shares that do not divide again: then the second.
    """
    if not isinstance(parameter, DTensor):
        return Shard(0)
    in_parts = {p.dim for p in parameter.placements if strided_shard_parts(p) is not None}  # pyright: ignore[reportAttributeAccessIssue]
    divided = {p.dim for p in parameter.placements if isinstance(p, Shard)} - in_parts
    local = parameter.to_local().shape
    if 0 not in divided | in_parts or (0 in divided and local[0] % size == 0):
        return Shard(0)
    return Shard(1) if len(local) > 1 and 1 not in in_parts and local[1] % size == 0 else None
