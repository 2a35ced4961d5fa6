"""Translate between Lightning's checkpoint hooks and :mod:`lightning_4d.checkpoint`.

Lightning restores a checkpoint before the strategy's set-up. Its weights wait here until the module is sharded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_4d.checkpoint import (
    FileCheckpoint,
    FolderCheckpoint,
    gathered_optimizer_state,
    gathered_state_dict,
    named_optimizer_state,
    open_checkpoint,
    remove,
    save_file,
    save_folder,
)
from lightning_4d.checkpoint.files import is_remote
from lightning_4d.errors import CheckpointError, explain
from lightning_4d.strategies import random_state

if TYPE_CHECKING:
    from lightning_4d.strategies.nd import NDStrategy

_RANDOM = "random_state"  # in the folder: one entry per rank


class CheckpointTranslator:
    """Saves and loads for one strategy.

    Args:
        strategy: whose module and optimizers these are.
        distributed: write folders; else ordinary single files.
    """

    def __init__(self, strategy: NDStrategy, *, distributed: bool) -> None:
        self.distributed = distributed
        self._strategy = strategy
        self._opened: FolderCheckpoint | FileCheckpoint | None = None
        self._pending_strict: bool | None = None
        self._random_state_at_first_step: Tensor | None = None

    # ---------------------------------------------------------------------------------------------------------- saving

    def module_state(self) -> dict[str, Any]:
        """The state dict: distributed tensors, or whole ones on global rank 0 and nothing elsewhere."""
        strategy = self._strategy
        if strategy._failure.is_alone():
            return {}
        if strategy._failure.is_interrupted():
            strategy.data.recover()
        strategy.data.settle()
        if self.distributed:
            return strategy._module.state_dict()
        return gathered_state_dict(strategy._module, keep=strategy.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """The optimizer's state: by name with distributed tensors, or ordinary on global rank 0."""
        if self._strategy._failure.is_alone():
            return {}
        if self.distributed:
            return named_optimizer_state(optimizer, names)
        return gathered_optimizer_state(optimizer, names, keep=self._strategy.is_global_zero)

    def save(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None) -> None:
        """Write ``checkpoint`` to ``path`` (global rank 0's), atomically. Which ranks must call: all.

        Raises:
            CheckpointError: the path cannot hold this kind of checkpoint.
        """
        strategy = self._strategy
        if strategy._failure.is_alone():
            return
        path = strategy.broadcast(os.fspath(path))
        if self.distributed:
            if storage_options is not None:
                raise CheckpointError(
                    explain(
                        "storage_options with a distributed checkpoint",
                        "a distributed checkpoint is written to a file system that all ranks share",
                        "leave them out, or use save_distributed_checkpoint=False",
                    )
                )
            self._save_folder(checkpoint, path)
        elif strategy.is_global_zero:
            self._save_file(checkpoint, path, storage_options)

    def _save_folder(self, checkpoint: dict[str, Any], path: str) -> None:
        strategy = self._strategy
        meta = dict(checkpoint)
        distributed: dict[str, Any] = {"state_dict": meta.pop("state_dict")}
        for index, state in enumerate(meta.pop("optimizer_states", [])):
            distributed[f"optimizer_{index}"] = state
        # A tensor, because torch saves other values from one rank only.
        distributed[f"{_RANDOM}_{strategy.global_rank}"] = random_state.capture()
        meta["lightning_4d"] = {"layout": str(strategy.layout)}
        save_folder(
            path, distributed, meta, is_writer=strategy.is_global_zero, barrier=lambda: strategy.barrier("checkpoint")
        )

    def _save_file(self, checkpoint: dict[str, Any], path: str, storage_options: Any | None) -> None:
        plugin = self._strategy.checkpoint_io
        if is_remote(path) or type(plugin) is not TorchCheckpointIO or storage_options is not None:
            plugin.save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            save_file(path, checkpoint)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint of either kind."""
        if not self._strategy.is_global_zero:
            return
        if is_remote(path):
            self._strategy.checkpoint_io.remove_checkpoint(path)
        else:
            remove(path)

    # --------------------------------------------------------------------------------------------------------- loading

    def open(self, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
        """Open the checkpoint at ``path`` (global rank 0's) and return what is not a tensor, or all of a single file."""
        strategy = self._strategy
        path = strategy.broadcast(os.fspath(path))
        plugin = strategy.checkpoint_io
        if is_remote(path) or (not os.path.isdir(path) and type(plugin) is not TorchCheckpointIO):
            self._opened = FileCheckpoint(plugin.load_checkpoint(path, weights_only=weights_only))
        else:
            self._opened = open_checkpoint(path, weights_only=weights_only)
        self._restore_random_state(self._opened)
        content = self._opened.content
        if isinstance(self._opened, FolderCheckpoint) and self._opened.optimizer_count:
            # Lightning looks whether they are there; the states themselves are read after set-up.
            content["optimizer_states"] = [None] * self._opened.optimizer_count
        return content

    def load_model(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load the weights of the opened checkpoint, now or at set-up, if the module is not sharded yet."""
        if isinstance(self._opened, FileCheckpoint):
            self._opened.content = dict(checkpoint)  # as the user's on_load_checkpoint left it
        self._pending_strict = strict
        if self._strategy._data is not None:
            self.load_pending_model()

    def load_pending_model(self) -> None:
        """Load weights that :meth:`load_model` left for now. Which ranks must call: all."""
        if self._opened is None or self._pending_strict is None:
            return
        self._strategy.data.settle()
        self._opened.load_module(self._strategy._module, strict=self._pending_strict)
        self._pending_strict = None

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers of the opened checkpoint. Which ranks must call: all."""
        assert self._opened is not None
        if isinstance(self._opened, FileCheckpoint):
            self._opened.content = dict(checkpoint)
        for index, optimizer in enumerate(self._strategy.optimizers):
            self._opened.load_optimizer(index, optimizer, self._strategy._module)

    # ------------------------------------------------------------------------------------------------------ randomness

    def _restore_random_state(self, opened: FolderCheckpoint | FileCheckpoint) -> None:
        """Continue this rank's random numbers, if the layout is the one that wrote the checkpoint."""
        strategy = self._strategy
        self._random_state_at_first_step = None
        written_by = opened.content.get("lightning_4d", {}).get("layout")
        if not isinstance(opened, FolderCheckpoint) or written_by != str(strategy.layout) or not self._is_fitting():
            return
        state = opened.tensor(f"{_RANDOM}_{strategy.global_rank}")
        random_state.restore(state)
        if _is_mid_epoch(opened.content):
            # The uninterrupted run made its loader's iterator before this state; now it is made once more after it.
            self._random_state_at_first_step = state

    def _is_fitting(self) -> bool:
        return self._strategy._module.trainer.state.fn == TrainerFn.FITTING

    def restore_random_state(self) -> None:
        """Called before each training step: continue random numbers at the first step after a mid-epoch resume."""
        if self._random_state_at_first_step is not None:
            random_state.restore(self._random_state_at_first_step)
            self._random_state_at_first_step = None


def _is_mid_epoch(content: Mapping[str, Any]) -> bool:
    progress = content.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return bool(progress.get("current", {}).get("ready", 0)) and not progress.get("is_last_batch", False)

