"""The random number generators of one rank, in a form that fits into a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's (CPU and current CUDA device) generators, as plain data."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    try:
        import numpy as np

        name, keys, *rest = np.random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        pass
    return state


def restore(state: dict[str, Any]) -> None:
    """Set the generators to what :func:`capture` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
