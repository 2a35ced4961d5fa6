"""Write checkpoints, atomically: see :mod:`lightning_4d.checkpoint.files`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lightning_4d.checkpoint import files
from lightning_4d.checkpoint.optimizer_state import gathered
from lightning_4d.errors import CheckpointError


def gathered_state_dict(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return the ordinary ``state_dict`` with whole tensors on the CPU; empty where ``keep`` is false.

    Which ranks must call: all ranks that share the module.
    """
    whole = {name: gathered(value, keep=keep) for name, value in module.state_dict().items()}
    return whole if keep else {}


def save_folder(
    path: str | os.PathLike[str],
    distributed: Mapping[str, Any],
    meta: Mapping[str, Any],
    *,
    is_writer: bool,
    barrier: Callable[[], None],
) -> None:
    """Write a distributed checkpoint to the folder ``path``, replacing what is there only when complete.

    Args:
        path: equal on all ranks, on a file system that all ranks share.
        distributed: nested dicts whose tensors all ranks hold their part of.
        meta: everything else; the writer's.
        is_writer: true on exactly one rank, global rank 0: it renames and writes ``meta``.
        barrier: waits for all ranks.

    Which ranks must call: all ranks.

    Raises:
        CheckpointError: the folder cannot be written, on any rank.
    """
    target = files.local_path(path)
    if is_writer:
        files.prepare_partial(target, folder=True)
    barrier()
    _write_tensors(files.partial(target), distributed)
    if is_writer:
        _write_file(files.partial(target) / files.META, dict(meta))
        files.commit(target)
    barrier()


def _write_tensors(folder: Path, distributed: Mapping[str, Any]) -> None:
    try:
        dcp.save(dict(distributed), checkpoint_id=folder)
    except dcp.CheckpointException as error:  # derives from BaseException: `except Exception` would miss it
        raise CheckpointError(f"writing the checkpoint {folder} failed: {error}") from error


def save_file(path: str | os.PathLike[str], checkpoint: Mapping[str, Any]) -> None:
    """Write a single-file checkpoint to a local path, replacing what is there only when complete.

    Which ranks must call: one.
    """
    target = files.local_path(path)
    _write_file(files.prepare_partial(target, folder=False), dict(checkpoint))
    files.commit(target)


def _write_file(path: Path, content: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
