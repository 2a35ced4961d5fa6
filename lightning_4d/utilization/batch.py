"""What a batch of any structure says about itself: shapes, samples, tokens, and which of them are padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # the label that losses ignore
_TOKENS = ("input_ids", "tokens", "token_ids")
_LABELS = ("labels", "targets", "target")


def named_tensors(batch: Any, path: tuple[str, ...] = (), depth: int = 6) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Iterate over the tensors of a batch with their paths: keys, indices and attribute names."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif depth > 0:
        for name, item in _children(batch):
            yield from named_tensors(item, (*path, str(name)), depth - 1)


def _children(batch: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        yield from batch.items()
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        yield from enumerate(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from ((field.name, getattr(batch, field.name)) for field in fields(batch))
    elif hasattr(batch, "__dict__") and not isinstance(batch, type):
        yield from vars(batch).items()


BatchKey = tuple[tuple[tuple[str, ...], tuple[int, ...], torch.dtype], ...]


def batch_key(batch: Any) -> BatchKey:
    """Return what batches of equal shapes have in common."""
    return tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in named_tensors(batch))


def sample_count(batch: Any) -> int | None:
    """Return the first size of the first tensor that has one."""
    return next((tensor.shape[0] for _, tensor in named_tensors(batch) if tensor.dim() > 0), None)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch of ``samples`` sequences of ``length``, padding included.

    Attributes:
        samples: B.
        length: T.
        lengths_B: tokens of each sequence that are not padding, on the batch's device; None where the batch does not
            tell, which means all.
    """

    samples: int
    length: int
    lengths_B: Tensor | None = None


def find_tokens(batch: Any) -> Tokens | None:
    """Find the token ids in a batch: an integer tensor (B, T), by its name or as the first of its kind.

    Padding is what ``attention_mask`` leaves out; else what follows the last label that is not -100. Nothing is copied
    from the device.
    """
    tables = [(path, t) for path, t in named_tensors(batch) if t.dim() == 2 and t.numel() > 0 and _is_integer(t)]
    by_name = {path[-1]: tensor for path, tensor in tables if path}
    ids = next((by_name[name] for name in _TOKENS if name in by_name), None)
    if ids is None:
        ids = next((t for path, t in tables if t.dtype is not torch.bool and not _is_mask(path)), None)
    if ids is None:
        return None
    return Tokens(ids.shape[0], ids.shape[1], _lengths(ids, tables))


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _is_mask(path: tuple[str, ...]) -> bool:
    return bool(path) and path[-1].endswith("mask")


def _lengths(ids: Tensor, tables: list[tuple[tuple[str, ...], Tensor]]) -> Tensor | None:
    alike = [(path, t) for path, t in tables if t is not ids and t.shape == ids.shape]
    mask = next((t for path, t in alike if path and path[-1] == "attention_mask"), None)
    if mask is not None:
        return (mask != 0).sum(1)
    labels = next((t for path, t in alike if path and (path[-1] in _LABELS or path[-1].isdigit())), None)
    if labels is None or labels.dtype is torch.bool:
        return None
    positions_T = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    return ((labels != IGNORED) * positions_T).amax(1)
