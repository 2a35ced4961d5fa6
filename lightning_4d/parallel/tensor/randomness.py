"""Dropout on parts: masks are independent between the ranks' parts, and the ranks' generators stay equal.

Ranks that share a model draw the same numbers for plain tensors, so that they hold the same values. On a part each rank
needs numbers of its own. On the CPU the mask of the whole tensor is drawn and cut, which is one process's mask bit for
bit. Elsewhere that would cost memory and time, so a part's mask comes from a generator of its own, seeded by the common
one and the rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d._torch_private import is_fake
from lightning_4d.parallel.parts import empty_as_whole
from lightning_4d.parallel.tensor.group import TensorGroup
from lightning_4d.parallel.tensor.sharded import Sharded


def dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.dropout, torch.dropout and their relatives on a part."""
    value, p, training = _arguments(*args, **kwargs)
    if type(value) is not Sharded:
        return NotImplemented
    if not training or p == 0.0:
        return value
    if func not in (F.dropout, torch.dropout):
        return NotImplemented  # whole channels, in place, or with other statistics: on the whole tensor
    if p == 1.0:
        return value * 0.0
    if value.device.type == "cpu":
        kept = own_mask(value.runtime.group, value.shape, value.split_dim, 1 - p, value.local, value.parts)
        return value.like(value.local * kept.div(1 - p))
    with own_generator(value.runtime.group, value.device):
        return value.like(F.dropout(value.local, p, training=True))


def _arguments(
    input: Any, p: float = 0.5, train: bool = True, inplace: bool = False, training: bool | None = None
) -> tuple[Any, float, bool]:
    return input, p, train if training is None else training


def own_mask(
    group: TensorGroup,
    shape: Sequence[int],
    dim: int,
    kept: float,
    part: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    """This rank's part of the mask of a whole tensor, 1.0 where it is kept: what one process draws on the CPU.

    Args:
        group: the ranks that each take their part.
        shape: of the whole tensor.
        dim: the divided dim.
        kept: the probability of 1.0.
        part: what the mask is for, if that may be transposed: noise is drawn in the order of memory.
        parts: of the divided dim.
    """
    whole = torch.empty(tuple(shape), device="cpu") if part is None else empty_as_whole(shape, part)
    return group.cut(whole.bernoulli_(kept), dim, parts)


@contextlib.contextmanager
def own_generator(group: TensorGroup, device: torch.device) -> Iterator[None]:
    """Draw this rank's own numbers inside; afterwards the common generators go on, equal on all ranks.

    Which ranks must call: all of the group.
    """
    drawn = torch.randint(2**62, (), device="cpu")
    if is_fake(drawn):  # no numbers are drawn in a run on fake tensors
        yield
        return
    seed = int(drawn) + group.rank
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed) if device.type != "cuda" else torch.cuda.manual_seed(seed)
        yield
