"""Translate between Lightning's checkpoint hooks and :mod:`lightning_4d.checkpoint`.

Lightning restores a checkpoint before the strategy's set-up. Its weights wait here until the module is sharded, and its
random state until training starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop
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
    raise_together,
    remove,
    save_file,
    save_folder,
    without_distributed_tensors,
)
from lightning_4d.checkpoint.files import is_remote, local_path
from lightning_4d.checkpoint.save import RANK_STATE
from lightning_4d.errors import CheckpointError, explain
from lightning_4d.strategies import random_state, rank_state
from lightning_4d.strategies.data_position import ResumableDataLoader, resumable

if TYPE_CHECKING:
    from lightning_4d.strategies.nd import NDStrategy

_KEY = "lightning_4d"  # of what we add to a checkpoint


class CheckpointTranslator:
    """Saves and loads for one strategy.

    Args:
        strategy: whose module and optimizers these are.
        distributed: write folders; else ordinary single files.
    """

    def __init__(self, strategy: NDStrategy, *, distributed: bool) -> None:
        self.distributed = distributed
        self._strategy = strategy
        self.new_run()

    def new_run(self) -> None:
        """Forget what an earlier run opened. Called at the start of each."""
        self._opened: FolderCheckpoint | FileCheckpoint | None = None
        self._pending_strict: bool | None = None
        self._pending_random_state: Any = None
        self._pending_positions: list[Any] = []  # of training DataLoaders, in their order
        self._agreed = False

    # ---------------------------------------------------------------------------------------------------------- saving

    def module_state(self) -> dict[str, Any]:
        """The state dict: distributed tensors, or whole ones on global rank 0 and nothing elsewhere."""
        strategy = self._strategy
        if strategy._failure.is_alone():
            return {}
        if strategy._failure.is_interrupted():
            strategy.data.recover()
        strategy.data.settle()
        left_out = strategy.saved_elsewhere()
        if self.distributed:
            return {name: value for name, value in strategy._module.state_dict().items() if name not in left_out}
        own = gathered_state_dict(strategy._module, keep=strategy.gathers_for_stage, left_out=left_out)
        return self._from_all_stages(own, list(strategy._module.state_dict()))

    def _from_all_stages(self, own: dict[Any, Any], order: Sequence[Any]) -> dict[Any, Any]:
        """Merge what the pipeline stages gathered, on global rank 0; empty elsewhere."""
        strategy = self._strategy
        if not strategy.has_stages:
            return own
        parts: list[Any] | None = [None] * strategy.layout.pipeline_parallel_size if strategy.is_global_zero else None
        if strategy.gathers_for_stage:
            dist.gather_object(own, parts, group=strategy.mesh["pp"].get_group(), group_dst=0)
        merged = {name: value for part in parts or [] for name, value in part.items()}
        return {name: merged[name] for name in order if name in merged}

    def optimizer_state(self, optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """The optimizer's state: by name with distributed tensors, or ordinary on global rank 0."""
        if self._strategy._failure.is_alone():
            return {}
        if self.distributed:
            return named_optimizer_state(optimizer, names)
        strategy = self._strategy
        own = gathered_optimizer_state(optimizer, names, keep=strategy.gathers_for_stage)
        if not strategy.has_stages:
            return own
        state = self._from_all_stages(own.get("state", {}), range(len(names)))
        return {**own, "state": state} if strategy.is_global_zero else {}

    def save(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None) -> None:
        """Write ``checkpoint`` to ``path`` (global rank 0's), atomically. Which ranks must call: all.

        Raises:
            CheckpointError: on all ranks, if the path cannot hold this kind of checkpoint or cannot be written.
        """
        strategy = self._strategy
        if strategy._failure.is_alone():
            return
        path = strategy.broadcast(os.fspath(path))
        rest, own = rank_state.take(checkpoint)
        rest[_KEY] = {"layout": str(strategy.layout), "data_parallel_size": strategy.data_parallel_size}
        if self.distributed:
            self._save_folder(rest, own, path, storage_options)
        else:
            self._save_file(rest, own, path, storage_options)

    def _save_folder(self, rest: dict[str, Any], own: Tensor, path: str, storage_options: Any | None) -> None:
        strategy = self._strategy
        if storage_options is not None:
            raise CheckpointError(
                explain(
                    "storage_options with a distributed checkpoint",
                    "a distributed checkpoint is written to a file system that all ranks share",
                    "leave them out, or use save_distributed_checkpoint=False",
                )
            )
        # Tensors, because torch saves other values from one rank only.
        distributed: dict[str, Any] = {f"{RANK_STATE}{strategy.data_parallel_rank}": own}
        distributed["state_dict"] = rest.pop("state_dict")
        for index, state in enumerate(rest.pop("optimizer_states", [])):
            distributed[f"optimizer_{index}"] = state
        rest = without_distributed_tensors(rest)
        save_folder(path, distributed, rest, is_writer=strategy.is_global_zero)

    def _save_file(self, rest: dict[str, Any], own: Tensor, path: str, storage_options: Any | None) -> None:
        strategy = self._strategy
        state = {key: rest.pop(key) for key in ("state_dict", "optimizer_states") if key in rest}  # gathered already
        rest = {**state, **without_distributed_tensors(rest)}
        rest[_KEY]["ranks"] = self._gather(own)
        error = None
        if strategy.is_global_zero:
            try:
                self._write_file(rest, path, storage_options)
            except Exception as raised:  # the other ranks wait for this one
                error = raised
        raise_together(error)

    def _gather(self, own: Tensor) -> list[Tensor]:
        """The tensors of all data-parallel ranks, by rank, on global rank 0."""
        strategy = self._strategy
        if not dist.is_initialized():
            return [own]
        pairs: list[Any] | None = [None] * strategy.world_size if strategy.is_global_zero else None
        dist.gather_object((strategy.data_parallel_rank, own), pairs)
        return [tensor for _, tensor in sorted(dict(pairs or []).items())]

    def _write_file(self, content: dict[str, Any], path: str, storage_options: Any | None) -> None:
        plugin = self._strategy.checkpoint_io
        if is_remote(path) or type(plugin) is not TorchCheckpointIO or storage_options is not None:
            plugin.save_checkpoint(content, path, storage_options=storage_options)
        else:
            save_file(path, content)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint of either kind."""
        if not self._strategy.is_global_zero:
            return
        if is_remote(path):
            self._strategy.checkpoint_io.remove_checkpoint(os.fspath(path))
        else:
            remove(path)

    # --------------------------------------------------------------------------------------------------------- loading

    def open(self, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
        """Open the checkpoint at ``path`` (global rank 0's) and return what is not a tensor, or all of a single file.

        Which ranks must call: all; see :meth:`agree_on_path`.

        Raises:
            CheckpointError: there is no such checkpoint, or it is incomplete, on some rank.
        """
        agreed = self.agree_on_path(os.fspath(path))
        assert agreed is not None
        error = None
        try:
            self._opened = self._open(agreed, weights_only)
        except Exception as raised:
            error = raised
        raise_together(error)
        assert self._opened is not None
        content = self._opened.content
        if isinstance(self._opened, FolderCheckpoint) and self._opened.optimizer_count:
            # Lightning looks whether they are there; the states themselves are read after set-up.
            content["optimizer_states"] = [None] * self._opened.optimizer_count
        if self._strategy._module.trainer.state.fn != TrainerFn.FITTING:
            return content
        return self._give_back_rank_state(content, weights_only)

    def agree_on_path(self, path: str | None = None) -> str | None:
        """Return global rank 0's path, once in each run: at its opening, or at set-up when this rank opens none.

        Which ranks must call: all. That the ranks meet here, whichever of the two they do, is what names a rank that
        does not see the checkpoint directory.

        Raises:
            CheckpointError: on all ranks, if some resume and others do not.
        """
        if self._agreed and path is None:
            return None
        self._agreed = True
        if not dist.is_initialized():
            return path
        paths: list[str | None] = [None] * self._strategy.world_size
        dist.all_gather_object(paths, path)
        without = [rank for rank, each in enumerate(paths) if each is None]
        if without and len(without) < len(paths):
            other = next(each for each in paths if each is not None)
            raise CheckpointError(
                explain(
                    f"ranks {without} found no checkpoint to load, others {other!r}",
                    "all ranks must see the same checkpoints",
                    f"save to a file system that all nodes share, or give ckpt_path={other!r} on all ranks",
                )
            )
        return paths[0]

    def _open(self, path: str, weights_only: bool | None) -> FolderCheckpoint | FileCheckpoint:
        plugin = self._strategy.checkpoint_io
        if is_remote(path) or (not local_path(path).is_dir() and type(plugin) is not TorchCheckpointIO):
            return FileCheckpoint(plugin.load_checkpoint(path, weights_only=weights_only))
        return open_checkpoint(path, weights_only=weights_only)

    def _give_back_rank_state(self, content: dict[str, Any], weights_only: bool | None) -> dict[str, Any]:
        """Continue this rank's random numbers and data, if as many ranks wrote the checkpoint as read it."""
        written = content.get(_KEY, {}).get("data_parallel_size")
        if written is None:  # not ours
            return content
        present, rank = self._strategy.data_parallel_size, self._strategy.data_parallel_rank
        state = self._rank_state(content, rank if written == present else 0)
        if written != present:
            content, self._pending_positions = rank_state.give_back_elsewhere(
                content, state, weights_only, written, present
            )
            return content
        resumed = rank_state.give_back(content, state, weights_only)
        self._pending_random_state, self._pending_positions = resumed.random, resumed.positions
        return resumed.checkpoint

    def _rank_state(self, content: Mapping[str, Any], rank: int) -> Tensor:
        if isinstance(self._opened, FolderCheckpoint):
            return self._opened.tensor(f"{RANK_STATE}{rank}")
        return content[_KEY]["ranks"][rank]

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
        _do_not_restart_finished_epoch(self._strategy._module.trainer)  # after Lightning restored its loops

    # ------------------------------------------------------------------------------------- random numbers and the data

    def on_train_start(self) -> None:
        """Continue random numbers where the checkpoint was written, now that set-up has drawn its own."""
        if self._pending_random_state is not None:
            random_state.restore(self._pending_random_state)
        self._opened = self._pending_random_state = None  # frees a file's memory

    def resumable(self, dataloader: object) -> object:
        """Return a training DataLoader that continues in mid-epoch; others as they are."""
        trainer = self._strategy._module.trainer
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return dataloader
        loader = resumable(dataloader, lambda: _batches_done(trainer.fit_loop.epoch_loop.batch_progress))
        if isinstance(loader, ResumableDataLoader) and self._pending_positions:
            loader.position.load(self._pending_positions.pop(0))
        return loader


def _batches_done(progress: Any) -> int:
    """Batches of the running epoch that Lightning will not run again after a resume: 0 from its last one on."""
    return 0 if progress.is_last_batch else progress.current.processed


def _do_not_restart_finished_epoch(trainer: Trainer) -> None:
    """Let a run with ``max_steps`` go on with the next epoch, as Lightning does with ``max_epochs``.

    Lightning 2.6 restarts the finished epoch instead, and without validation trains one more batch in it.
    """
    fit_loop = trainer.fit_loop
    progress: Any = fit_loop.epoch_progress.current
    if fit_loop.epoch_loop.batch_progress.is_last_batch and progress.ready == progress.started == progress.processed:
        _Loop.restarting.fset(fit_loop, False)  # pyright: ignore[reportOptionalCall]  # fit_loop's own setter refuses
