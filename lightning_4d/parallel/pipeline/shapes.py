"""Know the record of a step at new shapes from records at others, so that dynamically padded batches need few runs.

Every size inside the model is taken to be an affine function of the batch's sizes, c0 + c1·T + ..., whose coefficients
follow from some records and must meet all others exactly. One record more than coefficients is needed, and sizes that
follow another rule are never predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_4d._torch_private import pytree
from lightning_4d.parallel.pipeline.batch import Signature
from lightning_4d.parallel.pipeline.record import BlockRecord, Slot, StepRecord, TensorSpec

_MOST = 16  # records kept for a family of shapes


class ShapeFamily:
    """Records of one step on batches that differ in sizes only."""

    def __init__(self) -> None:
        self._known: list[tuple[tuple[int, ...], StepRecord]] = []

    def add(self, signature: Signature, record: StepRecord) -> None:
        """Add a record that was made."""
        self._known = [*self._known[-_MOST + 1 :], (sizes_of(signature), record)]

    def predict(self, signature: Signature) -> StepRecord | None:
        """Return the record at these shapes if it follows from others, else None."""
        if len(self._known) < 3 or not _alike([record for _, record in self._known]):
            return None
        wanted = sizes_of(signature)
        rows = [_independent_sizes(sizes, self._columns(wanted)) for sizes, _ in self._known]
        inputs = np.array(rows, dtype=np.float64)
        outputs = np.array([_inner_sizes(record) for _, record in self._known], dtype=np.float64)
        rank = np.linalg.matrix_rank(inputs)
        if rank < inputs.shape[1] or len(rows) < rank + 1:
            return None
        coefficients, *_ = np.linalg.lstsq(inputs, outputs, rcond=None)
        if not np.allclose(inputs @ coefficients, outputs, rtol=0, atol=1e-6):
            return None
        found = np.array(_independent_sizes(wanted, self._columns(wanted)), dtype=np.float64) @ coefficients
        rounded = np.rint(found).astype(int)
        if not np.allclose(found, rounded, rtol=0, atol=1e-4) or (rounded < 0).any():
            return None
        return _with_sizes(self._known[-1][1], rounded.tolist())

    def _columns(self, wanted: tuple[int, ...]) -> list[int]:
        """Positions of sizes that vary, one for each set of positions that vary together."""
        every = [*(sizes for sizes, _ in self._known), wanted]
        seen: dict[tuple[int, ...], int] = {}
        for position, values in enumerate(zip(*every, strict=True)):
            if len(set(values)) > 1:
                seen.setdefault(values, position)
        return list(seen.values())


def sizes_of(signature: Signature) -> tuple[int, ...]:
    """Return all sizes of a batch's tensors in a row."""
    return tuple(size for _, shape, _ in signature for size in shape)


def family_of(signature: Signature) -> tuple[Any, ...]:
    """Return what batches that differ in sizes only have in common."""
    return tuple((path, len(shape), dtype) for path, shape, dtype in signature)


def _independent_sizes(sizes: Sequence[int], columns: Sequence[int]) -> list[int]:
    return [1, *(sizes[column] for column in columns)]


def _alike(records: Sequence[StepRecord]) -> bool:
    first = _map_specs(records[0], _without_sizes)
    return all(_map_specs(record, _without_sizes) == first for record in records[1:])


def _without_sizes(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=(0,) * len(spec.shape))


def _inner_sizes(record: StepRecord) -> list[int]:
    sizes: list[int] = []

    def note(spec: TensorSpec) -> TensorSpec:
        sizes.extend(spec.shape)
        return spec

    _map_specs(record, note)
    return sizes


def _with_sizes(record: StepRecord, sizes: list[int]) -> StepRecord:
    left = iter(sizes)
    return _map_specs(record, lambda spec: replace(spec, shape=tuple(next(left) for _ in spec.shape)))


def _map_specs(record: StepRecord, function: Callable[[TensorSpec], TensorSpec]) -> StepRecord:
    blocks = tuple(_map_block(block, function) for block in record.blocks)
    stubs = {
        name: tuple(pytree.tree_map(lambda leaf: _mapped(leaf, function), call) for call in calls)
        for name, calls in record.stubs.items()
    }
    hidden = None if record.hidden is None else replace(record.hidden, spec=function(record.hidden.spec))
    return replace(record, blocks=blocks, stubs=stubs, hidden=hidden)


def _mapped(leaf: Any, function: Callable[[TensorSpec], TensorSpec]) -> Any:
    return function(leaf) if isinstance(leaf, TensorSpec) else leaf


def _map_block(block: BlockRecord, function: Callable[[TensorSpec], TensorSpec]) -> BlockRecord:
    def slot(leaf: Any) -> Any:
        return Slot(leaf.number, function(leaf.spec)) if isinstance(leaf, Slot) else leaf

    attributes = tuple(replace(kept, slot=slot(kept.slot)) for kept in block.attributes)
    return replace(block, leaves=tuple(slot(leaf) for leaf in block.leaves), attributes=attributes)
