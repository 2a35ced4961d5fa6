"""Ulysses: before attention, ranks exchange heads for positions, and after it back.

Shapes: B batch, H heads, T this rank's positions, S the group's positions, D head size, U ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.same_way import together


def to_heads(x_BHTD: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Give away positions for heads: (B, H, T, D) -> (B, H / U, S, D), positions in the order of the ranks.

    Args:
        x_BHTD: this rank's positions of all heads; U divides H.
        lengths: each rank's T.
        group: the ranks.

    Which ranks must call: all of the group.
    """
    return _ToHeads.apply(x_BHTD, tuple(lengths), group)


def to_sequence(x_BHSD: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The inverse of :func:`to_heads`: (B, H / U, S, D) -> (B, H, T, D)."""
    return _ToSequence.apply(x_BHSD, tuple(lengths), group)


def spread_key_heads(k_BGSD: Tensor, query_heads: int, ranks: int) -> Tensor:
    """Repeat key or value heads where there are too few of them to divide among ``ranks``.

    Which query head uses which key head stays as it is once both are divided.

    Raises:
        UnsupportedError: the query heads do not divide.
    """
    if query_heads % ranks:
        divisors = [size for size in range(1, query_heads + 1) if query_heads % size == 0]
        raise UnsupportedError(
            explain(
                f"attention with {query_heads} heads over {ranks} Ulysses ranks",
                "each rank takes the same number of heads",
                f"use a Ulysses size in {divisors}, or context_parallel_attention='ring', which divides no heads",
            )
        )
    heads = k_BGSD.shape[1]
    if heads % ranks == 0:
        return k_BGSD
    needed = ranks if ranks % heads == 0 else query_heads
    return k_BGSD.repeat_interleave(needed // heads, dim=1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.settings = (lengths, group)
        return _heads_from(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sequence_from(grads[0], *ctx.settings), None, None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.settings = (lengths, group)
        return _sequence_from(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _heads_from(grads[0], *ctx.settings), None, None


def _heads_from(x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    ranks = len(lengths)
    B, H, T, D = x.shape
    sent = x.unflatten(1, (ranks, H // ranks)).movedim(1, 0).contiguous()
    row = B * H // ranks * D
    received = x.new_empty(row * sum(lengths))
    together("attention")
    dist.all_to_all_single(received, sent.view(-1), [row * n for n in lengths], [row * T] * ranks, group=group)
    parts = received.split([row * n for n in lengths])
    return torch.cat([part.view(B, H // ranks, n, D) for part, n in zip(parts, lengths, strict=True)], dim=2)


def _sequence_from(x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    ranks, T = len(lengths), lengths[group.rank()]
    B, h, _, D = x.shape
    sent = torch.cat([part.reshape(-1) for part in x.split(lengths, dim=2)])
    row = B * h * D
    received = x.new_empty(ranks, B, h, T, D)
    together("attention")
    dist.all_to_all_single(received.view(-1), sent, [row * T] * ranks, [row * n for n in lengths], group=group)
    return received.movedim(0, 1).reshape(B, ranks * h, T, D)
