"""The random number generators of one rank as a tensor, so that they fit into a checkpoint."""

from __future__ import annotations

import json
import random
from typing import Any

import torch
from torch import Tensor


def capture() -> Tensor:
    """Return the states of Python's, NumPy's and torch's (CPU and current CUDA device) generators: uint8, 1-D, CPU."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().tolist()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    try:
        import numpy as np

        name, keys, *rest = np.random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        pass
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def restore(encoded: Tensor) -> None:
    """Set the generators to what :func:`capture` returned."""
    state = json.loads(bytes(encoded.cpu().tolist()))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
    if "numpy" in state:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
