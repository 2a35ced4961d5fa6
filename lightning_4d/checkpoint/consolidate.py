"""Turn a distributed checkpoint folder into one ordinary Lightning ``.ckpt`` file, on one process, without a model."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_4d.checkpoint import files
from lightning_4d.checkpoint.load import FolderCheckpoint, set_nested
from lightning_4d.checkpoint.optimizer_state import positional
from lightning_4d.checkpoint.save import RANK_STATE, save_file
from lightning_4d.errors import CheckpointError, explain


def consolidate(folder: str | os.PathLike[str], file: str | os.PathLike[str], *, weights_only: bool = False) -> None:
    """Write ``file``, which ``LightningModule.load_from_checkpoint`` and any Trainer open without this package.

    Needs memory for the whole checkpoint. Optimizer states, schedulers, loops, callbacks and hyper-parameters are kept.

    Args:
        folder: a distributed checkpoint.
        file: where to write; replaced only when complete.
        weights_only: refuse to unpickle anything but plain data. The default trusts the folder, as ``meta.pt`` may hold
            the user's own classes.

    Raises:
        CheckpointError: ``folder`` is no complete distributed checkpoint, or ``file`` is a folder.
    """
    source = files.locate(folder)
    if not source.is_dir():
        raise CheckpointError(
            explain(f"{str(source)!r}", "only a distributed checkpoint, a folder, is consolidated", "use it as it is")
        )
    target = files.local_path(file)
    if target.is_dir():
        raise CheckpointError(
            explain(f"{str(target)!r} is a folder", "the result is one file", f"write {str(target / 'model.ckpt')!r}")
        )
    save_file(target, _content(source, weights_only))


def _content(source: Any, weights_only: bool) -> dict[str, Any]:
    opened = FolderCheckpoint(source, weights_only)
    tensors = _read_all(opened)
    content = dict(opened.content)
    content["state_dict"] = tensors.pop("state_dict", {})
    optimizers = _numbered(tensors, "optimizer_")
    if optimizers:  # none after save_weights_only=True
        content["optimizer_states"] = [positional(state) for state in optimizers]
    _keep_rank_states(content, tensors)
    return content


def _keep_rank_states(content: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Random numbers and data position of each rank, where a strategy of ours finds them in a file."""
    ranks = _numbered(tensors, RANK_STATE)
    if ranks:
        content["lightning_4d"] = {**content["lightning_4d"], "ranks": ranks}


def _numbered(tensors: dict[str, Any], prefix: str) -> list[Any]:
    """The entries whose name is ``prefix`` and a number, by number."""
    names = [name for name in tensors if name.startswith(prefix)]
    return [tensors[name] for name in sorted(names, key=lambda name: int(name.removeprefix(prefix)))]


def _read_all(opened: FolderCheckpoint) -> dict[str, Any]:
    """Read every tensor and value of the folder into nested dictionaries, as they were saved."""
    metadata = dcp.FileSystemReader(opened.path).read_metadata()
    ours = re.compile(rf"state_dict\.|optimizer_\d+\.|{RANK_STATE}\d+$")  # a folder may hold what others added
    flat = {name: _placeholder(stored) for name, stored in metadata.state_dict_metadata.items() if ours.match(name)}
    opened.read(flat)
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        set_nested(nested, metadata.planner_data[name], value)
    return nested


def _placeholder(stored: Any) -> Tensor | None:
    return (
        torch.empty(stored.size, dtype=stored.properties.dtype) if isinstance(stored, TensorStorageMetadata) else None
    )
