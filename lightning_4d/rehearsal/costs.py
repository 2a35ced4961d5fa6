"""Forward and backward FLOPs of blocks, where equal ones are counted once: models of a hundred blocks in a second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_4d.parallel.pipeline.record import BlockRecord, Slot, StepRecord
from lightning_4d.parallel.pipeline.split import divide
from lightning_4d.strategies.pipeline_split import block_costs

__all__ = ["split_by_cost"]


def split_by_cost(trainer: Trainer, module: LightningModule, piece: Any, record: StepRecord, stages: int) -> list[int]:
    """Return the first block of each stage, as the strategy's own split does."""
    alike = _alike(module, record)
    with _passed_through(module, [record.order[number] for number, first in enumerate(alike) if number != first]):
        costs, before, after = block_costs(trainer, module, piece, record)
    return divide([costs[first] for first in alike], stages, before=before, after=after)


def _alike(module: nn.Module, record: StepRecord) -> list[int]:
    """Return for each block the first one that costs the same: of its class, parameters, input and output.

    Blocks are told apart where one could not stand aside: it returns something else than one tensor like its input.
    """
    known: dict[Any, int] = {}
    found: list[int] = []
    for number, block in enumerate(record.blocks):
        own = module.get_submodule(block.name)
        state, before = _state(block), _state(record.blocks[number - 1]) if number else None
        key: Any = number  # like none
        if state is not None and state == before and not block.attributes:
            key = type(own), str(own), state, tuple((n, p.shape, p.dtype) for n, p in own.named_parameters())
        found.append(known.setdefault(key, number))
    return found


def _state(block: BlockRecord) -> Any:
    """Shape and dtype of the one tensor that a block returns; None where it returns something else."""
    leaves = block.leaves
    if len(leaves) != 1 or not isinstance(leaves[0], Slot) or block.structure.type is not None:
        return None
    return leaves[0].spec.shape, leaves[0].spec.dtype


@contextmanager
def _passed_through(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let blocks hand on their first argument."""
    modules = [module.get_submodule(name) for name in names]
    before = [vars(one).get("forward") for one in modules]
    for one in modules:
        vars(one)["forward"] = _first_argument
    try:
        yield
    finally:
        for one, forward in zip(modules, before, strict=True):
            if forward is None:
                del vars(one)["forward"]
            else:
                vars(one)["forward"] = forward


def _first_argument(hidden: Any, *_: Any, **__: Any) -> Any:
    return hidden
