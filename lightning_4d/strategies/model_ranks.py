"""Ranks that work together on the same samples: they must read the same batches and draw the same random numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.mesh import made_once
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.context import ContextParallel, divided, make_groups, ulysses_size_of
from lightning_4d.parallel.hooks import Hook
from lightning_4d.parallel.pipeline.passes import Unwind
from lightning_4d.parallel.same_way import SameWay, together
from lightning_4d.parallel.tensor import applied
from lightning_4d.strategies.same_batch import SameBatch

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
    if strategy._options.compile_blocks:
        raise UnsupportedError(
            explain(
                f"compile_blocks=True with context_parallel_size={size}",
                "the compiler does not see through tensors whose sequence is divided among ranks",
                "leave compile_blocks at False",
            )
        )
    ulysses = ulysses_size_of(options.attention, options.ulysses_size, size, strategy.num_processes)
    ranks = strategy.mesh.context_parallel_ranks
    groups = made_once(("context", ulysses, *map(tuple, ranks)), lambda: make_groups(ranks, ulysses))
    context = ContextParallel(module, blocks, groups, options.sequence_dim)
    context.install_inside()
    return context


def watch_blocks(blocks: Sequence[Block], strategy: NDStrategy) -> None:
    """Let ranks that run steps together compare their ways before a block, if their code asked for its rank."""
    if strategy.mesh.same_samples.size() > 1:
        for block in blocks:
            # Before FSDP2's own, which waits for the other ranks.
            block.module.register_forward_pre_hook(Hook(_at_block, block.name), prepend=True)


def _at_block(name: str, *_: Any) -> None:
    together(f"block {name!r}")


class ModelRanks:
    """Runs steps on the ranks that work together on the same samples.

    Made at set-up. Which ranks must call: all.
    """

    def __init__(self, strategy: NDStrategy) -> None:
        self._context = divided(strategy._module)
        self._tensor = applied(strategy._module)
        layout, device = strategy.layout, strategy.root_device
        shared = strategy.mesh.same_samples
        self._same_way = SameWay(shared.get_group(), device, (Unwind,)) if shared.size() > 1 else None
        self._same = [
            SameBatch(name, strategy.mesh[axis].get_group(), device)
            for axis, name in _AXES.items()
            if layout.axis_sizes[axis] > 1
        ]

    def check(self, name: str, batch: Any) -> None:
        """Compare the batch of the step called ``name`` now and then.

        Which ranks must call: all, in every step.

        Raises:
            UnsupportedError: ranks that work on the same samples read different ones.
        """
        for same in self._same:
            same.check(name, batch)

    def checked(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step`` with its batch compared now and then, and as :meth:`in_parts`."""
        step = self.in_parts(step)
        if not self._same:
            return step

        def run(*args: Any, **kwargs: Any) -> Any:
            self.check(getattr(step, "__name__", "a step"), (args, kwargs))
            return step(*args, **kwargs)

        return run

    def in_parts(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step`` with sequences and layers divided inside, and its result whole."""
        context, tensor, same_way = self._context, self._tensor, self._same_way
        if same_way is None:
            return step
        name = getattr(step, "__name__", "a step")

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            with same_way.step(name):
                return step(*args, **kwargs) if context is None else context.run(step, *args, **kwargs)

        return run if tensor is None else functools.wraps(step)(tensor.step(run))

    def backward(self) -> AbstractContextManager[Any]:
        """A context for backward, in which checkpointed code runs again."""
        return nullcontext() if self._tensor is None else self._tensor.backward()


_AXES = {"pp": "pipeline", "cp": "context-parallel", "tp": "tensor-parallel"}
