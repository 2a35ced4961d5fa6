"""The table of operations that reduce all rows of a microbatch to one value, each with its rule of combination.

`RULES[func](leaves, args, kwargs)` runs the operation, registers the leaves it made with `leaves` and returns its
result, or returns None when this call is no such reduction (a reduction over some dims, `reduction="none"`, a rule we
do not know).

A mean over valid targets (`F.cross_entropy` with `ignore_index` or class weights) is two leaves: the sum over
targets, and the sum of their weights. The gradient starts from the former, so a microbatch without any valid target
gives zeros, not 0/0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d.parallel.pipeline.combine import LeafValue

__all__ = ["NO_RULE", "RULES", "Leaves", "Rule"]


class Leaves(Protocol):
    """What the rules need of a trace."""

    def leaf(self, leaf: LeafValue, made_by: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None) -> Tensor:
        """Register a leaf, the result of `made_by` (function and arguments); returns its value."""
        ...

    def operation(self, func: Callable[..., Any], *args: Any) -> Tensor:
        """Run an operation on registered values and make it part of the program."""
        ...


Rule = Callable[[Leaves, Callable[..., Any], tuple[Any, ...], dict[str, Any]], "Tensor | None"]


def _bind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name; not by ``Signature.bind``, which takes longer than a small loss itself."""
    names, defaults = _SIGNATURES[func]
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


# --- reductions of one tensor ---------------------------------------------------------------------------------------


def _dims(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int) -> Any:
    for name in ("dim", "axis"):
        if name in kwargs:
            return kwargs[name]
    return args[place] if len(args) > place else None


def _covers(x: Tensor, dims: Any) -> bool:
    """Whether a reduction over `dims` (None: all) leaves nothing of x."""
    if dims is None or dims == ():
        return True
    dims = (dims,) if isinstance(dims, int) else dims
    try:
        return len({d % max(x.ndim, 1) for d in dims}) == x.ndim
    except TypeError:  # named dims, or a bool in this place of an overload that we do not know
        return False


def _input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return args[0] if args else kwargs["input"]


def _reduction(kind: str) -> Rule:
    def rule(leaves: Leaves, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        x = _input(args, kwargs)
        if not _covers(x, _dims(args, kwargs, 1)):
            return None
        return leaves.leaf(LeafValue(kind, func(*args, **kwargs), func.__name__, count=x.numel()), (func, args, kwargs))

    return rule


def _extremum(kind: str) -> Rule:
    """`max`, `min`: over all dims they return a tensor, over one of them values and indices."""

    def rule(leaves: Leaves, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if len(args) + len(kwargs) > 1:
            return None
        return leaves.leaf(LeafValue(kind, func(*args, **kwargs), func.__name__))

    return rule


def _norm(leaves: Leaves, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    x = _input(args, kwargs)
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else 2))
    order = 2 if order is None or (order == "fro") else order
    is_matrix_norm = func is torch.linalg.norm and x.ndim > 1 and kwargs.get("ord", args[1:2] or None) is not None
    if isinstance(order, str) or is_matrix_norm or not _covers(x, _dims(args, kwargs, 2)):
        return None
    return leaves.leaf(LeafValue("norm", func(*args, **kwargs), func.__name__, order=float(order)))


def _variance(kind: str) -> Rule:
    def rule(leaves: Leaves, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        x = _input(args, kwargs)
        second = args[1] if len(args) > 1 else None
        unbiased = kwargs.get("unbiased", second if isinstance(second, bool) else True)
        correction = kwargs.get("correction", int(unbiased))
        if len(args) > 2 or not _covers(x, None if isinstance(second, bool) else _dims(args, kwargs, 1)):
            return None
        value = func(*args, **kwargs)
        mean = x.detach().mean().expand(value.shape)
        correction = 1.0 if correction is None else float(correction)
        return leaves.leaf(LeafValue(kind, value, func.__name__, count=x.numel(), order=correction, mean=mean))

    return rule


def _nanmean(leaves: Leaves, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    x = _input(args, kwargs)
    if not _covers(x, _dims(args, kwargs, 1)):
        return None
    total = leaves.leaf(LeafValue("sum", torch.nansum(*args, **kwargs), "nanmean"))
    valid = x.detach().isnan().logical_not().sum(dtype=total.dtype).expand(total.shape)
    return leaves.operation(
        torch.div, total, leaves.leaf(LeafValue("sum", valid, "number of valid elements", guard=True))
    )


def _dot(leaves: Leaves, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    result = func(*args, **kwargs)
    return leaves.leaf(LeafValue("sum", result, func.__name__)) if result.ndim == 0 else result


# --- losses ---------------------------------------------------------------------------------------------------------


def _elements(given: dict[str, Any], names: tuple[str, ...]) -> int:
    return torch.broadcast_shapes(*(given[name].shape for name in names)).numel()


def _rows(given: dict[str, Any], names: tuple[str, ...]) -> int:
    first = given[names[0]]
    return first.shape[0] if first.ndim > 1 else 1


def _loss(count: Callable[[dict[str, Any], tuple[str, ...]], int], *names: str) -> Rule:
    """A loss that is, by its `reduction`, the mean over `count` elements or their sum."""

    def rule(leaves: Leaves, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        given = _bind(func, args, kwargs)
        reduction = given.get("reduction", "mean")
        if given.get("size_average") is not None or given.get("reduce") is not None:
            return None
        if "size_average" in given and reduction == "mean" and func in _WEIGHTED and given.get("weight") is not None:
            return None  # divided by the sum of the weights
        value = func(*args, **kwargs)
        if reduction == "sum":
            return leaves.leaf(LeafValue("sum", value, func.__name__))
        if reduction == "batchmean":
            return leaves.leaf(LeafValue("mean", value, func.__name__, count=max(given[names[0]].shape[0], 0)))
        if reduction == "mean":
            return leaves.leaf(LeafValue("mean", value, func.__name__, count=count(given, names)))
        return value if value.ndim else None

    return rule


def _classification(
    leaves: Leaves, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """`F.cross_entropy` and `F.nll_loss`: the mean over targets is weighted by class, without the ignored ones."""
    given = _bind(func, args, kwargs)
    reduction = given["reduction"]
    if given["size_average"] is not None or given["reduce"] is not None or reduction not in ("mean", "sum"):
        return None
    if reduction == "sum":
        return leaves.leaf(LeafValue("sum", func(*args, **kwargs), func.__name__))
    scores, target = given["input"], given["target"]
    if target.is_floating_point():  # probabilities: the mean over samples, whatever the class weights
        count = target.numel() // max(target.shape[-1 if target.ndim == 1 else 1], 1)
        return leaves.leaf(LeafValue("mean", func(*args, **kwargs), func.__name__, count=count))
    narrow = scores.dtype in (torch.float16, torch.bfloat16)
    if narrow:  # a sum over targets leaves fp16's range, and its gradient's one factor would be rounded to 8 bits
        given["input"] = scores.float()
        given["weight"] = None if given["weight"] is None else given["weight"].float()
    total = leaves.leaf(LeafValue("sum", func(**{**given, "reduction": "sum"}), func.__name__))
    arguments = (target, given["weight"], given["ignore_index"], total.dtype)
    valid = LeafValue("sum", _target_weight(*arguments), "number of valid targets", guard=True)
    mean = leaves.operation(torch.div, total, leaves.leaf(valid, (_target_weight, arguments, {})))
    if narrow and not torch.is_autocast_enabled(scores.device.type):
        return leaves.operation(Tensor.to, mean, scores.dtype)
    return mean


def _linear_classification(
    leaves: Leaves, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """`F.linear_cross_entropy`: the head and the loss in one."""
    given = _bind(func, args, kwargs)
    target, reduction = given["target"], given["reduction"]
    if target.is_floating_point() or reduction not in ("mean", "sum"):
        return None
    total = leaves.leaf(LeafValue("sum", func(**{**given, "reduction": "sum"}), func.__name__))
    if reduction == "sum":
        return total
    ignored = -100 if given["ignore_index"] is None else given["ignore_index"]
    arguments = (target, given["weight"], ignored, total.dtype)
    valid = LeafValue("sum", _target_weight(*arguments), "number of valid targets", guard=True)
    mean = leaves.operation(torch.div, total, leaves.leaf(valid, (_target_weight, arguments, {})))
    return mean if mean.dtype == total.dtype else leaves.operation(Tensor.to, mean, total.dtype)


def _target_weight(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The number of valid targets, or the sum of the weights of their classes: 0-d, in at least fp32."""
    dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    valid = target != ignore_index
    if weight is None:
        return valid.sum(dtype=dtype)
    return weight.detach().to(dtype)[target.where(valid, 0)].mul(valid).sum()


_PAIR = ("input", "target")
_WEIGHTED = {F.mse_loss, F.l1_loss}
_LOSSES: dict[Callable[..., Any], Rule] = {
    F.mse_loss: _loss(_elements, *_PAIR),
    F.l1_loss: _loss(_elements, *_PAIR),
    F.smooth_l1_loss: _loss(_elements, *_PAIR),
    F.huber_loss: _loss(_elements, *_PAIR),
    F.binary_cross_entropy: _loss(_elements, *_PAIR),
    F.binary_cross_entropy_with_logits: _loss(_elements, *_PAIR),
    F.kl_div: _loss(_elements, *_PAIR),
    F.soft_margin_loss: _loss(_elements, *_PAIR),
    F.hinge_embedding_loss: _loss(_elements, *_PAIR),
    F.poisson_nll_loss: _loss(_elements, *_PAIR),
    F.gaussian_nll_loss: _loss(_elements, *_PAIR),
    F.margin_ranking_loss: _loss(_elements, "input1", "input2", "target"),
    F.multilabel_margin_loss: _loss(_rows, *_PAIR),
    F.multilabel_soft_margin_loss: _loss(_rows, *_PAIR),
    F.multi_margin_loss: _loss(_rows, *_PAIR),
    F.cosine_embedding_loss: _loss(_rows, "input1", "input2"),
    F.triplet_margin_loss: _loss(_rows, "anchor", "positive"),
    F.triplet_margin_with_distance_loss: _loss(_rows, "anchor", "positive"),
    F.cross_entropy: _classification,
    F.nll_loss: _classification,
}
if hasattr(F, "linear_cross_entropy"):  # torch 2.13
    _LOSSES[F.linear_cross_entropy] = _linear_classification


def _signature(func: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    parameters = inspect.signature(func).parameters
    return tuple(parameters), {n: p.default for n, p in parameters.items() if p.default is not p.empty}


_SIGNATURES = {func: _signature(func) for func in _LOSSES}


def _table() -> dict[Callable[..., Any], Rule]:
    by_name = {
        "sum": _reduction("sum"),
        "nansum": _reduction("sum"),
        "count_nonzero": _reduction("sum"),
        "mean": _reduction("mean"),
        "amax": _reduction("max"),
        "amin": _reduction("min"),
        "any": _reduction("max"),
        "all": _reduction("min"),
        "prod": _reduction("prod"),
        "logsumexp": _reduction("logsumexp"),
        "max": _extremum("max"),
        "min": _extremum("min"),
        "norm": _norm,
        "var": _variance("var"),
        "std": _variance("std"),
        "nanmean": _nanmean,
        "dot": _dot,
        "vdot": _dot,
        "inner": _dot,
    }
    table = dict(_LOSSES)
    for name, rule in by_name.items():
        for owner in (torch, Tensor):
            if hasattr(owner, name):
                table[getattr(owner, name)] = rule
    return table | {torch.linalg.norm: _norm, torch.linalg.vector_norm: _norm}


RULES: dict[Callable[..., Any], Rule] = _table()

NO_RULE = frozenset(["median", "nanmedian", "quantile", "nanquantile", "mode", "kthvalue", "corrcoef", "cov", "cdist"])
"""Reductions known to have no rule: their value in parts of a batch does not tell the batch's."""
