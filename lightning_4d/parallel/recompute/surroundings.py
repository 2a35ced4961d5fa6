"""What a block's forward sees of the world beside its arguments: random states, autocast, default dtype and device.

Backward runs outside of the contexts of the forward, so a recompute has to bring them back.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def now(device_type: str) -> _Autocast:
        return _Autocast(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))


@dataclass(frozen=True)
class Surroundings:
    """The state of the world at one call; :meth:`restored` brings it back for a recompute."""

    random: RandomState
    autocasts: tuple[_Autocast, ...]
    dtype: torch.dtype
    device: torch.device
    attention: tuple[bool, ...]

    @staticmethod
    def now(device: torch.device, like: Surroundings | None) -> Surroundings:
        """Take the present state.

        Args:
            device: where the block computes.
            like: the state at the call before; what is equal is shared with it.
        """
        autocasts = [_Autocast.now("cpu")]
        if device.type != "cpu" and torch.amp.is_autocast_available(device.type):
            autocasts.append(_Autocast.now(device.type))
        return Surroundings(
            RandomState.now(device, None if like is None else like.random),
            tuple(autocasts),
            torch.get_default_dtype(),
            torch.get_default_device(),
            _attention_kernels(),
        )

    @contextlib.contextmanager
    def restored(self, *, cache_casts: bool = True) -> Iterator[None]:
        """Run the body in this state, and bring the present one back afterwards.

        Args:
            cache_casts: let autocast keep cast weights within the body.
        """
        before = RandomState.now(self.random.device, self.random)
        dtype, kernels = torch.get_default_dtype(), _attention_kernels()
        with contextlib.ExitStack() as stack:
            for cast in self.autocasts:
                stack.enter_context(
                    torch.autocast(cast.device_type, cast.dtype, enabled=cast.enabled, cache_enabled=cache_casts)
                )
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            stack.callback(before.restore)
            stack.callback(torch.set_default_dtype, dtype)
            stack.callback(_set_attention_kernels, kernels)
            torch.set_default_dtype(self.dtype)
            _set_attention_kernels(self.attention)
            self.random.restore()
            yield


@dataclass(frozen=True)
class RandomState:
    """The states of torch's, Python's and numpy's global random number generators."""

    device: torch.device
    torch_cpu: Tensor
    torch_device: Tensor | None
    python: tuple[Any, ...]
    numpy: NumpyState | None

    @staticmethod
    def now(device: torch.device, like: RandomState | None) -> RandomState:
        """Take the present states; those equal to ``like``'s share its memory."""
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        numpy = NumpyState.now(None if like is None else like.numpy)
        state = RandomState(device, torch.get_rng_state(), on_device, random.getstate(), numpy)
        return like if like is not None and state.equals(like) else state

    def equals(self, other: RandomState) -> bool:
        """Whether all generators would give the same numbers."""
        return (
            self.device == other.device
            and torch.equal(self.torch_cpu, other.torch_cpu)
            and _equal(self.torch_device, other.torch_device)
            and self.python == other.python
            and self.numpy is other.numpy
        )

    def restore(self) -> None:
        """Set all generators back."""
        now = RandomState.now(self.device, self)
        if now is self:
            return
        torch.set_rng_state(self.torch_cpu)
        if self.torch_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.torch_device, self.device)
        if now.python != self.python:
            random.setstate(self.python)
        if self.numpy is not None and now.numpy is not self.numpy:
            self.numpy.restore()


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return torch.equal(first, second) if first is not None and second is not None else first is second


@dataclass(frozen=True)
class NumpyState:
    """The state of numpy's global generator. Reading and setting it is slow, and it rarely changes inside a model."""

    state: tuple[Any, ...]
    mark: bytes | None  # the generator's raw memory; None if it is not known how to read it

    @staticmethod
    def now(like: NumpyState | None) -> NumpyState | None:
        """Take the present state, ``like`` itself if that is certainly equal; None where numpy is not in use."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        mark = _raw_memory(numpy)
        # With a normal number left over from a pair, a draw need not touch the generator.
        has_left_over = like is not None and like.state[3]
        if like is not None and mark is not None and mark == like.mark and not has_left_over:
            return like
        return NumpyState(numpy.random.get_state(), mark)

    def restore(self) -> None:
        """Set the generator back."""
        sys.modules["numpy"].random.set_state(self.state)


def _raw_memory(numpy: Any) -> bytes | None:
    """The 624 words and the position of the Mersenne Twister, which every draw changes."""
    get = getattr(numpy.random, "get_bit_generator", None)  # from numpy 1.24 on
    generator = None if get is None else get()
    if generator is None or type(generator).__name__ != "MT19937":
        return None
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


def _attention_kernels() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _set_attention_kernels(kernels: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    setters = (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp)
    for setter, now, wanted in zip(setters, _attention_kernels(), kernels, strict=True):
        if now != wanted:
            setter(wanted)
