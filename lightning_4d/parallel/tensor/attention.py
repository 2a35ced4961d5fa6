"""Rules for attention: each rank computes its own heads.

Shape suffixes: B batch, H heads, T queries, S keys, D features of a head, C features of the model.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d.parallel.tensor.pointwise import aligned
from lightning_4d.parallel.tensor.products import row_wise
from lightning_4d.parallel.tensor.randomness import own_generator, own_mask
from lightning_4d.parallel.tensor.sharded import Sharded, entered, find_sharded, rule

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_BACK = 3  # the head dim, counted from the last


@rule(F.scaled_dot_product_attention)
def _attention(func: Any, args: Args, kwargs: Kwargs) -> Any:
    def arguments(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **named: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool, dict[str, Any]]:
        return query, key, value, attn_mask, dropout_p, is_causal, named

    query, key, value, mask, p, causal, named = arguments(*args, **kwargs)
    lead = find_sharded((query, key, value))
    if lead is None or not _by_heads(query, key, value):
        return NotImplemented
    if type(query) is not Sharded:
        return NotImplemented
    mask = None if mask is None else aligned(mask, query, _BACK, func)
    key, value = (_heads_for(tensor, query, named.get("enable_gqa", False), func) for tensor in (key, value))
    if 0.0 < p < 1.0 and query.device.type == "cpu":  # torch writes it out as well
        return query.like(_with_dropout(query, key, value, mask, p, causal, **named))
    own = own_generator(query.runtime.group, query.device) if p > 0.0 else contextlib.nullcontext()
    with own:
        local = func(query.local, key, value, attn_mask=mask, dropout_p=p, is_causal=causal, **named)
    return query.like(local)


def _with_dropout(
    query: Sharded,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of this rank's heads as one process has it on the CPU: with its part of the mask of all heads."""
    batch = torch.broadcast_shapes(query.shape[:-_BACK], key_BHSD.shape[:-_BACK])
    shape = (*batch, *query.shape[-_BACK:-1], key_BHSD.shape[-2])
    kept = own_mask(query.runtime.group, shape, len(batch), 1 - p)
    q, k, v = (_in_autocast(tensor) for tensor in (query.local, key_BHSD, value_BHSD))
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        q, k, v = (tensor.to(wide) for tensor in (q, k, v))
        if enable_gqa:
            k, v = (tensor.repeat_interleave(q.shape[-_BACK] // tensor.shape[-_BACK], -_BACK) for tensor in (k, v))
        scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if mask is not None:
            scores = scores + (_to_added(~mask, wide) if mask.dtype == torch.bool else mask.to(wide))
        weights = scores.softmax(dim=-1).masked_fill(kept == 0, 0.0)
        return (weights @ (v / (1 - p))).to(dtype)


def _in_autocast(tensor: Tensor) -> Tensor:
    """The argument of an attention, which autocast takes in its own dtype."""
    cast = torch.is_autocast_enabled("cpu") and tensor.dtype == torch.float32
    return tensor.to(torch.get_autocast_dtype("cpu")) if cast else tensor


def _by_heads(*tensors: Tensor) -> bool:
    return all(t.split_dim == t.dim() - _BACK and t.parts == 1 for t in tensors if type(t) is Sharded)


def _heads_for(tensor: Tensor, query: Sharded, grouped: bool, func: Any) -> Tensor:
    """Keys or values (.., H, S, D) for this rank's query heads."""
    heads = tensor.shape[-_BACK]
    if grouped and type(tensor) is Sharded:
        return tensor.local  # a share of the keys goes with the same share of the queries
    if not grouped or heads in (1, query.split_size):
        return aligned(tensor, query, _BACK, func)
    # Keys of few heads, whole on every rank: those that this rank's queries read.
    group = query.runtime.group
    per_key = query.split_size // heads
    own = query.split_size // group.size
    first = group.rank * own // per_key
    count = max(1, own // per_key)
    whole = entered(tensor, query.runtime, "keys or values of a few heads, for queries in parts")
    if own % per_key and per_key % own:  # this rank's queries begin inside one group and end in another
        index = torch.arange(group.rank * own, (group.rank + 1) * own, device=tensor.device) // per_key
        return whole.index_select(tensor.dim() - _BACK, index)
    return whole.narrow(tensor.dim() - _BACK, first, count)


@rule(F.multi_head_attention_forward)
def _multi_head_attention(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``nn.MultiheadAttention`` written out, so that the products and the attention have their own rules."""
    call = dict(zip(_MHA_ARGUMENTS, args, strict=False)) | kwargs
    if _unusual(call):
        return NotImplemented
    query_TBC, key_SBC, value_SBC = call["query"], call["key"], call["value"]
    batched = query_TBC.dim() == 3
    if not batched:
        query_TBC, key_SBC, value_SBC = (tensor.unsqueeze(1) for tensor in (query_TBC, key_SBC, value_SBC))
    heads, training = call["num_heads"], call.get("training", True)
    q, k, v = (_by_head(tensor, heads) for tensor in _projected(call, query_TBC, key_SBC, value_SBC))
    mask = _mask(call, q, k)
    p = call["dropout_p"] if training else 0.0
    causal = bool(call.get("is_causal", False)) and mask is None
    if call.get("need_weights", True):
        out, weights = _with_weights(q, k, v, mask, p)
    else:
        out, weights = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal), None
    out_TBC = out.permute(2, 0, 1, 3).flatten(2)
    weight, bias = call["out_proj_weight"], call["out_proj_bias"]
    if type(weight) is Sharded and weight.split_dim == 1:
        out_TBC = row_wise(out_TBC, weight, bias, sequence_dim=-3)
    else:
        out_TBC = F.linear(out_TBC, weight, bias)
    if weights is not None and call.get("average_attn_weights", True):
        weights = weights.mean(dim=1)
    return (out_TBC, weights) if batched else (out_TBC.squeeze(1), None if weights is None else weights.squeeze(0))


_MHA_ARGUMENTS = [
    "query",
    "key",
    "value",
    "embed_dim_to_check",
    "num_heads",
    "in_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
    "add_zero_attn",
    "dropout_p",
    "out_proj_weight",
    "out_proj_bias",
    "training",
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "use_separate_proj_weight",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
    "static_k",
    "static_v",
    "average_attn_weights",
    "is_causal",
]


def _unusual(call: Kwargs) -> bool:
    extra = ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn", "use_separate_proj_weight")
    return any(call.get(name) is not None and call[name] is not False for name in extra)


def _projected(call: Kwargs, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values (T or S, B, C)."""
    weight, bias = call["in_proj_weight"], call["in_proj_bias"]
    if query is key and key is value:
        return F.linear(query, weight, bias).chunk(3, dim=-1)
    weights = weight.chunk(3, dim=0)
    biases = (None, None, None) if bias is None else bias.chunk(3, dim=0)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))


def _by_head(tensor_TBC: Tensor, heads: int) -> Tensor:
    """(B, H, T, D)."""
    return tensor_TBC.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _mask(call: Kwargs, q_BHTD: Tensor, k_BHSD: Tensor) -> Tensor | None:
    """The sum of both masks, to be added to the scores: (1 or B, 1 or H, 1 or T, S)."""
    mask, padding = call.get("attn_mask"), call.get("key_padding_mask")
    if mask is not None and call.get("is_causal", False) and padding is None and not call.get("need_weights", True):
        return None  # torch takes the hint for the mask
    B, H, T, S = *q_BHTD.shape[:3], k_BHSD.shape[2]
    dtype = q_BHTD.dtype
    if mask is not None:
        mask = _to_added(mask, dtype)
        mask = mask.view(-1, H, T, S) if mask.dim() == 3 else mask
    if padding is None:
        return mask
    padding = _to_added(padding, dtype).view(B, 1, 1, S)
    return padding if mask is None else mask + padding


def _to_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))


def _with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    scores = (q / q.shape[-1] ** 0.5) @ k.transpose(-1, -2)
    weights = (scores if mask is None else scores + mask).softmax(dim=-1)
    weights = F.dropout(weights, p) if p > 0.0 else weights
    return weights @ v, weights
