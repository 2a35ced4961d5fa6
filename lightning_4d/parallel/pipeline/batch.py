"""Cut a batch of any structure into microbatches, and put results of microbatches together again."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_4d.errors import UnsupportedError, explain

Path = tuple[Any, ...]


def rows_of(batch: Any, whole: frozenset[Path] = frozenset()) -> int | None:
    """Return the number of samples of a batch: the first size that most of its tensors share; None without tensors.

    Entries in ``whole`` are known to have no batch dimension.
    """
    sizes = Counter(tensor.shape[0] for path, tensor in _leaves(batch, ()) if tensor.dim() > 0 and path not in whole)
    return sizes.most_common(1)[0][0] if sizes else None


def batched_entries(batch: Any, rows: int, whole: frozenset[Path] = frozenset()) -> dict[Path, Tensor]:
    """Return the tensors of a batch whose first size is the number of samples, by their path; none of ``whole``."""
    return {p: t for p, t in _leaves(batch, ()) if t.dim() > 0 and t.shape[0] == rows and p not in whole}


def without_rows(batch: Any, smaller: Any) -> frozenset[Path]:
    """Return the paths of tensors whose first size is the same in a batch of fewer samples: they have no batch dim.

    None are known to have none where ``smaller`` is None.
    """
    sizes = {path: tensor.shape[0] for path, tensor in _leaves(smaller, ()) if tensor.dim() > 0}
    return frozenset(path for path, t in _leaves(batch, ()) if t.dim() > 0 and t.shape[0] == sizes.get(path))


def bounds(rows: int, pieces: int) -> list[tuple[int, int]]:
    """Return first and last-but-one row of each piece, as even as possible, larger ones first."""
    short, longer = divmod(rows, pieces)
    edges = [0]
    for piece in range(pieces):
        edges.append(edges[-1] + short + (1 if piece < longer else 0))
    return list(itertools.pairwise(edges))


def cut(batch: Any, rows: int, start: int, stop: int, whole: frozenset[Path] = frozenset()) -> Any:
    """Return rows ``start`` to ``stop`` (exclusive) of a batch, without copying tensors.

    Tensors and lists whose first size is ``rows`` are cut, everything else is handed on as it is.

    Args:
        batch: tensors, numbers and strings in dicts, lists, tuples, named tuples and dataclasses.
        rows: the number of samples.
        start: first row.
        stop: row after the last.
        whole: paths of entries that have no batch dimension, though their first size is ``rows``.

    Raises:
        UnsupportedError: an object that is none of these holds tensors.
    """
    return _cut(batch, (), lambda path, size: size == rows and path not in whole, slice(start, stop))


def _cut(value: Any, path: Path, is_cut: Callable[[Path, int], bool], rows: slice) -> Any:
    if isinstance(value, Tensor):
        return value[rows] if value.dim() > 0 and is_cut(path, value.shape[0]) else value
    if isinstance(value, (str, bytes)) or not _is_container(value):
        return value
    if isinstance(value, Mapping):
        items = {key: _cut(item, (*path, key), is_cut, rows) for key, item in value.items()}
        return _rebuilt_mapping(value, items)
    if isinstance(value, (list, tuple)):
        if isinstance(value, list) and is_cut(path, len(value)) and not _holds_tensors(value):
            return value[rows]  # names, texts: one for each sample
        cut_items = [_cut(item, (*path, i), is_cut, rows) for i, item in enumerate(value)]
        return type(value)(*cut_items) if hasattr(value, "_fields") else type(value)(cut_items)
    if dataclasses.is_dataclass(value):
        changes = {
            f.name: _cut(getattr(value, f.name), (*path, f.name), is_cut, rows) for f in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **changes)  # pyright: ignore[reportArgumentType]
    if not _holds_tensors(value):
        return value
    raise UnsupportedError(
        explain(
            f"a batch holds an object of class {type(value).__name__}",
            "microbatches are cut from tensors in dicts, lists, tuples and dataclasses",
            "let the collate function return one of these, or use num_microbatches=1",
        )
    )


def _rebuilt_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    try:
        return type(value)(items)  # pyright: ignore[reportCallIssue]  # OrderedDict, BatchEncoding, ...
    except TypeError:
        return items


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple)) or hasattr(value, "__dict__")


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, Tensor) or (_is_container(item) and _holds_tensors(item)) for item in value)
    return any(isinstance(item, Tensor) for item in getattr(value, "__dict__", {}).values())


def _leaves(value: Any, path: Path) -> list[tuple[Path, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    else:
        return []
    return [leaf for key, item in items for leaf in _leaves(item, (*path, key))]


Signature = tuple[tuple[Path, tuple[int, ...], torch.dtype], ...]


def signature(batch: Any) -> Signature:
    """Return what batches of equal shapes have in common."""
    return tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in _leaves(batch, ()))


def tensors_by_path(batch: Any) -> list[tuple[Path, Tensor]]:
    """Return the tensors of a batch with the keys that lead to them."""
    return _leaves(batch, ())
