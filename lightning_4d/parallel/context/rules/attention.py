"""Attention over a divided sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d.parallel.context.attention import context_attention
from lightning_4d.parallel.context.communication import cut, gather_plain
from lightning_4d.parallel.context.rules.align import aligned, lead_of
from lightning_4d.parallel.context.tensor import SequenceTensor, rule, wrap
from lightning_4d.parallel.parts import Divided

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """Ring, Ulysses or hybrid where queries and keys are divided; on the part where the batch is, or keys are whole.

    Dropout of attention weights is drawn for whole sequences: it gathers.
    """
    return _attention(*args, **kwargs)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p > 0.0 or (is_causal and attn_mask is not None):
        return NotImplemented
    if attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        return NotImplemented  # a learned bias: the kernels give no gradient for it
    if not isinstance(query, SequenceTensor) or query.sharding.is_merged:
        return NotImplemented
    back = query.dim() - query.sharding.dim
    if back > 2:
        return _by_batch(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if back != 2 or not 3 <= query.dim() <= 4 or not all(x.dim() == query.dim() for x in (key, value)):
        return NotImplemented
    return _by_position(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def _by_position(
    query: SequenceTensor, key: Any, value: Any, mask: Any, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    """Queries are divided. Keys and values that are whole are divided too, or were from the start."""
    groups = query.sharding.groups
    keys = _divided(key, query)
    values = _divided(value, query)
    if keys is None or values is None or not keys.sharding.same_positions(values.sharding):
        return NotImplemented
    mask = gather_plain(mask.part, mask.sharding) if isinstance(mask, SequenceTensor) else mask
    q, k, v = (x.part for x in (query, keys, values))
    flat = query.dim() == 3
    if flat:  # (heads of all samples, T, D)
        q, k, v = (part.unsqueeze(0) for part in (q, k, v))

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        layouts = query.sharding.layout, keys.sharding.layout
        return context_attention(q, k, v, groups, *layouts, mask=attn_mask, is_causal=is_causal, scale=scale)

    named = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    kind = next((type(part) for part in (q, k, v, mask) if isinstance(part, Divided)), None)
    if kind is None:
        out = attend(q, k, v, **named)
    else:  # each of its ranks computes its heads
        out = kind.run_as(F.scaled_dot_product_attention, attend, (q, k, v), named)
    return wrap(out.squeeze(0) if flat else out, query.sharding)


def _divided(x: Any, query: SequenceTensor) -> SequenceTensor | None:
    """``x`` with its positions divided like everyone's; None if another dim is."""
    dim = x.dim() - 2
    if isinstance(x, SequenceTensor):
        return x if x.sharding.dim == dim and not x.sharding.is_merged else None
    groups = query.sharding.groups
    sharding = type(query.sharding)(dim, groups.layout(x.shape[dim]), groups)
    return wrap(cut(x, sharding), sharding)


def _by_batch(
    query: SequenceTensor, key: Any, value: Any, mask: Any, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    """Each sequence of the batch is on one rank."""
    lead = lead_of((query,))
    assert lead is not None
    if any(x.dim() != query.dim() or x.shape[x.dim() - lead.back] != lead.sharding.size for x in (key, value)):
        return NotImplemented
    q, k, v, mask = (aligned(x, lead, "scaled_dot_product_attention") for x in (query, key, value, mask))
    if not q.shape[q.dim() - lead.back]:
        out = q[..., :0].expand(*q.shape[:-1], 0).new_zeros((*q.shape[:-1], v.shape[-1])) + 0 * (q.sum() + v.sum())
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return lead.wrapped(out)


# ------------------------------------------------------------------------------------------- nn.MultiheadAttention


@rule(F.multi_head_attention_forward)
def multi_head_attention_forward(func: Callable[..., Any], args: Arguments, kwargs: Named) -> Any:
    """The body of nn.MultiheadAttention without its weights: (T, B, C), projections, attention, projection."""
    return _multi_head(*args, **kwargs)


def _multi_head(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    special = (bias_k, bias_v, static_k, static_v)
    if need_weights or add_zero_attn or any(x is not None for x in special) or query.dim() != 3:
        return NotImplemented
    if is_causal and attn_mask is None:
        return NotImplemented  # torch says that it needs the mask
    weights = (
        (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight.chunk(3)  # pyright: ignore[reportOptionalMemberAccess]
    )
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    if query is key and key is value and not use_separate_proj_weight:
        projected = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)  # pyright: ignore[reportArgumentType]
    else:
        projected = [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]  # pyright: ignore[reportArgumentType]
    T, B, C = query.shape
    q, k, v = (x.view(x.shape[0], B, num_heads, C // num_heads).permute(1, 2, 0, 3) for x in projected)
    is_causal = is_causal and key_padding_mask is None
    mask = None if is_causal else _merged_mask(attn_mask, key_padding_mask, B, num_heads, q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p if training else 0.0, is_causal)
    return F.linear(out.permute(2, 0, 1, 3).reshape(T, B, C), out_proj_weight, out_proj_bias), None


def _merged_mask(
    mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """One additive mask, (B or 1, heads or 1, T or 1, S); in nn.MultiheadAttention True means hidden."""
    masks = []
    if mask is not None:
        mask = _additive(mask, dtype)
        masks.append(mask.view(batch, heads, *mask.shape[-2:]) if mask.dim() == 3 else mask[None, None])
    if padding is not None:
        masks.append(_additive(padding, dtype)[:, None, None, :])
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] + masks[1]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
