"""Losses: of each position on the part, summed over the ranks, divided by what all of them count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d.parallel.context.communication import reduce_sum
from lightning_4d.parallel.context.rules.align import Lead, aligned, broadcasts, lead_of
from lightning_4d.parallel.context.tensor import SequenceTensor, rule, wrap

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]


@rule(F.cross_entropy)
def cross_entropy(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Logits (N, C) or (N, C, T) with the sequence in N or T; targets as indices or probabilities."""
    return _classification(*args, **kwargs)


def _classification(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if not isinstance(input, SequenceTensor) or size_average is not None or reduce is not None or input.dim() < 2:
        return NotImplemented
    parts = _logits_and_targets(input, target)
    if parts is None:
        return NotImplemented
    logits, labels, is_index = parts

    def of_parts(how: str) -> Tensor:
        return F.cross_entropy(
            logits, labels, weight, ignore_index=ignore_index, reduction=how, label_smoothing=label_smoothing
        )

    count = (
        _count_indices(labels, weight, ignore_index)
        if is_index
        else labels.new_tensor(labels.numel() // logits.shape[1])
    )
    return _reduced(input, of_parts, reduction, count)


def _logits_and_targets(input: SequenceTensor, target: Any) -> tuple[Tensor, Tensor, bool] | None:
    """The parts, and whether targets are indices; None if the sequence is in the class dim or they do not fit."""
    dim = input.sharding.dim
    is_index = not target.is_floating_point()
    if dim == 1 or target.dim() != input.dim() - is_index:
        return None
    lead = Lead(input.sharding, target.dim() - (dim - (is_index and dim > 1)))
    if target.shape[target.dim() - lead.back] != input.sharding.size:
        return None
    return input.part, aligned(target, lead, "cross_entropy"), is_index


def _count_indices(labels: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What a mean divides by, as far as this rank's positions go."""
    valid = labels != ignore_index
    return valid.sum() if weight is None else weight[labels.where(valid, 0)].mul(valid).sum()


def _reduced(input: SequenceTensor, of_parts: Callable[[str], Tensor], reduction: str, count: Tensor) -> Any:
    groups = input.sharding.groups
    if reduction == "none":
        dim = input.sharding.dim
        return wrap(of_parts("none"), input.sharding.at(dim - (dim > 1)))
    if reduction == "sum":
        return reduce_sum(of_parts("sum"), groups)
    if reduction != "mean":
        return NotImplemented
    total = of_parts("sum")
    accurate = torch.promote_types(total.dtype, torch.float32)  # a half counts to 256 only
    both = reduce_sum(torch.stack((total.to(accurate), count.to(accurate))), groups)
    return (both[0] / both[1].detach()).to(total.dtype)


@rule(F.nll_loss)
def nll_loss(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """As cross_entropy, of log-probabilities."""
    return _nll(*args, **kwargs)


def _nll(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if not isinstance(input, SequenceTensor) or size_average is not None or reduce is not None or input.dim() < 2:
        return NotImplemented
    parts = _logits_and_targets(input, target)
    if parts is None:
        return NotImplemented
    logits, labels, _ = parts

    def of_parts(how: str) -> Tensor:
        return F.nll_loss(logits, labels, weight, ignore_index=ignore_index, reduction=how)

    return _reduced(input, of_parts, reduction, _count_indices(labels, weight, ignore_index))


@rule(
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.soft_margin_loss, F.poisson_nll_loss,
)  # fmt: skip
def elementwise_loss(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Of each element on the part, then summed or averaged over all."""
    reduction = kwargs.get("reduction", "mean")
    lead = lead_of((*args, *kwargs.values()))
    if lead is None or len(args) > 2 or kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return NotImplemented
    if func in (F.mse_loss, F.l1_loss) and kwargs.get("weight") is not None and reduction == "mean":
        return NotImplemented  # divided by the sum of the weights
    given = list(args)
    if not all(broadcasts(value, lead) for value in (*given, *kwargs.values())):
        return NotImplemented
    named = {k: aligned(v, lead, func.__name__) for k, v in kwargs.items() if k != "reduction"}
    each = lead.wrapped(func(*(aligned(v, lead, func.__name__) for v in given), reduction="none", **named))
    if reduction == "none":
        return each
    if reduction == "mean":
        return each.mean()
    if reduction == "sum":
        return each.sum()
    return each.sum() / given[0].shape[0] if reduction == "batchmean" else NotImplemented
