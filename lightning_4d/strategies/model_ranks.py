"""Ranks that work together on the same samples: they must read the same batches and draw the same random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_4d._torch_private import tree_leaves
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.context import ContextParallel, divided, make_groups, ulysses_size_of

if TYPE_CHECKING:
    from lightning_4d.strategies.nd import NDStrategy


@dataclass(frozen=True)
class ContextOptions:
    """How context-parallel ranks divide sequences: see :class:`NDStrategy`."""

    attention: str
    ulysses_size: int | str
    sequence_dim: int | str


def install_context(module: nn.Module, blocks: Sequence[Block], strategy: NDStrategy) -> ContextParallel | None:
    """Register the inner hooks of context parallelism on the blocks; None without it.

    Which ranks must call: all.

    Raises:
        UnsupportedError: no blocks, compiled blocks, or sizes that do not divide.
    """
    size = strategy.layout.context_parallel_size
    if size == 1:
        return None
    options = strategy._context_options
    if strategy.has_stages:
        raise UnsupportedError(
            explain(
                f"context_parallel_size={size} with pipeline_parallel_size={strategy.layout.pipeline_parallel_size}",
                "pipeline stages send whole activations, and sequences are divided inside the blocks",
                "leave one of them at 1",
            )
        )
    if strategy._options.compile_blocks:
        raise UnsupportedError(
            explain(
                f"compile_blocks=True with context_parallel_size={size}",
                "the compiler does not see through tensors whose sequence is divided among ranks",
                "leave compile_blocks at False",
            )
        )
    ulysses = ulysses_size_of(options.attention, options.ulysses_size, size, strategy.num_processes)
    groups = make_groups(strategy.mesh.context_parallel_ranks, ulysses)
    context = ContextParallel(module, blocks, groups, options.sequence_dim)
    context.install_inside()
    return context


class ModelRanks:
    """Runs steps on the ranks that work together on the same samples.

    Made at set-up. Which ranks must call: all.
    """

    def __init__(self, strategy: NDStrategy) -> None:
        self._context = divided(strategy._module)
        self._same: SameBatches | None = None
        if self._context is not None:
            self._same = SameBatches(self._context.groups.group, strategy.root_device)

    def running(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, with its batch compared now and then, and its result whole."""
        context, same = self._context, self._same
        if context is None or same is None:
            return step

        def run(*args: Any, **kwargs: Any) -> Any:
            same.check((args, kwargs))
            return context.run(step, *args, **kwargs)

        return run


class SameBatches:
    """Compares batches within a group: the first ones, then at steps that double.

    Args:
        group: the ranks that must see the same.
        device: where the group's backend communicates.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._steps = 0

    def check(self, batch: Any) -> None:
        """Count a step, and compare its batch if it is due. Which ranks must call: all of the group.

        Raises:
            UnsupportedError: the ranks have different batches.
        """
        self._steps += 1
        if self._steps & (self._steps - 1):  # neither 1 nor a power of 2
            return
        mine = torch.tensor([_digest(batch)], dtype=torch.int64, device=self._device)
        highest, lowest = mine.clone(), mine.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._group)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self._group)
        if not torch.equal(highest, lowest):
            raise UnsupportedError(
                explain(
                    "ranks of one context-parallel group read different batches",
                    "they work on the same samples, so samplers and augmentation must not depend on the global rank",
                    "split data by trainer.strategy.data_parallel_rank and data_parallel_size, and seed everything "
                    "alike on all ranks",
                )
            )


def _digest(batch: Any) -> int:
    """A number of the tensors' contents, by sums: cheap on any device, and not equal by chance."""
    digest = hashlib.blake2b(digest_size=7)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(repr((leaf.shape, leaf.dtype, *_sums(leaf))).encode())
        elif isinstance(leaf, (int, float, str, bool)):
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest(), "big")


def _sums(tensor: Tensor) -> tuple[int, int]:
    as_bytes = tensor.detach().reshape(-1).contiguous().view(torch.uint8).long()
    weights = torch.arange(1, as_bytes.numel() + 1, device=as_bytes.device)
    return int(as_bytes.sum()), int((as_bytes * weights).sum())
