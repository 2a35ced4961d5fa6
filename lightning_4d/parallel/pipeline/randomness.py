"""Random numbers of a step that runs in pieces on several ranks.

Every stage repeats the user's code before the blocks and must draw what the other stages draw, and no stage may draw
from the stream that shuffles data, or ranks would read different batches. So each piece draws from generators seeded by
a key of its own, and the process's generators are put back after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator

import torch


def seed_of(*key: object) -> int:
    """Return a seed in [0, 2^63) for a key of numbers and strings; equal keys give equal seeds on all ranks."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


@contextlib.contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Put the process's generators back after a step, whatever it drew: the next batch must not depend on it."""
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        if device.type == "cuda":
            stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
        _keep_host(stack)
        yield


@contextlib.contextmanager
def seeded(seed: int, device: torch.device, *, host: bool) -> Iterator[None]:
    """Draw from torch's generators (of the CPU and of ``device``) seeded by ``seed`` inside, then put them back.

    Args:
        seed: see :func:`seed_of`.
        device: the device whose generator is meant besides the CPU's.
        host: the generators of Python and NumPy as well.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        if host:
            _seed_host(seed, stack)
        yield


def _keep_host(stack: contextlib.ExitStack) -> None:
    stack.callback(random.setstate, random.getstate())
    if "numpy" in sys.modules:
        import numpy as np

        stack.callback(np.random.set_state, np.random.get_state())


def _seed_host(seed: int, stack: contextlib.ExitStack) -> None:
    _keep_host(stack)
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(seed % 2**32)


def host_state() -> tuple[object, ...]:
    """Return the states of Python's and NumPy's generators, to compare."""
    state: tuple[object, ...] = (random.getstate(),)
    if "numpy" in sys.modules:
        import numpy as np

        name, keys, *rest = np.random.get_state()
        state += (name, keys.tobytes(), *rest)  # pyright: ignore[reportAttributeAccessIssue]
    return state
