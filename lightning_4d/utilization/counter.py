"""Count the FLOPs of operations while they run, by phase (forward, backward, recompute) and by block.

Counted are matrix products, convolutions and attention, as the field does; elementwise work, norms and lookups are not.
Attention through ``F.scaled_dot_product_attention`` is counted as the call, not as the kernel that it becomes, so that
the count is the same on every device and whether it is causal is known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_4d import _torch_private as private

AttentionFlops = Literal["causal", "full"]
SMALL = 128  # a dimension of a matrix product below this cannot fill tensor cores
aten = torch.ops.aten
_OpOverload = type(aten.mm.default)
_DEVICE = torch.ops.prim.device.default


class Phase(StrEnum):
    """What an operation belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"  # a forward repeated during backward: activation checkpointing in the user's own code
    KERNEL = "kernel"  # what fused attention repeats inside its backward


@dataclass(frozen=True)
class Flops:
    """FLOPs of some operations.

    Attributes:
        total: all of them, attention in full.
        attention: the part in attention (scores and their product with the values), in full.
        masked: the part of ``attention`` above the diagonal of causal calls.
    """

    total: int = 0
    attention: int = 0
    masked: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.total + other.total, self.attention + other.attention, self.masked + other.masked)

    def of(self, attention: AttentionFlops) -> int:
        """Return the number in one of the two conventions: causal attention counted in half, or in full."""
        return self.total - self.masked if attention == "causal" else self.total


class FlopCounter:
    """Counts inside :meth:`running`.

    Args:
        blocks: by name, modules whose forward FLOPs are also counted apart.
    """

    def __init__(self, blocks: Mapping[str, nn.Module] | None = None) -> None:
        self.phases: dict[Phase, Flops] = {phase: Flops() for phase in Phase}
        self.blocks: dict[str, Flops] = {name: Flops() for name in blocks or {}}
        self.dtypes: Counter[torch.dtype] = Counter()  # forward FLOPs by dtype of the operands
        self.small = 0  # forward FLOPs of matrix products with a small dimension
        self.unknown: set[str] = set()  # operations that may compute much, and have no formula
        self.attention_calls: Counter[str] = Counter()  # forward calls: "causal", "masked" or "full"
        self._names = {module: name for name, module in (blocks or {}).items()}
        self._formulas = {**FlopCounterMode(display=False).flop_registry, **_FORMULAS}
        self._in_backward = False
        self._in_function = False  # inside the forward of a custom Function that is being recomputed
        self._whole: set[Any] = set()  # operations that do not decompose
        self._silent = False
        self._convert: Callable[[Any], Any] | None = None
        self._open_blocks: list[str] = []

    @contextmanager
    def running(self, convert: Callable[[Any], Any] | None = None) -> Iterator[None]:
        """Count what runs inside. Hooks for the blocks are removed again at the end.

        Args:
            convert: applied to each argument of each operation before it runs.
        """
        self._convert = convert
        attention = _AttentionMode(self)
        with ExitStack() as stack:
            for module, name in self._names.items():
                stack.callback(module.register_forward_pre_hook(self._entering(name), prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leaving, always_call=True).remove)
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention.call))
            stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", self._function_apply()))
            stack.enter_context(private.dispatch_mode(self._dispatch))
            stack.enter_context(attention)
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """What runs inside is a backward; forward operations in it are recomputation."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    @property
    def phase(self) -> Phase:
        """The phase of an operation that runs now."""
        if not self._in_backward:
            return Phase.FORWARD
        # Backward runs without grad mode; checkpointing, of either kind, turns it on to repeat a forward.
        return Phase.RECOMPUTE if torch.is_grad_enabled() or self._in_function else Phase.BACKWARD

    def add(self, flops: Flops, phase: Phase, dtype: torch.dtype | None = None) -> None:
        """Add an operation's FLOPs to its phase, and in a forward to the block that is running."""
        self.phases[phase] += flops
        if phase is Phase.FORWARD:
            if dtype is not None:
                self.dtypes[dtype] += flops.total
            for name in set(self._open_blocks):
                self.blocks[name] += flops

    @property
    def is_silent(self) -> bool:
        """Whether :meth:`silence` is in force."""
        return self._silent

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Do not count what runs inside."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self._open_blocks.append(name)

    def _leaving(self, *_: Any) -> None:
        if self._open_blocks:
            self._open_blocks.pop()

    def _function_apply(self) -> Any:
        """Stand in for ``autograd.Function.apply``, whose forward runs without grad mode also when it is recomputed."""
        original = torch.autograd.Function.__dict__["apply"].__func__

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            before = self._in_function
            self._in_function = before or (self._in_backward and torch.is_grad_enabled())
            try:
                return original(cls, *args, **kwargs)
            finally:
                self._in_function = before

        return classmethod(apply)

    def _dispatch(self, mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _DEVICE:  # autograd asks for it all the time: most of what a fake run dispatches
            return func(*args, **kwargs)
        if self._convert is not None and not _makes_constant(func):
            args = tuple(self._convert(arg) for arg in args)
            kwargs = {name: self._convert(arg) for name, arg in kwargs.items()}
        if self._silent:
            return func(*args, **kwargs)
        key = getattr(func, "overloadpacket", func)
        formula = self._formulas.get(key)
        if formula is None:
            if _may_decompose(func) and func not in self._whole:
                with mode:
                    out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
                self._whole.add(func)
            if _is_suspect(func):
                self.unknown.add(str(key))
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        self._count(str(getattr(func, "_opname", key)), int(formula(*args, **kwargs, out_val=out)), args)
        return out

    def _count(self, name: str, flops: int, args: tuple[Any, ...]) -> None:
        phase = self.phase
        is_attention = "attention" in name or "attn" in name
        if is_attention and phase is Phase.FORWARD:
            self.attention_calls["full"] += 1
        dtype = next((a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
        self.add(Flops(flops, flops if is_attention else 0), phase, dtype)
        if phase is Phase.FORWARD and name in _MATMULS and _is_small(name, args):
            self.small += flops


_MATMULS = ("mm", "addmm", "bmm", "baddbmm")


def _is_small(name: str, args: tuple[Any, ...]) -> bool:
    a, b = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
    return min(*a.shape[-2:], b.shape[-1]) < SMALL


def _makes_constant(func: Any) -> bool:
    """Whether the operation takes in a new real tensor: ``torch.tensor(2)``, whose value stays known."""
    return isinstance(func, _OpOverload) and func.name().startswith("aten::lift")


def _may_decompose(func: Any) -> bool:
    return isinstance(func, _OpOverload) and func.namespace == "aten" and not func.name().startswith("aten::sym_")


# Own operations of torch that compute much and have no formula.
_HEAVY = ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer", "_cdist_forward", "linalg_", "_linalg_", "_fft_")
_LIGHT_NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "fsdp", "inductor")


def _is_suspect(func: Any) -> bool:
    """Whether the operation may compute much: another library's, a higher-order one, or a known one without formula."""
    if not isinstance(func, _OpOverload):
        return True
    name = func.name().split("::")[-1]
    if func.namespace not in _LIGHT_NAMESPACES:
        return True
    return name.startswith(_HEAVY) and not name.startswith("linalg_vector_norm")


# -------------------------------------------------------------------------------------------------- further formulas


def _mv(a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _addmv(_: Tensor, a: Tensor, *__: Any, **___: Any) -> int:
    return 2 * a.numel()


def _grouped_mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Each row of ``a`` (or, with 2-d ``b``, each summed index) meets one group."""
    return 2 * a.numel() * b.shape[-1]


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    scores, values = attention_matmuls(q, k, v)
    return scores + values


def _cpu_flash_backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> int:
    scores, values = attention_matmuls(q, k, v)
    return 3 * scores + 2 * values


_FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mv: _mv,
    aten.addmv: _addmv,
    aten.dot: _mv,
    aten.vdot: _mv,
    private.GROUPED_MM: _grouped_mm,
    private.CPU_FLASH_ATTENTION: _cpu_flash,
    private.CPU_FLASH_ATTENTION_BACKWARD: _cpu_flash_backward,
}


# --------------------------------------------------------------------------------------------------------- attention


def attention_matmuls(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Return the FLOPs of ``q @ k.T`` and of ``scores @ v`` without a mask.

    Shapes: q (..., Tq, D), k (..., Tk, D), v (..., Tk, Dv).
    """
    batch = math.prod(q.shape[:-2])
    pairs = batch * q.shape[-2] * k.shape[-2]
    return 2 * pairs * q.shape[-1], 2 * pairs * v.shape[-1]


def masked_fraction(queries: int, keys: int) -> float:
    """Return which part of the scores a causal mask leaves out: by convention a half, where lengths are equal."""
    if queries == keys:
        return 0.5
    kept = sum(min(i + 1, keys) for i in range(queries))
    return 1 - kept / (queries * keys)


class _AttentionMode(TorchFunctionMode):
    """Replaces calls of scaled_dot_product_attention by one node of the graph that counts itself."""

    def __init__(self, counter: FlopCounter) -> None:
        super().__init__()
        self._counter = counter
        self._original = F.scaled_dot_product_attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._original and not self._counter.is_silent:
            return self.call(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))

        def real(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with self._counter.silence(), torch.autocast(q.device.type, enabled=False):
                mask = attn_mask
                if mask is not None and mask.is_floating_point():
                    mask = mask.to(q.dtype)
                return self._original(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        phase = self._counter.phase
        if phase is Phase.FORWARD:
            kind = "causal" if is_causal else "full" if attn_mask is None else "masked"
            self._counter.attention_calls[kind] += 1
        return _Attention.apply(query, key, value, attn_mask, real, self._counter, phase, is_causal)


def _autocast(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype is not torch.float64:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        real: Callable[[Tensor, Tensor, Tensor], Tensor],
        counter: FlopCounter,
        phase: Phase,
        is_causal: bool,
    ) -> Tensor:
        out = real(q, k, v)  # the shape and the layout in memory are the kernel's
        ctx.save_for_backward(q, k, v, mask)
        ctx.counter, ctx.is_causal = counter, is_causal
        scores, values = attention_matmuls(q, k, v)
        counter.add(_attention_flops(scores + values, q, k, is_causal), phase, q.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, mask = ctx.saved_tensors
        needs_q, needs_k, needs_v, needs_mask = ctx.needs_input_grad[:4]
        scores, values = attention_matmuls(q, k, v)
        through_scores = needs_q or needs_k or needs_mask
        backward = values * (needs_v + through_scores) + scores * (needs_q + needs_k)
        counter: FlopCounter = ctx.counter
        counter.add(_attention_flops(backward, q, k, ctx.is_causal), Phase.BACKWARD)
        counter.add(_attention_flops(scores, q, k, ctx.is_causal), Phase.KERNEL)
        empty = [
            torch.empty_like(x) if need else None
            for x, need in zip((q, k, v, mask), ctx.needs_input_grad, strict=False)
        ]
        return (*empty, None, None, None, None)


def _attention_flops(flops: int, q: Tensor, k: Tensor, is_causal: bool) -> Flops:
    masked = round(flops * masked_fraction(q.shape[-2], k.shape[-2])) if is_causal else 0
    return Flops(flops, flops, masked)
