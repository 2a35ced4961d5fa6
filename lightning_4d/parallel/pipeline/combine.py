"""How the values of one leaf in all microbatches make its value for the whole batch.

A leaf's `kind` is its rule: `sum`, `mean` (weighted by `count`, the elements it averages), `max`, `min`, `norm` (of
order `order`), `var` and `std` (by their moments), `logsumexp`, `prod`; `equal` (the same in all microbatches),
`rows` (a mean over samples). `opaque` leaves come from an operation whose rule is not known: the probe finds one.
`mixed` leaves have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_4d.parallel.pipeline.scalars import Node

__all__ = ["LeafValue", "combine", "combine_numbers", "fits", "wide"]


@dataclass(slots=True)
class LeafValue:
    """One leaf in one microbatch.

    Attributes:
        kind: The rule by which it combines.
        value: What the operation returned, with its autograd graph until `detach`.
        name: The operation, for messages.
        differentiable: Whether the gradient of the loss may flow through it.
        count: How many elements a mean averages; 0 makes it no part of the batch's value.
        order: Of a norm; the correction (Bessel's: 1) of a variance.
        mean: Of the elements, beside a variance.
        origin: How the value is made of the batch's entries alone, if it is.
        guard: Zero is a legal value of the whole batch although something is divided by it: gradients are then zero,
            not nan.
    """

    kind: str
    value: Tensor
    name: str
    differentiable: bool = False
    count: int = 0
    order: float = 0.0
    mean: Tensor | None = None
    origin: Node | None = None
    guard: bool = False

    def detach(self) -> None:
        """Let go of the graph."""
        self.value = self.value.detach()


def wide(value: Tensor) -> Tensor:
    """`value` in at least fp32, in which values are combined; integers stay integers."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def combine(parts: Sequence[LeafValue], sizes: Sequence[int], kind: str | None = None) -> Tensor:
    """The batch's value of a leaf.

    Args:
        parts: The leaf in every microbatch.
        sizes: The rows of every microbatch.
        kind: The rule in place of the leaf's own, for opaque leaves.

    Returns:
        A tensor of the leaf's shape, in at least fp32. Nothing is read from the device.
    """
    values = [wide(part.value.detach()) for part in parts]
    kind = kind or parts[0].kind
    if kind == "mean":
        return _mean(values, [part.count for part in parts])
    if kind == "rows":
        return _mean(values, sizes)
    if kind in ("var", "std"):
        return _variance(parts, values, kind)
    if kind == "norm":
        return _norm(values, parts[0].order)
    return _SIMPLE[kind](torch.stack(values))


def _stack_max(stacked: Tensor) -> Tensor:
    return stacked.any(0) if stacked.dtype == torch.bool else stacked.amax(0)


def _stack_min(stacked: Tensor) -> Tensor:
    return stacked.all(0) if stacked.dtype == torch.bool else stacked.amin(0)


_SIMPLE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "max": _stack_max,
    "min": _stack_min,
    "prod": lambda stacked: stacked.prod(0),
    "logsumexp": lambda stacked: stacked.logsumexp(0),
    "equal": lambda stacked: stacked[0],
}


def _mean(values: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    total = sum(counts)
    used = [(value, count) for value, count in zip(values, counts) if count]
    if not used:
        return values[0]
    if all(count == used[0][1] for _, count in used):
        return torch.stack([value for value, _ in used]).mean(0)
    return torch.stack([value * (count / total) for value, count in used]).sum(0)


def _norm(values: Sequence[Tensor], order: float) -> Tensor:
    stacked = torch.stack(list(values))
    if math.isinf(order):
        return stacked.amax(0) if order > 0 else stacked.amin(0)
    return torch.linalg.vector_norm(stacked, order, dim=0)


def _variance(parts: Sequence[LeafValue], values: Sequence[Tensor], kind: str) -> Tensor:
    """Chan's combination of the parts' means and sums of squared deviations."""
    counts = [part.count for part in parts]
    correction = parts[0].order
    means = [wide(part.mean.detach()) for part in parts if part.mean is not None]
    mean = _mean(means, counts)
    squares = torch.zeros_like(mean)
    for value, part_mean, count in zip(values, means, counts):
        variance = value if kind == "var" else value * value
        if count > correction:  # below that the part's own variance is nan and its sum of squares is zero
            squares = squares + variance * (count - correction)
        squares = squares + (part_mean - mean) ** 2 * count
    variance = squares / (sum(counts) - correction)
    return variance if kind == "var" else variance.sqrt()


def combine_numbers(kind: str, values: Sequence[float], sizes: Sequence[int]) -> float:
    """The batch's value of a Python number by one of the rules `equal`, `sum`, `rows`, `max`, `min`."""
    if kind == "equal":
        return values[0]
    if kind == "rows":
        return sum(v * n for v, n in zip(values, sizes)) / sum(sizes)
    return {"sum": sum, "max": max, "min": min}[kind](values)


def fits(given: Tensor | float, expected: Tensor | float, tolerance: float) -> bool:
    """Whether two values agree relative to their size; nan agrees with nan. Reads the device: for set-up only."""
    a = torch.as_tensor(given).detach().double().cpu()
    b = torch.as_tensor(expected).detach().double().cpu()
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-3, equal_nan=True)
