"""Checkpoints that do not depend on the layout that wrote them: save, load under any other, consolidate to one file.

A *distributed* checkpoint is a folder: one file per rank in the format of ``torch.distributed.checkpoint``, and
``meta.pt`` with everything that is not a tensor of the model or of an optimizer (loops, schedulers, callbacks,
hyper-parameters; rank 0's). It is the folder format of Lightning itself. A *single-file* checkpoint is an ordinary
Lightning ``.ckpt``.
"""

from lightning_4d.checkpoint.consolidate import consolidate
from lightning_4d.checkpoint.files import CheckpointKind, checkpoint_kind, locate, remove
from lightning_4d.checkpoint.load import FileCheckpoint, FolderCheckpoint, open_checkpoint
from lightning_4d.checkpoint.optimizer_state import (
    gathered_optimizer_state,
    named_optimizer_state,
    without_distributed_tensors,
)
from lightning_4d.checkpoint.save import gathered_state_dict, save_file, save_folder
from lightning_4d.checkpoint.together import raise_together

__all__ = [
    "CheckpointKind",
    "FileCheckpoint",
    "FolderCheckpoint",
    "checkpoint_kind",
    "consolidate",
    "gathered_optimizer_state",
    "gathered_state_dict",
    "locate",
    "named_optimizer_state",
    "open_checkpoint",
    "raise_together",
    "remove",
    "save_file",
    "save_folder",
    "without_distributed_tensors",
]
