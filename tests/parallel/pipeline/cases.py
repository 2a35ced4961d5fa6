"""Runs tails of steps, whole and in parts: what a user computes from hidden states and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_4d.parallel.pipeline.reduction import BatchReduction, Plan
from lightning_4d.parallel.pipeline.tail_trace import TailTrace

ROWS, TIME, WIDTH, CLASSES = 12, 5, 6, 7

Logged = dict[str, Any]
Tail = Callable[[nn.Module, Tensor, Mapping[str, Tensor]], tuple[Tensor, Logged]]


class Head(nn.Module):
    """A norm, a head and a few scalars to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.log_variance = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("class_weight", torch.rand(CLASSES) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


def make_batch(ragged: str = "no", rows: int = ROWS) -> dict[str, Tensor]:
    """A batch in fp64; `ragged`: "no", "some" targets are -100, or "empty": also all of the first third of rows."""
    torch.manual_seed(1)
    labels = torch.randint(0, CLASSES, (rows, TIME))
    if ragged != "no":
        labels[torch.rand(rows, TIME) < 0.4] = -100
    if ragged == "empty":
        labels[: rows // 3] = -100
    return {
        "labels": labels,
        "classes": torch.randint(0, CLASSES, (rows,)),
        "target": torch.rand(rows, TIME, CLASSES, dtype=torch.float64),
        "sign": torch.randint(0, 2, (rows,)).double() * 2 - 1,
        "mask": (labels != -100).double(),
        "hidden": torch.randn(rows, TIME, WIDTH, dtype=torch.float64),
    }


@dataclass
class Result:
    loss: Tensor
    gradients: dict[str, Tensor]
    logged: Logged
    correction: Any = None
    reduction: Any = field(default=None, repr=False)


def whole(tail: Tail, batch: Mapping[str, Tensor]) -> Result:
    """The step on the whole batch, by autograd alone."""
    head, hidden = _fresh(batch)
    loss, logged = tail(head, hidden, batch)
    if loss.requires_grad:
        loss.backward()
    return Result(loss.detach(), _gradients(head, hidden), logged)


def in_parts(
    tail: Tail,
    batch: Mapping[str, Tensor],
    sizes: Sequence[int],
    plan: Plan,
    mode: Any = "auto",
    prove: Any = None,
    early: bool = True,
) -> Result:
    """The step on microbatches of the given sizes, each one's backward before the next one's forward."""
    head, hidden = _fresh(batch)
    cut = {key: value.split(list(sizes)) for key, value in batch.items()}
    entries = [[values[j].clone() for values in cut.values()] for j in range(len(sizes))]
    reduction = BatchReduction(sizes, plan, mode, prove, entries if early else None)
    start = 0
    for index, size in enumerate(sizes):
        rows = slice(start, start + size)
        start += size
        part = {key: value[rows].clone() for key, value in batch.items()}
        trace = TailTrace()
        with trace:
            own = hidden[rows]
            trace.rows(own)
            if early:
                trace.entries(*part.values())
            else:
                trace.rows(*part.values())
            loss, logged = tail(head, own, part)
        root = reduction.finish(index, trace, loss, logged)
        if root is not None and root.requires_grad:
            root.backward()
    correction = reduction.correction()
    gradients = _gradients(head, hidden)
    if correction is not None:
        gradients = {name: g * correction for name, g in gradients.items()}
    reduction.check()
    return Result(reduction.loss(), gradients, reduction.logged(), correction, reduction)


def _fresh(batch: Mapping[str, Tensor]) -> tuple[Head, Tensor]:
    torch.manual_seed(0)
    return Head().double(), batch["hidden"].clone().requires_grad_()


def _gradients(head: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in head.named_parameters()} | {"hidden": hidden.grad}
    return {name: torch.zeros((), dtype=torch.float64) if g is None else g for name, g in found.items()}


def assert_same(given: Result, expected: Result, tolerance: float = 1e-12) -> None:
    """Loss, gradients and logged values agree at a relative tolerance."""
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(given.loss, expected.loss, **close)
    for name, gradient in expected.gradients.items():
        other = given.gradients[name]
        torch.testing.assert_close(
            other.expand_as(gradient) if other.ndim == 0 else other,
            gradient,
            msg=lambda m, n=name: f"{n}: {m}",
            **close,
        )
    assert given.logged.keys() == expected.logged.keys()
    for key, value in expected.logged.items():
        a, b = (_as_tensor(v) for v in (given.logged[key], value))
        narrow = {"rtol": 1e-6, "atol": 1e-6} if b.dtype == torch.float32 else {}
        torch.testing.assert_close(a, b, msg=lambda m, k=key: f"{k}: {m}", **(close | narrow))


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach()
    return torch.tensor(float(value), dtype=torch.float64)
