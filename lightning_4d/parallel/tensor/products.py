"""Rules for matrix products: where the input is shared, where the output is in parts, where summands are added up.

*Column-wise*: the weight's output features are divided; the input is plain, the output in parts. *Row-wise*: the
weight's input features are divided; the input is in parts, and the ranks' outputs are summands of a plain one. With
sequence parallelism the plain tensors on either side are in parts of the sequence: gathered in front of a column-wise
product, summed into parts behind a row-wise one.

Shape suffixes: B batch, H heads, T queries, S keys, D features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d.parallel.tensor import group as collectives
from lightning_4d.parallel.tensor.sharded import Runtime, Sharded, cut_like, entered, functions, rule

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _named(tensor: Any) -> str:
    return ", ".join(sorted(tensor.origin)) if type(tensor) is Sharded and tensor.origin else "a product"


# ------------------------------------------------------------------------------------- into and out of divided products


def plain_input(value: Tensor, runtime: Runtime, why: str) -> Tensor:
    """Return the whole of what a product with parts reads; the gradients of the ranks' uses add up."""
    if type(value) is not Sharded:
        return entered(value, runtime, why)
    if not (torch.is_grad_enabled() and value.requires_grad):
        return value.gathered(why)
    return value.gathered_for_parts(why)  # shared by queries, keys and values, like `entered`


def summed(local: Tensor, weight: Sharded, bias: Tensor | None, why: str, sequence_dim: int = -2) -> Tensor:
    """Add up the ranks' summands, then the bias, which is plain."""
    runtime = weight.runtime
    dim = local.dim() + sequence_dim
    if runtime.sequence_parallel and dim >= 0 and local.shape[dim] % runtime.group.size == 0:
        part = collectives.sum_to_parts(local, dim, 1, runtime.group, why)
        result: Tensor = Sharded(part, dim, 1, runtime)
    else:
        result = collectives.sum_to_plain(local, runtime.group, why)
    return result if bias is None else result + bias


def _is_features(value: Tensor) -> bool:
    """Whether a part is of the last dim."""
    return type(value) is Sharded and value.split_dim == value.dim() - 1


def input_part(value: Tensor, weight: Sharded, why: str) -> Tensor:
    """This rank's part of the input features of a row-wise product."""
    if type(value) is Sharded:
        if _is_features(value) and value.parts == weight.parts:
            return value.local
        if _is_features(value):
            value.runtime.name_gather(F.linear, value)
        value = value.gathered(why)
    if weight.runtime.on_gather is not None:
        weight.runtime.on_gather(F.linear, weight)
    return cut_like(value, value.dim() - 1, weight, why)


# -------------------------------------------------------------------------------------------------------------- Linear


@rule(F.linear)
def _linear(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        return input, weight, bias

    value, weight, bias = arguments(*args, **kwargs)
    if weight.dim() != 2:
        return NotImplemented
    if type(weight) is Sharded:
        return _column_wise(value, weight, bias) if weight.split_dim == 0 else row_wise(value, weight, bias)
    if type(bias) is Sharded or _is_features(value):
        return NotImplemented
    assert type(value) is Sharded
    runtime = value.runtime
    bias = None if bias is None else entered(bias, runtime, "a bias used with parts")
    return value.like(F.linear(value.local, entered(weight, runtime, "a weight used with parts"), bias))


def _column_wise(value: Tensor, weight: Sharded, bias: Tensor | None) -> Any:
    why = f"column-wise {_named(weight)}"
    if _is_features(value):
        assert type(value) is Sharded
        value.runtime.name_gather(F.linear, value)
        value = value.gathered(f"input of {why}")
    value = plain_input(value, weight.runtime, f"input of {why}")
    local = F.linear(value, weight.local, _bias_part(bias, weight))
    return weight.like(local, local.dim() - 1)


def _bias_part(bias: Tensor | None, weight: Sharded) -> Tensor | None:
    if bias is None:
        return None
    if type(bias) is Sharded and bias.parts == weight.parts:
        return bias.local
    whole = bias.gathered("bias") if type(bias) is Sharded else bias
    return cut_like(whole, 0, weight, "a plain bias of a column-wise product")


def row_wise(value: Tensor, weight: Sharded, bias: Tensor | None, sequence_dim: int = -2) -> Any:
    """A product whose input features are divided; ``sequence_dim`` is where sequence parallelism divides the output."""
    why = f"row-wise {_named(weight)}"
    local = F.linear(input_part(value, weight, f"input of {why}"), weight.local)
    bias = bias.gathered("bias") if type(bias) is Sharded else bias
    return summed(local, weight, bias, f"output of {why}", sequence_dim)


@rule(*functions("addmm"))
def _addmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``addmm(bias, input, weight)``, as Hugging Face's Conv1D calls it."""
    if kwargs or len(args) != 3 or args[0].dim() != 1 or type(args[2]) is not Sharded:
        return NotImplemented
    bias, value, weight = args
    return F.linear(value, weight.t(), bias)


# ------------------------------------------------------------------------------------------------------ other products


@rule(*functions("matmul mm bmm"), Tensor.__matmul__)
def _matmul(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if kwargs or min(arg.dim() for arg in args) < 2:
        return NotImplemented
    left, right = args
    if type(right) is Sharded and right.dim() == 2:
        return F.linear(left, right.t())
    letters = _matmul_letters(left.dim(), right.dim())
    return _product(torch.matmul, [left, right], *letters)


def _matmul_letters(left: int, right: int) -> tuple[list[list[int]], list[int]]:
    """The dims as in einsum: batch dims are counted from the last, -1, -2, -3 stand for rows, inner and columns."""
    batch = max(left, right) - 2
    names = list(range(batch))
    return [[*names[batch - (left - 2) :], -1, -2], [*names[batch - (right - 2) :], -2, -3]], [*names, -1, -3]


@rule(torch.functional.einsum)
def _einsum(func: Any, args: Args, kwargs: Kwargs) -> Any:
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    letters = [[ord(letter) for letter in names] for names in inputs.split(",")]
    if any(len(set(names)) != len(names) for names in letters):
        return NotImplemented
    return _product(
        lambda *tensors: torch.einsum(equation, *tensors), list(operands), letters, [ord(c) for c in output]
    )


def _product(func: Any, operands: list[Tensor], letters: list[list[int]], output: list[int]) -> Any:
    """A product in which the divided dim is one index: kept in the output, or summed over."""
    position = next(i for i, value in enumerate(operands) if type(value) is Sharded)
    lead: Sharded = operands[position]  # pyright: ignore[reportAssignmentType]
    index = letters[position][lead.split_dim]
    local = []
    for value, names in zip(operands, letters, strict=True):
        part = _operand(value, names, index, lead)
        if part is None:
            return NotImplemented
        local.append(part)
    result = func(*local)
    if index in output:
        return lead.like(result, output.index(index))
    return collectives.sum_to_plain(result, lead.runtime.group, "a product over a divided dim")


def _operand(value: Tensor, names: list[int], index: int, lead: Sharded) -> Tensor | None:
    if type(value) is Sharded:
        same = names[value.split_dim] == index and value.parts == lead.parts
        return value.local if same else None
    if index not in names or value.shape[names.index(index)] == 1:
        return entered(value, lead.runtime, "a product with parts")
    return cut_like(value, names.index(index), lead, "a product with parts")


# ----------------------------------------------------------------------------------------------------------- embedding


@rule(F.embedding)
def _embedding(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def arguments(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> tuple[Tensor, Any, int | None, bool]:
        return input, weight, padding_idx, max_norm is not None or scale_grad_by_freq or sparse

    tokens, weight, padding_idx, special = arguments(*args, **kwargs)
    if special or type(weight) is not Sharded or weight.parts != 1 or type(tokens) is Sharded:
        return NotImplemented
    if weight.split_dim == 1:
        return weight.like(F.embedding(tokens, weight.local, padding_idx), tokens.dim())
    rows = weight.local.shape[0]
    local = tokens - weight.runtime.group.rank * rows
    elsewhere = (local < 0) | (local >= rows)
    found = F.embedding(local.masked_fill(elsewhere, 0), weight.local)
    if padding_idx is not None:  # its row gets no gradient
        padding_idx = normal_row(padding_idx, weight.split_size)
        found = torch.where((tokens == padding_idx).unsqueeze(-1), found.detach(), found)
    found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
    return summed(found, weight, None, f"vocabulary-parallel {_named(weight)}")


def normal_row(row: int, rows: int) -> int:
    """A row as a number from 0."""
    return row + rows if row < 0 else row
