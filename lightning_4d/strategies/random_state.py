"""The random number generators of one rank, in a form that fits into a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from lightning_4d.layout import ParallelLayout
from lightning_4d.mesh import Mesh


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


def share(mesh: Mesh, layout: ParallelLayout) -> None:
    """Give the ranks that read the same data the same random state, so that they read it in the same order.

    Which ranks must call: all.
    """
    for axis, size in layout.axis_sizes.items():
        if size > 1 and not axis.startswith("dp_"):
            box = [(capture(), torch.initial_seed())]
            dist.broadcast_object_list(box, group=mesh[axis].get_group(), group_src=0)
            state, seed = box[0]
            torch.manual_seed(seed)  # what `torch.initial_seed()` tells
            restore({key: value for key, value in state.items() if key != "cuda"})


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
