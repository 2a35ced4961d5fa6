"""Runs attention of one whole sequence on all ranks and on each alone; compares results and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_4d.parallel.context.layout import SequenceLayout
from lightning_4d.parallel.context.ring import take_runs


@dataclass(frozen=True)
class Case:
    name: str
    length: int = 16
    keys: int | None = None
    batch: int = 2
    heads: int = 4
    key_heads: int | None = None
    size: int = 8
    dtype: torch.dtype = torch.float64
    is_causal: bool = False
    scale: float | None = None
    magnitude: float = 1.0
    mask: str | None = None
    value_size: int | None = None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        keys, key_heads = self.keys or self.length, self.key_heads or self.heads

        def draw(heads: int, length: int, size: int) -> Tensor:
            return torch.randn(self.batch, heads, length, size, generator=generator, dtype=torch.float64)

        q, k = draw(self.heads, self.length, self.size), draw(key_heads, keys, self.size)
        v = draw(key_heads, keys, self.value_size or self.size)
        grad = draw(self.heads, self.length, self.value_size or self.size)
        if (
            self.mask == "floor bias"
        ):  # the gradients that torch's CPU kernel makes of such rows are not those of a softmax
            grad[:, :, 1::3] = 0
        return tuple(t.to(self.dtype) for t in (q * self.magnitude, k, v, grad))  # type: ignore[return-value]

    def make_mask(self) -> Tensor | None:
        """A boolean mask, or a floating one, that broadcasts to (batch, heads, length, keys)."""
        return (
            None if self.mask is None else MASKS[self.mask](self).to(self.dtype if "bias" in self.mask else torch.bool)
        )


def _window(case: Case) -> Tensor:
    distance = torch.arange(case.length)[:, None] - torch.arange(case.keys or case.length)
    return (distance >= 0) & (distance < 3)


def _documents(case: Case) -> Tensor:
    document = torch.arange(case.length) // 5
    return torch.tril(document[:, None] == document)


def _padding(case: Case) -> Tensor:
    valid = torch.tensor([case.keys or case.length, 5] * case.batch)[: case.batch]
    return (torch.arange(case.keys or case.length) < valid[:, None])[:, None, None, :]


def _blind(case: Case) -> Tensor:
    mask = torch.tril(torch.ones(case.length, case.keys or case.length, dtype=torch.bool))
    return mask & (torch.arange(case.length) % 3 != 1)[:, None]


def _bias(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(1, case.heads, case.length, case.keys or case.length, generator=generator)
    return bias.masked_fill(torch.rand(bias.shape, generator=generator) < 0.2, float("-inf"))


def _floor_bias(case: Case) -> Tensor:
    bias = torch.randn(1, 1, case.length, case.keys or case.length, generator=torch.Generator().manual_seed(1))
    bias = bias.to(case.dtype)
    bias[:, :, 1::3] = torch.finfo(case.dtype).min
    return bias


def _row_bias(case: Case) -> Tensor:
    return torch.randn(case.batch, 1, case.length, 1, generator=torch.Generator().manual_seed(2))


def _head_bias(case: Case) -> Tensor:
    return _bias(case).squeeze(0)


def _keys(case: Case) -> Tensor:
    return (torch.arange(case.keys or case.length) % 4 != 2)[None]


MASKS: dict[str, Any] = {
    "window": _window,
    "documents": _documents,
    "padding": _padding,
    "blind": _blind,
    "bias": _bias,
    "row_bias": _row_bias,
    "floor bias": _floor_bias,
    "head bias": _head_bias,
    "keys": _keys,
}


@dataclass
class Result:
    out: Tensor
    grads: list[Tensor] = field(default_factory=list)


def expected(case: Case, dtype: torch.dtype | None = None) -> Result:
    """From F.scaled_dot_product_attention on one process."""
    q, k, v, grad = (t.to(dtype or t.dtype) for t in case.tensors())
    mask = case.make_mask()
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=case.is_causal, scale=case.scale, enable_gqa=case.key_heads is not None
    )
    out.backward(grad)
    return Result(out.detach(), [q.grad, k.grad, v.grad])  # type: ignore[list-item]


def parts(layout: SequenceLayout, tensor: Tensor, dim: int = 2) -> Tensor:
    """This rank's part, a copy."""
    return take_runs(tensor, dim, layout.runs[dist.get_rank()]).clone()


def whole(layout: SequenceLayout, part: Tensor, dim: int = 2) -> Tensor:
    """The sequence of all ranks' parts."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, part)
    places = sorted(
        (start, rank, layout.range_below(rank, start), stop - start)
        for rank, runs in enumerate(layout.runs)
        for start, stop in runs
    )
    return torch.cat([gathered[rank].narrow(dim, offset, count) for _, rank, offset, count in places], dim)


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest number."""
    actual, expected = actual.double(), expected.double()
    if not torch.isfinite(actual).all():
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


CASES = [
    Case("causal", is_causal=True),
    Case("bidirectional"),
    Case("gqa", key_heads=2, is_causal=True),
    Case("mqa", key_heads=1),
    Case("gqa, 6 heads", heads=12, key_heads=6, is_causal=True),
    Case("wide values", value_size=12, is_causal=True),
    Case("narrow values", value_size=5),
    *(Case(f"size {size}", size=size, is_causal=True) for size in (4, 7, 12, 64, 128)),
    Case("scale", scale=0.3, is_causal=True),
    Case("large scores", magnitude=1e3, is_causal=True),
    Case("window", mask="window"),
    Case("documents", mask="documents"),
    Case("padding", mask="padding"),
    Case("gqa padding", mask="padding", key_heads=2),
    Case("fully masked rows", mask="blind"),
    Case("bias of each head", mask="bias"),
    Case("bias of each head, without the batch", mask="head bias"),
    Case("mask of keys alone", mask="keys"),
    Case("cross, mask of keys alone", keys=9, mask="keys"),
    Case("bias of each row", mask="row_bias"),
    Case("rows hidden by the lowest number", mask="floor bias"),
    Case("odd length", length=13, is_causal=True),
    Case("odd length, window", length=13, mask="window"),
    Case("short", length=3, is_causal=True),
    Case("very short", length=2),
    Case("cross", keys=9),
    Case("cross, causal", keys=9, is_causal=True),
    Case("cross, padding", keys=9, mask="padding"),
    Case("fp32", dtype=torch.float32, is_causal=True, key_heads=2),
    Case("fp32 documents", dtype=torch.float32, mask="documents"),
    Case("large scores in fp32", dtype=torch.float32, magnitude=1e3, is_causal=True),
    Case("bf16", dtype=torch.bfloat16, length=64, size=16, is_causal=True),
    Case("bf16 gqa", dtype=torch.bfloat16, length=64, size=16, key_heads=1),
    Case("bf16 padding", dtype=torch.bfloat16, length=64, size=16, mask="padding"),
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6}


def errors(cases: list[Case], run: Callable[[Case], Result]) -> dict[str, list[float]]:
    """Of out and the gradients of q, k and v, over what is tolerated."""
    found = {}
    for case in cases:
        mine, theirs = run(case), expected(case)
        pairs = list(zip((mine.out, *mine.grads), (theirs.out, *theirs.grads), strict=True))
        if case.dtype == torch.bfloat16 or case.magnitude > 1:
            # Rounding alone makes more of an error: no more than one process makes, against the exact result.
            exact = expected(case, torch.float64 if case.dtype != torch.float64 else None)
            pairs = [(a, e, t) for (a, t), e in zip(pairs, (exact.out, *exact.grads), strict=True)]
            floor = 1e-10 * case.magnitude if case.dtype == torch.float64 else 1e-7 * case.magnitude
            found[case.name] = [error(a, e) / (2 * error(t, e) + floor / float(e.abs().max())) for a, e, t in pairs]
        else:
            found[case.name] = [error(actual, wanted) / TOLERANCE[case.dtype] for actual, wanted in pairs]
    return found


def check(found: dict[str, list[float]]) -> None:
    wrong = {name: values for name, values in found.items() if max(values) > 1}
    assert not wrong, f"errors over tolerance (out, q, k, v): {wrong}"
