"""Tensors whose local part is several pieces of the whole, for ``torch.distributed.checkpoint``.

A fused weight (queries, keys and values in one) that is divided over tensor-parallel ranks by parts holds a share of
each part. Torch's checkpoints take a DTensor's local part for one block of the whole; here each piece is written and
read by itself, so that the file holds the whole tensor as any layout does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from lightning_4d._torch_private import strided_shard_parts


@contextlib.contextmanager
def in_pieces(state: Any) -> Iterator[None]:
    """Inside, nested dicts and lists hold an object that knows its pieces in place of each such DTensor.

    It shares the DTensor's memory, so what is read into it is there afterwards.
    """
    replaced = list(_find(state))
    for container, key, tensor in replaced:
        container[key] = PiecewiseTensor(tensor)
    try:
        yield
    finally:
        for container, key, tensor in replaced:
            container[key] = tensor


def _find(container: Any) -> Iterator[tuple[Any, Any, DTensor]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in list(items):
        if isinstance(value, DTensor) and _parts_axis(value) is not None:
            yield container, key, value
        elif isinstance(value, (dict, list)):
            yield from _find(value)


def _parts_axis(tensor: DTensor) -> int | None:
    """The mesh axis over which a dim is divided by parts; None if the local part is one block.

    FSDP2 describes its sharding of a dim that another axis divides in the same words; there the other axis makes one
    block of it.
    """
    for axis, placement in enumerate(tensor.placements):
        parts = strided_shard_parts(placement)
        if parts is None:
            continue
        dim = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
        inner = [i for i in range(axis + 1, len(tensor.placements)) if tensor.placements[i].is_shard(dim)]
        if parts != math.prod(tensor.device_mesh.size(i) for i in inner):
            return axis
    return None


class PiecewiseTensor(Tensor):
    """This rank's pieces of a whole tensor, with what ``torch.distributed.checkpoint`` asks of it."""

    _shape: torch.Size
    _pieces: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls: type[PiecewiseTensor], tensor: DTensor) -> PiecewiseTensor:
        """Share the memory of ``tensor``'s local part."""
        local = tensor.to_local().detach()
        made = local.as_subclass(cls)
        made._shape = tensor.shape
        made._pieces = _pieces(tensor, local)
        return made

    def size(self, dim: int | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of the whole tensor."""
        return self._shape if dim is None else self._shape[dim]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(next(iter(self._pieces.values())))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, piece.shape) for offset, piece in self._pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._pieces[index.offset]


def _pieces(tensor: DTensor, local: Tensor) -> dict[torch.Size, Tensor]:
    """The pieces of the local part by their offset in the whole; every other divided dim is in equal shares."""
    axis = _parts_axis(tensor)
    assert axis is not None
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    offset = [0] * tensor.ndim
    for other, placement in enumerate(tensor.placements):
        if other != axis and not placement.is_replicate():
            dim = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
            offset[dim] += coordinate[other] * local.shape[dim]
    split: Any = tensor.placements[axis]
    parts = int(strided_shard_parts(split) or 1)
    length = local.shape[split.dim] // parts
    pieces = {}
    for part in range(parts):
        at = list(offset)
        at[split.dim] = (part * mesh.size(axis) + coordinate[axis]) * length
        pieces[torch.Size(at)] = local.narrow(split.dim, part * length, length)
    return pieces
