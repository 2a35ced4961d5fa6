"""Tensor parallelism: the ranks of a group share each layer, of a model that knows nothing of it.

`divide` finds or checks a plan, and gives what a strategy needs to apply it. User code then computes with `Sharded`
tensors, which have global shapes and this rank's part of the memory and the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.mesh import Mesh
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.tensor.apply import TensorParallel, applied
from lightning_4d.parallel.tensor.discover import find_plan
from lightning_4d.parallel.tensor.explain import (
    BlockCollectives,
    Division,
    block_collectives,
    divisions,
    whole_fraction,
)
from lightning_4d.parallel.tensor.plan import STYLES, Choice, TensorPlan, explicit_plan
from lightning_4d.parallel.tensor.sharded import Sharded

__all__ = [
    "STYLES",
    "BlockCollectives",
    "Choice",
    "Division",
    "Sharded",
    "TensorOptions",
    "TensorParallel",
    "TensorPlan",
    "applied",
    "block_collectives",
    "divide",
    "divisions",
    "explicit_plan",
    "find_plan",
    "whole_fraction",
]


@dataclass(frozen=True)
class TensorOptions:
    """What a user says about tensor parallelism; see ``NDStrategy``."""

    plan: Mapping[str, str] | Literal["auto"] = "auto"
    sequence_parallel: bool = False
    compile_blocks: bool = False


def divide(root: nn.Module, blocks: Sequence[Block], mesh: Mesh, options: TensorOptions) -> TensorParallel | None:
    """Prepare ``root`` for the tensor-parallel axis of ``mesh``; None where that has one rank.

    Parameters are divided by `TensorParallel.distribute`, when their values are there.

    Which ranks must call: all ranks of the tensor-parallel group.

    Raises:
        UnsupportedError: a plan that does not fit, or nothing that could be divided.
    """
    size = mesh.layout.tensor_parallel_size
    if size == 1:
        return None
    if options.compile_blocks:
        raise UnsupportedError(
            explain(
                f"compile_blocks=True with tensor_parallel_size={size}",
                "the compiler does not follow tensors that are in parts over ranks",
                "use compile_blocks=False",
            )
        )
    plan = find_plan(root, blocks, size) if options.plan == "auto" else explicit_plan(root, options.plan, size)
    return TensorParallel(root, plan, mesh["tp"], blocks, sequence_parallel=options.sequence_parallel)
