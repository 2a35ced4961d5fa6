"""Read checkpoints of either kind into a module and optimizers of any layout."""

from __future__ import annotations

import io
import itertools
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from lightning_4d.absent import absent_names, is_absent, stand_in
from lightning_4d.checkpoint import files
from lightning_4d.checkpoint.optimizer_state import (
    by_name,
    empty_state,
    like,
    load_optimizer_state,
    parameter_names,
)
from lightning_4d.checkpoint.together import one_process_allowed
from lightning_4d.errors import CheckpointError, explain


def open_checkpoint(
    path: str | os.PathLike[str], *, weights_only: bool | None = None
) -> FolderCheckpoint | FileCheckpoint:
    """Open the local checkpoint that stands for ``path``; reads what is not a tensor at once.

    Args:
        path: a folder or a file; one that a save interrupted by a crash left is found or refused.
        weights_only: as in ``torch.load``.

    Raises:
        CheckpointError: there is no such checkpoint, or it is incomplete.
    """
    found = files.locate(path)
    return FolderCheckpoint(found, weights_only) if found.is_dir() else FileCheckpoint.read(found, weights_only)


class FileCheckpoint:
    """An ordinary Lightning checkpoint, read from one file; ``content`` is its dictionary, tensors memory-mapped."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    @classmethod
    def read(cls, path: Path, weights_only: bool | None) -> FileCheckpoint:
        """Read a local file."""
        # Not every rank reads what only one needs; the format before torch 1.6 cannot be mapped.
        mmap = zipfile.is_zipfile(path)
        return cls(torch.load(path, map_location="cpu", mmap=mmap, weights_only=weights_only))

    def load_module(self, module: nn.Module, *, strict: bool) -> None:
        """Load the weights, each rank its own part. Purely local."""
        present = module.state_dict()
        elsewhere = absent_names(module)
        state = {
            name: like(value, present[name]) if isinstance(present.get(name), Tensor) else value
            for name, value in self.content["state_dict"].items()
            if name not in elsewhere
        }
        stored = self.content["state_dict"].keys()
        _load_state(module, state, elsewhere & stored, strict=strict)

    def load_optimizer(self, index: int, optimizer: Optimizer, module: nn.Module) -> None:
        """Load the state of optimizer number ``index``, each rank its own part. Purely local.

        Raises:
            CheckpointError: there is no such state, or it does not fit.
        """
        states = self.content.get("optimizer_states", [])
        if index >= len(states):
            raise _no_optimizer(index, len(states))
        names = parameter_names(module)
        parameters = {name: parameter for parameter, name in names.items()}
        current = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        saved = by_name(states[index], current)
        state = {
            name: {key: _copy(like(value, parameters[name])) for key, value in values.items()}
            for name, values in saved["state"].items()
            if name in parameters and not is_absent(parameters[name])
        }
        load_optimizer_state(optimizer, {"state": state, "param_groups": saved["param_groups"]}, names)


class FolderCheckpoint:
    """A distributed checkpoint; ``content`` is its ``meta.pt``, tensors are read when they are loaded.

    Which ranks must call: all ranks of the job, each method together.
    """

    def __init__(self, path: Path, weights_only: bool | None) -> None:
        self.path = path
        self._weights_only = weights_only
        self.content: dict[str, Any] = torch.load(path / files.META, map_location="cpu", weights_only=weights_only)
        self._metadata: Metadata = dcp.FileSystemReader(path).read_metadata()
        self._paths: Mapping[str, tuple[Any, ...]] = self._metadata.planner_data

    @property
    def optimizer_count(self) -> int:
        """How many optimizers have their state here."""
        return len({path[0] for path in self._paths.values() if str(path[0]).startswith("optimizer_")})

    def tensor(self, name: str) -> Tensor:
        """Read the plain tensor stored as ``name``, whole."""
        stored = self._metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        state = {name: torch.empty(stored.size, dtype=stored.properties.dtype)}
        self.read(state)
        return state[name]

    def load_module(self, module: nn.Module, *, strict: bool) -> None:
        """Load the weights, each rank its own part.

        Raises:
            RuntimeError: names differ and ``strict`` is set, or shapes differ (torch's own messages).
        """
        stored = {path[1] for path in self._paths.values() if path[0] == "state_dict" and len(path) > 1}
        present = module.state_dict()
        elsewhere = absent_names(module)
        wanted = {name: value for name, value in present.items() if name in stored and name not in elsewhere}
        self._check_shapes(wanted)
        if wanted:
            self.read({"state_dict": wanted})
        unexpected = {name: torch.empty(0) for name in sorted(stored - present.keys())}
        _load_state(module, {**wanted, **unexpected}, elsewhere & stored, strict=strict)

    def _check_shapes(self, wanted: Mapping[str, Any]) -> None:
        for name, value in wanted.items():
            stored = self._metadata.state_dict_metadata[f"state_dict.{name}"]
            if isinstance(value, Tensor) and isinstance(stored, TensorStorageMetadata) and stored.size != value.shape:
                raise CheckpointError(
                    explain(
                        f"{name!r} has shape {tuple(value.shape)} here and {tuple(stored.size)} in {str(self.path)!r}",
                        "a checkpoint loads into a model of the same sizes, under any layout",
                        "build the model with the sizes it was saved with",
                    )
                )

    def load_optimizer(self, index: int, optimizer: Optimizer, module: nn.Module) -> None:
        """Load the state of optimizer number ``index``, each rank its own part; only states that were saved.

        Raises:
            CheckpointError: there is no such state, or it does not fit.
        """
        key = f"optimizer_{index}"
        entries = {path[1:]: name for name, path in self._paths.items() if path[0] == key}
        if not entries:
            raise _no_optimizer(index, self.optimizer_count)
        names = parameter_names(module)
        parameters = {name: parameter for parameter, name in names.items()}
        state: dict[str, Any] = {}
        for path, name in entries.items():
            if path[0] == "state" and len(path) > 1 and not is_absent(parameters.get(path[1], _ABSENT)):
                set_nested(state, path[1:], self._placeholder(name, parameters[path[1]]))
        if state:
            self.read({key: {"state": state}})
        groups = self._parameter_groups(entries)
        load_optimizer_state(optimizer, {"state": state, "param_groups": groups}, names)

    def _placeholder(self, name: str, parameter: Tensor) -> Any:
        stored = self._metadata.state_dict_metadata[name]
        if isinstance(stored, TensorStorageMetadata):
            return empty_state(parameter, stored.size, stored.properties.dtype)
        return None

    def _parameter_groups(self, entries: Mapping[tuple[Any, ...], str]) -> list[dict[str, Any]]:
        """Read the hyper-parameters of all groups, stored entry by entry as ("param_groups", index, key, ...)."""
        flat = {path: name for path, name in entries.items() if path[0] == "param_groups"}
        read: dict[str, Any] = {name: self._placeholder(name, torch.empty(0)) for name in flat.values()}
        self.read(read)
        nested: dict[str, Any] = {}
        for path, name in flat.items():
            set_nested(nested, path, read[name])
        return nested.get("param_groups", [])

    def read(self, state: dict[str, Any]) -> None:
        """Read the entries of ``state`` in place: tensors into the given ones, other values as they were saved."""
        try:
            with one_process_allowed():
                planner = _Planner(self._weights_only)
                dcp.load(state, checkpoint_id=self.path, planner=planner, no_dist=not dist.is_initialized())
        except dcp.CheckpointException as error:  # derives from BaseException
            raise CheckpointError(f"reading the checkpoint {self.path} failed: {error}") from error


def _load_state(module: nn.Module, state: dict[str, Any], elsewhere: set[str], *, strict: bool) -> None:
    """Load ``state``; what other pipeline ranks load (``elsewhere``) is not missing here."""
    if not elsewhere:
        module.load_state_dict(state, strict=strict)
        return
    missing, unexpected = module.load_state_dict(state, strict=False)
    missing = [name for name in missing if name not in elsewhere]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}: missing keys {missing}, unexpected keys "
            f"{unexpected}."
        )


_ABSENT = stand_in(nn.Parameter(torch.empty(0)), torch.device("cpu"))  # a name that the module does not have


class _Planner(dcp.DefaultLoadPlanner):
    """Honours ``weights_only`` for entries that are not tensors; torch's planner unpickles anything."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__()
        self._weights_only = weights_only

    def load_bytes(self, read_item: dcp.planner.ReadItem, value: io.BytesIO) -> None:
        content = torch.load(value, weights_only=self._weights_only)
        path = self.mappings[read_item.dest_index.fqn]
        target = self.original_state_dict
        for key in path[:-1]:
            target = target[key]  # pyright: ignore[reportArgumentType]
        target[path[-1]] = content  # pyright: ignore[reportArgumentType]


def _copy(value: Any) -> Any:
    """Let go of the memory-mapped file: an optimizer may keep the very tensor that it is given."""
    return value.clone() if isinstance(value, Tensor) else value


def _no_optimizer(index: int, count: int) -> CheckpointError:
    return CheckpointError(
        explain(
            f"optimizer number {index} has no state in a checkpoint with {count}",
            "resuming needs the state of every optimizer",
            "resume with the optimizers of the run that wrote it, or load the weights only",
        )
    )


def set_nested(target: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set a value at ``path`` in nested dictionaries and lists; integer keys are positions of a list."""
    for key, following in itertools.pairwise(path):
        container: Any = [] if isinstance(following, int) else {}
        target = _item(target, key, container)
    _item(target, path[-1], value)


def _item(target: Any, key: Any, default: Any) -> Any:
    if isinstance(target, dict):
        return target.setdefault(key, default)
    target.extend([None] * (key + 1 - len(target)))
    if target[key] is None:
        target[key] = default
    return target[key]
