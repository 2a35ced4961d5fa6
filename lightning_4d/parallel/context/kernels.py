"""Attention of some queries with some keys, together with its log-sum-exp: one small table, by device and dtype.

Shapes: B batch, H heads, T queries, S keys, D head size; a suffix of a name gives its dims. ``lse_BHT`` is the natural
logarithm of the sum of the exponentials of the scaled scores of each query, -inf where it may see no key here.

Ring attention merges such parts by their log-sum-exp, and goes back through each part with the log-sum-exp of the
whole row: a kernel that takes it from outside is all that is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d import _torch_private as private
from lightning_4d.errors import UnsupportedError, explain

Forward = Callable[[Tensor, Tensor, Tensor, "Tensor | None", bool, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "Tensor | None", bool, float], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True)
class BlockKernel:
    """One row of the table.

    Args:
        name: of the kernel.
        device: its device type.
        dtypes: of the queries, keys and values.
        masks: whether it takes an additive mask.
        grouped: whether it takes fewer key heads than query heads.
        multiple: head sizes are padded to a multiple of it.
        forward: (q, k, v, mask, is_causal, scale) -> (out, lse). All non-empty; ``is_causal`` counts from the top left.
        backward: (grad_out, q, k, v, out, lse, mask, is_causal, scale) -> (grad_q, grad_k, grad_v), with ``out`` and
            ``lse`` of the whole row.
    """

    name: str
    device: str
    dtypes: frozenset[torch.dtype]
    masks: bool
    grouped: bool
    multiple: int
    forward: Forward
    backward: Backward


def choose_kernel(device: str, dtype: torch.dtype, *, masked: bool) -> BlockKernel:
    """Return the first kernel of the table that serves ``dtype`` on ``device``, with a mask if ``masked``.

    Raises:
        UnsupportedError: there is none.
    """
    for kernel in KERNELS:
        if kernel.device == device and dtype in kernel.dtypes and (kernel.masks or not masked):
            return kernel
    known = sorted({f"{dtype} on {kernel.device}" for kernel in KERNELS for dtype in kernel.dtypes})
    raise UnsupportedError(
        explain(
            f"ring attention in {dtype} on {device}{' with a mask' if masked else ''}",
            f"there are kernels for {', '.join(known)}",
            "use one of these, or context_parallel_attention='ulysses', which needs no kernel of its own",
        )
    )


# ----------------------------------------------------------------------------------------------------------------- CPU


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return private.CPU_FLASH_ATTENTION(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Any, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return private.CPU_FLASH_ATTENTION_BACKWARD(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale)


# ---------------------------------------------------------------------------------------------------------------- CUDA


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = private.CUDA_FLASH_ATTENTION(q, k, v, 0.0, is_causal, False, scale=scale)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Any, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty((2,), dtype=torch.uint64, device=q.device)  # for dropout, which there is none of
    sizes = (q.shape[2], k.shape[2])
    return private.CUDA_FLASH_ATTENTION_BACKWARD(
        grad, q, k, v, out, lse, None, None, *sizes, 0.0, is_causal, seed, seed.new_empty(()), scale=scale
    )


_EFFICIENT_ROWS = 32  # its log-sum-exp is padded to a multiple of this many queries
_BIAS_COLUMNS = 16  # rows of a mask start at a multiple of this many elements


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    bias = _aligned(mask, q, k)
    out, lse, *_ = private.CUDA_EFFICIENT_ATTENTION(q, k, v, bias, True, 0.0, is_causal, scale=scale)
    return out, lse.narrow(-1, 0, q.shape[2])


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Any, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    lse = F.pad(lse, (0, -lse.shape[-1] % _EFFICIENT_ROWS), value=float("inf"))
    needs = [True, True, True, False]
    grad_q, grad_k, grad_v, _ = private.CUDA_EFFICIENT_ATTENTION_BACKWARD(
        grad, q, k, v, _aligned(mask, q, k), out, lse, seed, seed, 0.0, needs, is_causal, scale=scale
    )
    return grad_q, grad_k, grad_v


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask for each head, its rows starting where the kernel can read several elements at once."""
    if mask is None:
        return None
    columns = mask.shape[-1]
    if columns % _BIAS_COLUMNS:
        mask = F.pad(mask, (0, -columns % _BIAS_COLUMNS)).narrow(-1, 0, columns)
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = private.CUDA_CUDNN_ATTENTION(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    return out, lse.squeeze(-1)


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Any, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    sizes = (q.shape[2], k.shape[2])
    return private.CUDA_CUDNN_ATTENTION_BACKWARD(
        grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, *sizes, 0.0, is_causal, scale=scale
    )


_HALF = frozenset({torch.bfloat16, torch.float16})
_ALL = frozenset({torch.float32, torch.float64, *_HALF})

KERNELS: tuple[BlockKernel, ...] = (
    BlockKernel("flash", "cpu", _ALL, True, True, 1, _cpu_forward, _cpu_backward),
    BlockKernel("flash", "cuda", _HALF, False, True, 8, _flash_forward, _flash_backward),
    BlockKernel("efficient", "cuda", _HALF | {torch.float32}, True, False, 8, _efficient_forward, _efficient_backward),
    BlockKernel("cudnn", "cuda", _HALF, False, True, 8, _cudnn_forward, _cudnn_backward),
)
"""The first row that fits is taken: cuDNN stays below flash, of which it is the like, for who removes flash."""
