"""Write checkpoints, atomically: see :mod:`lightning_4d.checkpoint.files`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from lightning_4d.checkpoint import files
from lightning_4d.checkpoint.optimizer_state import gathered
from lightning_4d.checkpoint.together import one_process_allowed, raise_together
from lightning_4d.errors import CheckpointError, explain

RANK_STATE = "rank_state_"  # and the data-parallel rank: bytes of what each rank keeps for itself


def gathered_state_dict(module: nn.Module, *, keep: bool, left_out: AbstractSet[str] = frozenset()) -> dict[str, Any]:
    """Return the ordinary ``state_dict`` with whole tensors on the CPU; empty where ``keep`` is false.

    Names in ``left_out`` are another pipeline rank's.

    Which ranks must call: all ranks that share the module.
    """
    state = {name: value for name, value in module.state_dict().items() if name not in left_out}
    whole = {name: gathered(value, keep=keep) for name, value in state.items()}
    return whole if keep else {}


def save_folder(
    path: str | os.PathLike[str], distributed: Mapping[str, Any], meta: Mapping[str, Any], *, is_writer: bool
) -> None:
    """Write a distributed checkpoint to the folder ``path``, replacing what is there only when complete.

    Args:
        path: equal on all ranks, on a file system that all ranks share.
        distributed: nested dicts whose tensors all ranks hold their part of.
        meta: everything else; the writer's.
        is_writer: true on exactly one rank, global rank 0: it renames and writes ``meta``.

    Which ranks must call: all ranks.

    Raises:
        CheckpointError: on all ranks, if the folder cannot be written on any; what was at ``path`` is still there.
    """
    target = files.local_path(path)
    partial = files.partial(target)
    raise_together(_attempt(target, lambda: files.prepare_partial(target, folder=True)) if is_writer else None)
    try:
        _write_tensors(partial, distributed)
        raise_together(_attempt(target, lambda: _finish(target, meta)) if is_writer else None)
    except CheckpointError:
        if is_writer:
            _clean_up(target)
        raise


def _finish(target: Path, meta: Mapping[str, Any]) -> None:
    _write_file(files.partial(target) / files.META, dict(meta))
    files.commit(target)


def _write_tensors(folder: Path, distributed: Mapping[str, Any]) -> None:
    try:
        with one_process_allowed():
            dcp.save(dict(distributed), checkpoint_id=folder, no_dist=not dist.is_initialized())
    except dcp.CheckpointException as error:  # derives from BaseException: `except Exception` would miss it
        raise _cannot_write(folder, error) from error


def save_file(path: str | os.PathLike[str], checkpoint: Mapping[str, Any]) -> None:
    """Write a single-file checkpoint to a local path, replacing what is there only when complete.

    Which ranks must call: one.

    Raises:
        CheckpointError: the file cannot be written; what was at ``path`` is still there.
    """
    target = files.local_path(path)

    def write() -> None:
        _write_file(files.prepare_partial(target, folder=False), dict(checkpoint))
        files.commit(target)

    error = _attempt(target, write)
    if error is not None:
        _clean_up(target)
        raise error


def _attempt(path: Path, write: Callable[[], object]) -> CheckpointError | None:
    """Run ``write``; return what keeps the file system from it. Errors of the content (pickling) are returned too."""
    try:
        write()
    except Exception as error:  # any failure must reach the other ranks, which wait for this one
        result = _cannot_write(path, error)
        result.__cause__ = error
        return result
    return None


def _cannot_write(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        explain(
            f"the checkpoint {str(path)!r} cannot be written: {type(error).__name__}: {error}",
            "a checkpoint needs a path that can be written, with room for it, and content that can be pickled",
            "the previous checkpoint is untouched: free space, change permissions, or save elsewhere",
        )
    )


def _clean_up(target: Path) -> None:
    with contextlib.suppress(OSError):  # it is no checkpoint, and the next save tries to remove it again
        files.remove_partial(target)


def _write_file(path: Path, content: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
