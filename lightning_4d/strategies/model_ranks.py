"""Ranks that work together on the same samples: they must read the same batches and draw the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.context import ContextParallel, divided, make_groups, ulysses_size_of
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
        layout, device = strategy.layout, strategy.root_device
        self._same = [
            SameBatch(f"{name}-parallel", strategy.mesh[axis].get_group(), device)
            for axis, name in (("cp", "context"), ("tp", "tensor"))
            if layout.axis_sizes[axis] > 1
        ]

    def running(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, called ``name``, with its batch compared now and then, and its result whole."""
        context = self._context
        if not self._same:
            return step

        def run(*args: Any, **kwargs: Any) -> Any:
            for same in self._same:
                same.check(name, (args, kwargs))
            return step(*args, **kwargs) if context is None else context.run(step, *args, **kwargs)

        return run
