"""What a block's forward sees of the world beside its arguments: random states, autocast, default dtype and device.

Backward runs outside of the contexts of the forward, so a recompute has to bring them back.
"""

from __future__ import annotations

import contextlib
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
        before = RandomState.now(self.random.device, None)
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
            self.random.restore(now=before)
            yield


@dataclass(frozen=True)
class RandomState:
    """The states of torch's, Python's and numpy's global random number generators."""

    device: torch.device
    torch_cpu: Tensor
    torch_device: Tensor | None
    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None

    @staticmethod
    def now(device: torch.device, like: RandomState | None) -> RandomState:
        """Take the present states; those equal to ``like``'s share its memory."""
        numpy = sys.modules.get("numpy")
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        state = RandomState(
            device,
            torch.get_rng_state(),
            on_device,
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
        )
        return like if like is not None and state.equals(like) else state

    def equals(self, other: RandomState) -> bool:
        """Whether all generators would give the same numbers."""
        return (
            self.device == other.device
            and torch.equal(self.torch_cpu, other.torch_cpu)
            and _equal(self.torch_device, other.torch_device)
            and self.python == other.python
            and _numpy_key(self.numpy) == _numpy_key(other.numpy)
        )

    def restore(self, now: RandomState | None = None) -> None:
        """Set all generators back; those that are there already, if ``now`` is their state, need no setting."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.torch_device, self.device)
        if now is None or now.python != self.python:
            random.setstate(self.python)
        if self.numpy is not None and (now is None or _numpy_key(now.numpy) != _numpy_key(self.numpy)):
            sys.modules["numpy"].random.set_state(self.numpy)


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return torch.equal(first, second) if first is not None and second is not None else first is second


def _numpy_key(state: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return None if state is None else (state[0], state[1].tobytes(), *state[2:])


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
