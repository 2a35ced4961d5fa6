"""Ring attention: keys and values travel from rank to rank while queries stay.

Shapes: B batch, H query heads, G key and value heads, T this rank's queries, S a rank's keys, D head size.

Each step computes this rank's queries with one rank's keys, while the next rank's keys are on their way. The parts are
merged by their log-sum-exp in fp32 (fp64 for fp64 inputs). Backward computes each part again with the log-sum-exp of
the whole row; the gradients of keys and values travel with them and come home in one hop less than there are ranks,
since a rank adds its own part at home. At no time does a rank hold more than two ranks' keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_4d.parallel.context.kernels import BlockKernel, choose_kernel
from lightning_4d.parallel.context.layout import Run
from lightning_4d.parallel.same_way import together


@dataclass(frozen=True)
class Ring:
    """Who holds what.

    Args:
        group: the ranks of the ring in their order.
        query_runs: the positions of each rank's queries.
        key_runs: the positions of each rank's keys and values.
    """

    group: dist.ProcessGroup
    query_runs: tuple[tuple[Run, ...], ...]
    key_runs: tuple[tuple[Run, ...], ...]

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.key_runs)

    @property
    def rank(self) -> int:
        """This rank's place."""
        return self.group.rank()


def ring_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    ring: Ring,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries with all ranks' keys; differentiable in queries, keys and values.

    Args:
        q_BHTD: this rank's queries.
        k_BGSD: this rank's keys, with as many heads as the queries or a divisor of it.
        v_BGSD: this rank's values, of the shape of the keys.
        ring: the ranks and their positions.
        mask: added to the scores of this rank's queries with *all* keys in the order of the sequence; broadcastable to
            (B, H, T, S of all ranks), of the queries' dtype. Not together with ``is_causal``. Its gradient is not
            computed.
        is_causal: a query sees the keys at its own and earlier positions.
        scale: of the scores; by default 1 / sqrt(D).

    Returns:
        (B, H, T, D). Queries that may see no key give 0.

    Which ranks must call: all of the ring, with equal shapes but for T and S.
    """
    scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
    return _RingAttention.apply(q_BHTD, k_BGSD, v_BGSD, mask, ring, is_causal, scale)


# ------------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class _Part:
    """Queries and keys, as ranges of a rank's own, that one call of a kernel serves.

    ``rule``: "all" keys are seen, the "diagonal" of equal positions limits them, or "positions" tell which are.
    """

    queries: Run
    keys: Run
    rule: str


@lru_cache(maxsize=4096)
def visible_parts(query_runs: tuple[Run, ...], key_runs: tuple[Run, ...], is_causal: bool) -> tuple[_Part, ...]:
    """Divide the work of one step into calls of a kernel, leaving out what causality hides.

    >>> visible_parts(((2, 4), (4, 6)), ((0, 2), (6, 8)), True)
    (_Part(queries=(0, 4), keys=(0, 2), rule='all'),)
    """
    queries, keys = _count(query_runs), _count(key_runs)
    if not queries or not keys:
        return ()
    if not is_causal:
        return (_Part((0, queries), (0, keys), "all"),)
    if query_runs == key_runs:
        return (_Part((0, queries), (0, keys), "diagonal"),)
    parts: list[_Part] = []
    offset = 0
    for start, stop in query_runs:
        seen_by_all, seen_by_some = _count_below(key_runs, start + 1), _count_below(key_runs, stop)
        if seen_by_all != seen_by_some:
            return (_Part((0, queries), (0, keys), "positions"),)
        if parts and parts[-1].keys == (0, seen_by_all):
            parts[-1] = _Part((parts[-1].queries[0], offset + stop - start), (0, seen_by_all), "all")
        elif seen_by_all:
            parts.append(_Part((offset, offset + stop - start), (0, seen_by_all), "all"))
        offset += stop - start
    return tuple(parts)


def _count(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _count_below(runs: Sequence[Run], position: int) -> int:
    return sum(max(0, min(stop, position) - start) for start, stop in runs)


def positions(runs: Sequence[Run], device: torch.device) -> Tensor:
    """The positions that ``runs`` list: (their number,), int64."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in runs] or [torch.empty(0).long()])


def take_runs(tensor: Tensor, dim: int, runs: Sequence[Run]) -> Tensor:
    """The parts of ``tensor`` at ``runs`` along ``dim``: a view if there is one run."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in runs]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


class _Work:
    """The calls of the kernel on one rank: which queries, which keys, which mask."""

    def __init__(
        self, ring: Ring, mask: Tensor | None, is_causal: bool, scale: float, like: Tensor, kernel: BlockKernel
    ) -> None:
        self.ring = ring
        self.mask = mask
        self.is_causal = is_causal
        self.scale = scale
        self.kernel = kernel
        self._like = like

    def parts(self, source: int) -> tuple[_Part, ...]:
        return visible_parts(self.ring.query_runs[self.ring.rank], self.ring.key_runs[source], self.is_causal)

    def mask_of(self, part: _Part, source: int) -> Tensor | None:
        """The additive mask of one call, (.., T, S), or None."""
        keys = self.ring.key_runs[source]
        if part.rule == "positions":
            q, k = (positions(r, self._like.device) for r in (self.ring.query_runs[self.ring.rank], keys))
            hidden = q[:, None] < k[None, :]
            return self._like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        if self.mask is None:
            return None
        mask = self.mask if self.mask.shape[-1] == 1 else take_runs(self.mask, -1, keys)
        return mask.expand(*mask.shape[:-2], part.queries[1] - part.queries[0], part.keys[1] - part.keys[0])

    def forward(self, q: Tensor, kv: Tensor, part: _Part, source: int) -> tuple[Tensor, Tensor]:
        """Out and log-sum-exp of one call, the latter -inf for queries that see no key in it."""
        k, v = self._keys(q, kv, part)
        mask, blind = self.mask_of(part, source), None
        if mask is not None:
            blind = (mask == float("-inf")).all(-1)
            mask = mask.masked_fill(blind.unsqueeze(-1), 0.0)  # kernels differ in what they make of such a row
        out, lse = self.kernel.forward(q, k, v, mask, part.rule == "diagonal", self.scale)
        return out, lse if blind is None else lse.masked_fill(blind, float("-inf"))

    def backward(
        self, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, part: _Part, source: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self._keys(q, kv, part)
        mask = self.mask_of(part, source)
        causal = part.rule == "diagonal"
        grad_q, grad_k, grad_v = self.kernel.backward(grad, q, k, v, out, lse, mask, causal, self.scale)
        return grad_q, _of_groups(grad_k, kv.shape[2]), _of_groups(grad_v, kv.shape[2])

    def _keys(self, q: Tensor, kv: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
        kv = kv[:, :, :, part.keys[0] : part.keys[1]]
        if not self.kernel.grouped and kv.shape[2] != q.shape[1]:
            kv = kv.repeat_interleave(q.shape[1] // kv.shape[2], dim=2)
        return kv[0], kv[1]


def _of_groups(grad: Tensor, heads: int) -> Tensor:
    """Add up the gradients of repeated heads."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2, dtype=_accurate(grad.dtype))


def _accurate(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over parts."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ----------------------------------------------------------------------------------------------------- communication


class Hop:
    """One tensor on its way to the next rank, another on its way here."""

    def __init__(self, sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
        together("attention")
        size, rank = group.size(), group.rank()
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size))
        self._sent = sent  # alive until it has been sent
        self._received = received
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor:
        """The tensor that arrived."""
        for work in self._works:
            work.wait()
        return self._received


def _send_keys(kv: Tensor, ring: Ring, source: int) -> Hop:
    """Pass on the keys that came from ``source``, and receive those of the rank before it."""
    coming = _count(ring.key_runs[(source - 1) % ring.size])
    return Hop(kv, kv.new_empty((*kv.shape[:3], coming, kv.shape[4])), ring.group)


# ---------------------------------------------------------------------------------------------------------- autograd


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring, is_causal: bool, scale: float
    ) -> Tensor:
        kernel = choose_kernel(q.device.type, q.dtype, masked=mask is not None or _needs_positions(ring, is_causal))
        q = q.contiguous()
        kv = torch.stack((k, v))
        work = _Work(ring, mask, is_causal, scale, q, kernel)
        out, lse = _forward(work, q, kv)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.settings = (ring, is_causal, scale, kernel)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask = ctx.saved_tensors
        ring, is_causal, scale, kernel = ctx.settings
        work = _Work(ring, mask, is_causal, scale, q, kernel)
        grad_q, grad_k, grad_v = _backward(work, grads[0].contiguous(), q, torch.stack((k, v)), out, lse)
        return grad_q, grad_k, grad_v, None, None, None, None


def _needs_positions(ring: Ring, is_causal: bool) -> bool:
    mine = ring.query_runs[ring.rank]
    return any(part.rule == "positions" for keys in ring.key_runs for part in visible_parts(mine, keys, is_causal))


def _forward(work: _Work, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Out in the dtype of ``q``, and the log-sum-exp, finite (0 for queries that see no key)."""
    ring, accurate = work.ring, _accurate(q.dtype)
    out = torch.zeros_like(q, dtype=accurate)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=accurate, device=q.device)
    for step in range(ring.size):
        source = (ring.rank - step) % ring.size
        hop = _send_keys(kv, ring, source) if step + 1 < ring.size else None
        for part in work.parts(source):
            rows = slice(*part.queries)
            merge(out[:, :, rows], lse[:, :, rows], *work.forward(q[:, :, rows], kv, part, source))
        if hop is not None:
            kv = hop.wait()
    return out.to(q.dtype), lse.masked_fill_(lse == float("-inf"), 0.0)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add to ``out`` (B, H, T, D) and ``lse`` (B, H, T), in place, attention with further keys."""
    total = torch.logaddexp(lse, part_lse.to(lse.dtype))
    # Where neither has seen a key, -inf minus -inf is no number.
    keep, take = (torch.exp(each - total).nan_to_num_(0.0).unsqueeze(-1) for each in (lse, part_lse))
    out.mul_(keep).addcmul_(part.to(out.dtype), take.to(out.dtype))
    lse.copy_(total)


def _backward(
    work: _Work, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    ring, accurate = work.ring, _accurate(q.dtype)
    grad_q = torch.zeros_like(q, dtype=accurate)
    home = torch.zeros_like(kv, dtype=accurate)  # of this rank's own keys, as far as its own queries go
    passing: Tensor | None = None  # the gradient that travels with the keys
    travel: Hop | None = None
    for step in range(ring.size):
        source = (ring.rank - step) % ring.size
        hop = _send_keys(kv, ring, source) if step + 1 < ring.size else None
        grad_kv = home if step == 0 else torch.zeros_like(kv, dtype=accurate)
        for part in work.parts(source):
            rows, keys = slice(*part.queries), slice(*part.keys)
            g, q_rows, o, m = (tensor[:, :, rows].contiguous() for tensor in (grad, q, out, lse))
            part_q, part_k, part_v = work.backward(g, q_rows, kv, o, m, part, source)
            grad_q[:, :, rows] += part_q
            grad_kv[0, :, :, keys] += part_k
            grad_kv[1, :, :, keys] += part_v
        if step > 0:
            passing = grad_kv if travel is None else travel.wait().add_(grad_kv)
            coming = _count(ring.key_runs[(source - 1) % ring.size])
            travel = Hop(passing, passing.new_empty((*kv.shape[:3], coming, kv.shape[4])), ring.group)
        if hop is not None:
            kv = hop.wait()
    if travel is not None:
        home += travel.wait()
    return grad_q.to(q.dtype), home[0].to(kv.dtype), home[1].to(kv.dtype)
