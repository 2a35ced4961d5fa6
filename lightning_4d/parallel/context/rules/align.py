"""Bring the arguments of an operation that broadcasts to parts of the same positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_4d.parallel.context.communication import Sharding, cut, gather, use_whole
from lightning_4d.parallel.context.report import report_gather
from lightning_4d.parallel.context.tensor import SequenceTensor, wrap


class Lead(NamedTuple):
    """The sequence that others are brought in line with: ``back`` dims from the right end."""

    sharding: Sharding
    back: int

    def wrapped(self, part: Tensor) -> SequenceTensor:
        """Show the result of an operation on parts as a whole."""
        return wrap(part, self.sharding.at(part.dim() - self.back))


def lead_of(values: Iterable[Any]) -> Lead | None:
    """The first SequenceTensor's; None if there is none."""
    for value in values:
        if isinstance(value, SequenceTensor):
            return Lead(value.sharding, value.dim() - value.sharding.dim)
    return None


def aligned(value: Any, lead: Lead, name: str) -> Any:
    """The part of ``value`` that meets the lead's part; what is no tensor, or has one size for all positions, as it is.

    A sequence in another dim is gathered; a plain tensor with the whole length where the lead's sequence is, is cut.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, SequenceTensor):
        if value.dim() - value.sharding.dim == lead.back and value.sharding.same_positions(lead.sharding):
            return value.part
        report_gather(name)
        value = gather(value.part, value.sharding)
    dim = value.dim() - lead.back
    if dim >= 0 and value.shape[dim] == lead.sharding.size:
        return cut(value, lead.sharding.at(dim))
    return use_whole(value, lead.sharding.groups)


def broadcasts(value: Any, lead: Lead) -> bool:
    """Whether ``value`` can meet the lead: torch itself explains best why not, on whole tensors."""
    if not isinstance(value, Tensor) or value.dim() < lead.back:
        return True
    return value.shape[value.dim() - lead.back] in (1, lead.sharding.size)
