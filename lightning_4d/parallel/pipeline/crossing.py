"""How tensors cross from stage to stage: what is sent of them, where ranks hold parts of them along other axes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lightning_4d.parallel.pipeline.record import Hidden, TensorSpec


class Crossing(Protocol):
    """Between a tensor as the user's code sees it and what one rank sends of it to its peer in the next stage.

    Both sides know the form of what is sent from the record alone.
    """

    def sent(self, spec: TensorSpec, hidden: Hidden | None) -> TensorSpec:
        """Describe what this rank sends of a tensor."""
        ...

    def pack(self, tensor: Tensor, spec: TensorSpec, hidden: Hidden | None) -> Tensor:
        """Return what is sent: a plain tensor. Which ranks must call: all that hold parts of the tensor."""
        ...

    def unpack(self, tensor: Tensor, spec: TensorSpec, hidden: Hidden | None) -> Tensor:
        """Return the tensor of which ``tensor`` was sent."""
        ...

    def divide(self, tensor: Tensor, spec: TensorSpec, hidden: Hidden | None) -> Tensor:
        """Return a whole tensor, equal on all ranks that hold parts of it, in the form that `unpack` returns."""
        ...


class Whole:
    """No other axis divides tensors: they are sent as they are."""

    def sent(self, spec: TensorSpec, hidden: Hidden | None) -> TensorSpec:
        """The same."""
        return spec

    def pack(self, tensor: Tensor, spec: TensorSpec, hidden: Hidden | None) -> Tensor:
        """The same."""
        return tensor

    unpack = divide = pack
