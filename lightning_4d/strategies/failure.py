"""What happens after an exception: no collective that others will never join, and an end in bounded time."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_4d._torch_private import failed_ranks

if TYPE_CHECKING:
    from lightning_4d.strategies.nd import NDStrategy

_GRACE = timedelta(seconds=10)


class Failure:
    """Knows whether this rank failed alone or all ranks failed together (the same error everywhere, Ctrl-C)."""

    def __init__(self, strategy: NDStrategy) -> None:
        self._strategy = strategy
        self._run = 0
        self._alone: bool | None = None

    def new_run(self) -> None:
        """Forget earlier failures. Called at each start, on all ranks."""
        self._run += 1
        self._alone = None

    def is_interrupted(self) -> bool:
        """Whether the Trainer is handling an exception on this rank."""
        module = self._strategy.lightning_module
        trainer = module._trainer if module is not None else None
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    def is_alone(self) -> bool:
        """Whether this rank is handling an exception that other ranks are not. Waits a few seconds for them, once."""
        if not self.is_interrupted():
            return False
        if self._alone is None:
            self._alone = self._ask()
        return self._alone

    def _ask(self) -> bool:
        world_size = self._strategy.world_size
        if world_size == 1 or not dist.is_initialized():
            return False
        count = failed_ranks(f"lightning_4d/failed/{self._run}", world_size, _GRACE)
        if count < world_size:
            rank_zero_warn(f"{count} of {world_size} ranks failed: no checkpoint can be written, ending the job.")
        return count < world_size

    def end(self, exception: BaseException) -> None:
        """Free what other ranks wait for. The exception then ends this process."""
        if not self.is_alone():
            if self._strategy._data is not None:
                self._strategy._data.recover()
            return
        launcher = self._strategy.launcher
        if isinstance(launcher, _SubprocessScriptLauncher):
            # The processes that this one started may hang in a collective, which SIGTERM does not end.
            launcher.kill(signal.SIGKILL)
