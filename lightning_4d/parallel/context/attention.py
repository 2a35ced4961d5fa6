"""Attention of a sequence that ranks share: all-to-all inside each Ulysses group, a ring between these groups.

Shapes: B batch, H query heads, G key and value heads, T queries, S keys, D head size; of this rank unless said.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d.parallel.context.groups import ContextGroups
from lightning_4d.parallel.context.layout import Run, SequenceLayout
from lightning_4d.parallel.context.ring import Ring, ring_attention, take_runs
from lightning_4d.parallel.context.ulysses import spread_key_heads, to_heads, to_sequence

_CUDA_MULTIPLE = 8  # head sizes that the CUDA kernels read at full width


def context_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    groups: ContextGroups,
    queries: SequenceLayout,
    keys: SequenceLayout,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """What ``F.scaled_dot_product_attention`` gives for the whole sequence, for this rank's queries.

    Args:
        q_BHTD: this rank's queries.
        k_BGSD: this rank's keys; G divides H.
        v_BGSD: this rank's values; their size may differ from D.
        groups: the ranks.
        queries: which rank holds which queries.
        keys: which rank holds which keys.
        mask: boolean (True may be seen) or additive, of the *whole* sequences: broadcastable to (B, H, all T, all S).
            Equal on all ranks; must not require a gradient. Not together with ``is_causal``.
        is_causal: a query sees the keys at its own and earlier positions.
        scale: of the scores; by default 1 / sqrt(D).

    Raises:
        UnsupportedError: heads that do not divide among the Ulysses ranks, or no kernel for dtype and device.

    Which ranks must call: all of ``groups.group``.
    """
    size, value_size = q_BHTD.shape[-1], v_BGSD.shape[-1]
    scale = float(size**-0.5) if scale is None else scale
    multiple = _CUDA_MULTIPLE if q_BHTD.is_cuda else 1
    width = -(-max(size, value_size) // multiple) * multiple
    q, k, v = (F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (q_BHTD, k_BGSD, v_BGSD))
    if mask is not None and mask.dim() == 3:  # of each head (ALiBi): kernels take 2 dims or 4
        mask = mask.unsqueeze(0)
    if groups.ulysses_size > 1:
        out = _with_all_to_all(q, k, v, groups, queries, keys, mask, is_causal, scale)
    else:
        out = _between_groups(q, k, v, groups, queries, keys, mask, is_causal, scale)
    return out[..., :value_size]


def _with_all_to_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: ContextGroups,
    queries: SequenceLayout,
    keys: SequenceLayout,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    heads, ranks = q.shape[1], groups.ulysses_size
    k, v = (spread_key_heads(tensor, heads, ranks) for tensor in (k, v))
    first = groups.rank // ranks * ranks
    query_lengths, key_lengths = queries.lengths[first : first + ranks], keys.lengths[first : first + ranks]
    q = to_heads(q, query_lengths, groups.ulysses)
    k, v = (to_heads(tensor, key_lengths, groups.ulysses) for tensor in (k, v))
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask.narrow(-3, groups.rank % ranks * heads // ranks, heads // ranks)
    if groups.ring_size > 1:
        out = _between_groups(q, k, v, groups, queries, keys, mask, is_causal, scale)
    else:
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
        grouped = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped)
    return to_sequence(out, query_lengths, groups.ulysses)


def _between_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: ContextGroups,
    queries: SequenceLayout,
    keys: SequenceLayout,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    ring = Ring(groups.ring, groups.ring_runs(queries), groups.ring_runs(keys))
    if mask is not None:
        is_additive = mask.dtype != torch.bool
        mask = _rows(mask, ring.query_runs[ring.rank], q.dtype)
        if is_additive and mask.numel():
            mask, hidden = _without_floor(mask)
            q = q.masked_fill(hidden, 0.0)
    return ring_attention(q, k, v, ring, mask=mask, is_causal=is_causal, scale=scale)


def _rows(mask: Tensor, runs: tuple[Run, ...], dtype: torch.dtype) -> Tensor:
    """The rows at ``runs``, additive."""
    if mask.shape[-2] > 1:
        mask = take_runs(mask, -2, runs)
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.to(dtype)


def _without_floor(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Replace rows that hide all keys by a huge finite number, such as ``finfo.min``, and say which rows these are.

    Next to such a number scores vanish, so one process gives these queries the average of the values. Parts could not
    be merged: their log-sum-exps are all that number. With a row of zeros, and zero queries, they give the average.
    """
    highest = mask.amax(-1, keepdim=True)
    hidden = (highest <= torch.finfo(mask.dtype).min / 2) & (highest > float("-inf"))
    return mask.masked_fill(hidden & (mask > float("-inf")), 0.0), hidden
