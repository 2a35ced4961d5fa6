"""What pipeline stages send of tensors that context- and tensor-parallel ranks hold parts of.

The state that goes from block to block is sent in parts: each rank sends what it holds to its peer in the next stage.
Both tell the form from the record of the step: a tensor of the size of the state is divided as the blocks divide it.
All else is sent whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lightning_4d.parallel.context import ContextParallel
from lightning_4d.parallel.pipeline.record import Hidden, TensorSpec
from lightning_4d.parallel.tensor import TensorParallel


class Crossings:
    """Packs and unpacks tensors for the way between stages.

    Args:
        context: what divides sequences on this module; None where nothing does.
        tensor: what divides layers on it; None where nothing does.
    """

    def __init__(self, context: ContextParallel | None, tensor: TensorParallel | None) -> None:
        self._context = context
        self._tensor = tensor

    def sent(self, spec: TensorSpec, hidden: Hidden | None) -> TensorSpec:
        """Describe what this rank sends of a tensor."""
        shape = list(spec.shape)
        dim = self._sequence_dim(spec, hidden)
        if dim is not None and self._context is not None:
            shape[dim] = self._context.local_length(shape[dim])
        if self._is_divided_by_layers(spec, hidden, shape) and self._tensor is not None:
            shape[-2] //= self._tensor.runtime.group.size
        return replace(spec, shape=tuple(shape))

    def pack(self, tensor: Tensor, spec: TensorSpec, hidden: Hidden | None) -> Tensor:
        """Return what is sent. Which ranks must call: all that hold parts of the tensor."""
        if self._context is not None:
            tensor = self._context.part_of(tensor, self._sequence_dim(spec, hidden))
        if self._tensor is not None:
            divided = self._is_divided_by_layers(spec, hidden, tensor.shape)
            tensor = self._tensor.part_of(tensor, tensor.dim() - 2 if divided else None)
        return tensor

    def unpack(self, tensor: Tensor, spec: TensorSpec, hidden: Hidden | None) -> Tensor:
        """Return the tensor of which ``tensor`` was sent."""
        dim = self._sequence_dim(spec, hidden)
        if self._tensor is not None:
            shape = list(spec.shape)
            if dim is not None and self._context is not None:
                shape[dim] = self._context.local_length(shape[dim])
            if self._is_divided_by_layers(spec, hidden, shape):
                tensor = self._tensor.shown(tensor, tensor.dim() - 2)
        if self._context is not None and dim is not None:
            tensor = self._context.shown(tensor, dim, spec.shape[dim])
        return tensor

    def divide(self, tensor: Tensor, spec: TensorSpec, hidden: Hidden | None) -> Tensor:
        """Return a whole tensor, equal on all ranks that hold parts of it, in the form that `unpack` returns."""
        return self.unpack(self.pack(tensor, spec, hidden), spec, hidden)

    def _sequence_dim(self, spec: TensorSpec, hidden: Hidden | None) -> int | None:
        """The dim that context-parallel ranks divide; None: the tensor is sent whole."""
        if self._context is None or hidden is None or not _is_like(spec, hidden.spec) or spec.shape[hidden.dim] < 2:
            return None
        return hidden.dim

    def _is_divided_by_layers(self, spec: TensorSpec, hidden: Hidden | None, shape: Sequence[int]) -> bool:
        """Whether tensor-parallel ranks hold parts of the sequence of a tensor of which this rank has ``shape``."""
        if self._tensor is None or not self._tensor.runtime.sequence_parallel or hidden is None:
            return False
        return _is_like(spec, hidden.spec) and shape[-2] % self._tensor.runtime.group.size == 0


def _is_like(spec: TensorSpec, state: TensorSpec) -> bool:
    return spec.shape == state.shape and spec.dtype.is_floating_point
