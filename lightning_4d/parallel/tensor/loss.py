"""Cross-entropy on logits whose classes are in parts, without gathering them.

Two all-reduces in forward (the largest logit; then sums of exponentials, the target's logit and, for label smoothing,
the sum of all logits, in one message), none in backward.

Shape suffixes: N targets, V this rank's classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_4d.parallel.tensor.group import Backward, TensorGroup
from lightning_4d.parallel.tensor.sharded import Sharded, rule


class _LogProbabilities(torch.autograd.Function):
    """Of the targets, and the weighted sum over all classes: (N,) each, equal on all ranks.

    ``logits_NV`` are this rank's. ``target_N`` counts all classes; a negative one takes no part in the first result.
    ``weight_V`` is this rank's part of the weights in the sum, or None for no sum.
    """

    @staticmethod
    def forward(
        ctx: Backward, logits_NV: Tensor, target_N: Tensor, weight_V: Tensor | None, group: TensorGroup
    ) -> tuple[Tensor, Tensor]:
        classes = logits_NV.shape[1]
        largest_N1 = group.all_reduce(logits_NV.amax(dim=1, keepdim=True), "largest logit", op=dist.ReduceOp.MAX)
        shifted_NV = logits_NV - largest_N1
        exponential_NV = shifted_NV.exp()
        own_N = target_N - group.rank * classes
        elsewhere_N = (own_N < 0) | (own_N >= classes)
        own_N = own_N.masked_fill(elsewhere_N, 0)
        hit_N = shifted_NV.gather(1, own_N.unsqueeze(1)).squeeze(1).masked_fill(elsewhere_N, 0.0)
        sums = [exponential_NV.sum(dim=1), hit_N]
        if weight_V is not None:
            sums.append(shifted_NV @ weight_V)
            sums.append(weight_V.sum().expand_as(hit_N))
        reduced = group.all_reduce(torch.stack(sums), "cross-entropy")
        log_total_N = reduced[0].log()
        probability_NV = exponential_NV.div_(reduced[0].unsqueeze(1))
        ctx.save_for_backward(probability_NV, own_N, elsewhere_N, *(() if weight_V is None else (weight_V, reduced[3])))
        of_target_N = reduced[1] - log_total_N
        if weight_V is None:
            return of_target_N, torch.zeros_like(of_target_N)
        return of_target_N, reduced[2] - reduced[3] * log_total_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Backward, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_target_N, of_sum_N = gradients
        probability_NV, own_N, elsewhere_N, *weights = ctx.saved_tensors
        total_N = of_target_N
        if weights:
            total_N = of_target_N + of_sum_N * weights[1]
        gradient_NV = probability_NV * -total_N.unsqueeze(1)
        if weights:
            gradient_NV.addcmul_(of_sum_N.unsqueeze(1), weights[0].unsqueeze(0))
        hits_N = of_target_N.masked_fill(elsewhere_N, 0.0)
        gradient_NV.scatter_add_(1, own_N.unsqueeze(1), hits_N.unsqueeze(1))
        return gradient_NV, None, None, None


@rule(F.cross_entropy)
def _cross_entropy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def arguments(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> tuple[Any, Any, Any, int, str, float, bool]:
        old = size_average is not None or reduce is not None
        return input, target, weight, ignore_index, reduction, label_smoothing, old

    logits, target, weight, ignored, reduction, smoothing, old = arguments(*args, **kwargs)
    if old or type(logits) is not Sharded or type(target) is Sharded or type(weight) is Sharded:
        return NotImplemented
    class_dim = 0 if logits.dim() == 1 else 1
    if logits.split_dim != class_dim or logits.parts != 1 or target.is_floating_point():
        return NotImplemented
    if weight is not None and weight.requires_grad:
        return NotImplemented
    _check_targets(target, ignored, logits.split_size)
    local = logits.local if logits.dim() > 1 else logits.local.unsqueeze(0)
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()  # as F.cross_entropy under autocast
    local_NV = local.movedim(1, -1).reshape(-1, local.shape[1])
    loss_N, divisor = _losses(logits.runtime.group, local_NV, target.reshape(-1), weight, ignored, smoothing)
    if reduction == "none":
        return loss_N.view(target.shape)
    return loss_N.sum() if reduction == "sum" else loss_N.sum() / divisor


def _check_targets(target: Tensor, ignored: int, classes: int) -> None:
    """As F.cross_entropy does on the CPU; on CUDA it would cost a synchronisation."""
    if target.device.type == "cpu" and target.numel() > 0 and type(target) is Tensor:
        valid = (target == ignored) | ((target >= 0) & (target < classes))
        if not bool(valid.all()):
            bad = int(target[~valid].flatten()[0])
            raise IndexError(f"Target {bad} is out of bounds.")


def _losses(
    group: TensorGroup, logits_NV: Tensor, target_N: Tensor, weight: Tensor | None, ignored: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The loss of each target, 0 where it is ignored, and what their mean divides by."""
    valid_N = target_N != ignored
    target_N = target_N.masked_fill(~valid_N, 0)
    classes = logits_NV.shape[1] * group.size
    weight_V = None
    if smoothing > 0.0:
        ones = torch.ones(classes, dtype=logits_NV.dtype, device=logits_NV.device)
        weight_V = group.cut(ones if weight is None else weight.to(logits_NV.dtype), 0).contiguous()
    both: Any = _LogProbabilities.apply(logits_NV, target_N, weight_V, group)
    of_target_N, of_all_N = both
    factor_N = valid_N.to(logits_NV.dtype)
    if weight is not None:
        factor_N = factor_N * weight.to(logits_NV.dtype)[target_N]
    loss_N = -of_target_N * factor_N
    if smoothing > 0.0:
        loss_N = (1 - smoothing) * loss_N - smoothing / classes * of_all_N * valid_N
    return loss_N, factor_N.sum()
