"""Products: linear layers, matrix products, embeddings, einsum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d import _torch_private as private
from lightning_4d.parallel.context.communication import cut, gather, reduce_sum, use_whole
from lightning_4d.parallel.context.report import report_gather
from lightning_4d.parallel.context.rules.align import aligned, lead_of
from lightning_4d.parallel.context.tensor import SequenceTensor, rule, wrap

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]


def _whole(value: Any, name: str) -> Any:
    if not isinstance(value, SequenceTensor):
        return value
    report_gather(name)
    return gather(value.part, value.sharding)


@rule(F.linear, private.NN_FUNCTIONS.linear)
def linear(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Each position by itself, with weights that all positions use."""
    return _linear(func, *args, **kwargs)


def _linear(func: Callable[..., Any], input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(input, SequenceTensor) or isinstance(weight, SequenceTensor) or isinstance(bias, SequenceTensor):
        return NotImplemented
    if input.sharding.dim == input.dim() - 1:
        return NotImplemented
    groups = input.sharding.groups
    weight, bias = use_whole(weight, groups), None if bias is None else use_whole(bias, groups)
    return wrap(func(input.part, weight, bias), input.sharding)


@rule(torch.addmm, torch.Tensor.addmm)
def addmm(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """A bias of each column, and a matrix of positions times one that all positions use."""
    if len(args) != 3:
        return NotImplemented
    bias, rows, columns = args
    if not isinstance(rows, SequenceTensor) or rows.sharding.dim != 0:
        return NotImplemented
    if isinstance(bias, SequenceTensor) or isinstance(columns, SequenceTensor) or bias.dim() != 1:
        return NotImplemented
    groups = rows.sharding.groups
    return wrap(func(use_whole(bias, groups), rows.part, use_whole(columns, groups), **kwargs), rows.sharding)


@rule(F.embedding, torch.embedding)
def embedding(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Rows of a table for each position."""
    ids, weight, *rest = _first(args, kwargs, "input", "weight")
    if func is not F.embedding or not isinstance(ids, SequenceTensor) or isinstance(weight, SequenceTensor):
        return NotImplemented
    named = {name: value for name, value in kwargs.items() if name not in ("input", "weight")}
    return wrap(func(ids.part, use_whole(weight, ids.sharding.groups), *rest, **named), ids.sharding)


@rule(F.one_hot)
def one_hot(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """A vector for each position; the number of classes must be given, else all positions decide it."""
    ids, *rest = args
    classes = rest[0] if rest else kwargs.get("num_classes", -1)
    return NotImplemented if classes < 0 else wrap(F.one_hot(ids.part, classes), ids.sharding)


def _first(args: Arguments, kwargs: Named, *names: str) -> list[Any]:
    """The first arguments, by place or by name, and the rest of those by place."""
    given = list(args)
    return [*given, *(kwargs[name] for name in names[len(given) :])]


# -------------------------------------------------------------------------------------------------- matrix products


@rule(
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.bmm, torch.Tensor.bmm,
    torch.mm, torch.Tensor.mm,
)  # fmt: skip
def matmul(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Rows, batches, or a sum over positions, by where the sequence is."""
    if kwargs or len(args) != 2 or any(arg.dim() < 2 for arg in args):
        return NotImplemented
    left, right = reversed(args) if func is torch.Tensor.__rmatmul__ else args
    place_left, place_right = (_place(x) for x in (left, right))
    if place_left == 1 and place_right == 2:
        return _sum_over_positions(left, right)
    if place_left is None or place_left == 1:
        return _columns_or_whole(left, right, place_left, place_right)
    if place_left == 2:  # rows: each with all columns
        right = use_whole(_whole(right, "matmul"), left.sharding.groups)
        if not _batch_is_whole(left, right):
            return NotImplemented
        return _back_from_right(left, torch.matmul(left.part, right), 2)
    return _batches(left, right, place_right)


def _place(x: Any) -> int | None:
    """Where the sequence is, counted from the right: 1 for columns, 2 for rows; None for plain tensors."""
    return x.dim() - x.sharding.dim if isinstance(x, SequenceTensor) else None


def _back_from_right(source: SequenceTensor, part: Tensor, back: int) -> SequenceTensor:
    return wrap(part, source.sharding.at(part.dim() - back))


def _batch_is_whole(left: SequenceTensor, right: Tensor) -> bool:
    return left.shape[-1] == right.shape[-2]


def _sum_over_positions(left: SequenceTensor, right: SequenceTensor) -> Any:
    """Columns of one, rows of the other: each rank adds up its positions, then the ranks do."""
    if not left.sharding.same_positions(right.sharding):
        return NotImplemented
    return reduce_sum(torch.matmul(left.part, right.part), left.sharding.groups)


def _columns_or_whole(left: Any, right: Any, place_left: int | None, place_right: int | None) -> Any:
    """All rows with this rank's columns, or its part of the batch; a sum over positions with a whole one gathers."""
    if place_left == 1 or place_right == 2:
        return NotImplemented
    if place_right == 1:
        if left.shape[-1] != right.shape[-2]:
            return NotImplemented
        return _back_from_right(right, torch.matmul(use_whole(left, right.sharding.groups), right.part), 1)
    return _batches(left, right, place_right)


def _batches(left: Any, right: Any, place_right: int | None) -> Any:
    """The sequence is among the batch dims of one of them: the other is brought in line."""
    if place_right is not None and place_right <= 2 and isinstance(left, SequenceTensor):
        right = _whole(right, "matmul")
    lead = lead_of((left, right))
    if lead is None or lead.back <= 2:
        return NotImplemented
    return lead.wrapped(torch.matmul(aligned(left, lead, "matmul"), aligned(right, lead, "matmul")))


@rule(torch.einsum)
def einsum(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """By the letter of the sequence: it stays, or is summed over."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    first = next(i for i, operand in enumerate(operands) if isinstance(operand, SequenceTensor))
    sharding = operands[first].sharding
    letter = terms[first][sharding.dim]
    if any(term.count(letter) > 1 for term in terms):
        return NotImplemented
    parts = [_operand(operand, term, letter, sharding) for operand, term in zip(operands, terms, strict=True)]
    result = func(equation, *parts)
    if letter in output:
        return wrap(result, sharding.at(output.index(letter)))
    return reduce_sum(result, sharding.groups)


def _operand(operand: Any, term: str, letter: str, sharding: Any) -> Tensor:
    if isinstance(operand, SequenceTensor):
        is_same = letter in term and operand.sharding.dim == term.index(letter)
        if is_same and operand.sharding.same_positions(sharding):
            return operand.part
        operand = _whole(operand, "einsum")
    if letter in term and operand.shape[term.index(letter)] != 1:
        return cut(operand, sharding.at(term.index(letter)))
    return use_whole(operand, sharding.groups)
