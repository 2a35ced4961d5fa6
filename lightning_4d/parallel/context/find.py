"""Find, in the arguments of a block, the tensor that holds the sequence, and the dim.

The block is run once on tensors without data, and what its attention takes for queries and keys is compared with the
sizes of the arguments. A wrong guess costs speed and nothing else: whatever dim is divided, the numbers are the same.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_4d import _torch_private as private
from lightning_4d._torch_private import tree_leaves, tree_map
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.sequence import attended_lengths, find_sequence_dim, may_hold_sequence
from lightning_4d.utilization.isolation import faked


def find_sequence(name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the index of the tensor among the leaves of (args, kwargs), and the dim.

    Raises:
        UnsupportedError: no argument has a dim as long as the sequences that the block attends to.
    """
    leaves = tree_leaves((args, kwargs))
    found = find_sequence_dim(leaves, attended_by(block, args, kwargs))
    if found is not None:
        return found
    shapes = [tuple(leaf.shape) for leaf in leaves if may_hold_sequence(leaf)]
    raise UnsupportedError(
        explain(
            f"block {name!r} with inputs of shapes {shapes} and context_parallel_size > 1",
            "context parallelism divides the sequence that a block attends to, and none was found",
            "name the dim by sequence_dim=, or leave context_parallel_size at 1",
        )
    )


def _drop_hooks(block: nn.Module) -> None:
    """What the user hooked in is not to see tensors without data; :func:`faked` puts the hooks back."""
    for module in block.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()


def attended_by(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The numbers of queries and keys in each attention of one call, in order; empty if the call cannot be followed."""
    lengths: list[int] = []

    def observe(mode: Any, op: Any, op_args: tuple[Any, ...], op_kwargs: dict[str, Any]) -> Any:
        lengths.extend(attended_lengths(op, op_args))
        return op(*op_args, **op_kwargs)

    device = next(
        (leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), torch.device("cpu")
    )
    try:
        with faked(block, device, {}) as run:
            _drop_hooks(block)
            given, named = tree_map(
                # A copy of a cache of keys and values, say, which the block would fill with tensors without data.
                lambda leaf: run.tensor(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf),
                (args, kwargs),
            )
            with torch.no_grad(), private.dispatch_mode(observe):
                block.forward(*given, **named)
    except Exception:
        pass  # a block that needs data to run: the convention decides
    return lengths
