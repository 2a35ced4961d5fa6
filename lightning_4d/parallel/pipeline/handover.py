"""Hand the gradients that a schedule made over to the backward that comes later.

A trainer runs a step, clears gradients, and then runs the backward of the loss. A schedule has made the gradients
within the step. They are set aside, and the loss that the step returns has a backward that delivers them, multiplied by
whatever the trainer did to the loss in between: a division by accumulation steps, a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_4d._torch_private import multiply_all

Gradients = dict[Tensor, Tensor]


def take_gradients(leaves: Iterable[Tensor]) -> Gradients:
    """Return the gradients of ``leaves``, and leave none."""
    taken: Gradients = {}
    for leaf in leaves:
        if leaf.grad is not None:
            taken[leaf] = leaf.grad
            leaf.grad = None
    return taken


def give_gradients(gradients: Mapping[Tensor, Tensor]) -> None:
    """Add ``gradients`` to those that the leaves have."""
    for leaf, gradient in gradients.items():
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


@torch.no_grad()
def scale_gradients(gradients: Mapping[Tensor, Tensor], factor: Tensor) -> None:
    """Multiply gradients by a 0-d tensor, in place, where it is not known to be 1 without waiting for a device."""
    if factor.device.type == "cpu" and factor.item() == 1:
        return
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients.values():
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), tensors in by_kind.items():
        multiply_all(tensors, factor.to(device=device, dtype=dtype))


def loss_with_backward(value: Tensor, deliver: Callable[[Tensor], None]) -> Tensor:
    """Return a loss of this value whose backward calls ``deliver`` with the loss's own gradient (0-d), once."""
    anchor = torch.zeros((), device=value.device, requires_grad=True)
    with torch.enable_grad():
        return _HandOver.apply(anchor, value.detach(), deliver)  # pyright: ignore[reportReturnType]


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, deliver: Callable[[Tensor], None]) -> Tensor:
        ctx.deliver = deliver
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.deliver(gradients[0])
        return None, None, None
