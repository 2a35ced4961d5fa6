"""Continue a training DataLoader in the middle of its pass over the data.

After a resume Lightning continues loaders that have ``state_dict`` and ``load_state_dict``; a plain DataLoader starts
again. Here a map-style DataLoader gets both: the batches that are done are skipped as indices, none of them is loaded.

Also on another number of data-parallel ranks, where these read the same samples in each step: torch's own order, as
many samples per step.

Exact for samplers that draw from the global generators when a pass starts (torch's all do) or by epoch. Random numbers
that DataLoader *workers* drew for the skipped batches are not drawn again, so augmentation in workers differs from the
uninterrupted run until the next pass.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_4d.strategies import random_state

MARK = "lightning_4d_position"  # tells our states from those of a user's own resumable loader

BatchesDone = Callable[[], int]


def resumable(dataloader: object, batches_done: BatchesDone) -> object:
    """Return a copy of a map-style DataLoader that can be continued; anything else as it is.

    Args:
        dataloader: anything that yields batches.
        batches_done: how many batches of the running epoch have been trained on.
    """
    if isinstance(dataloader, ResumableDataLoader):  # from an earlier run
        dataloader.position.batches_done = batches_done
        return dataloader
    if (
        not isinstance(dataloader, DataLoader)
        or isinstance(dataloader, _Stateful)
        or isinstance(dataloader.dataset, IterableDataset)
    ):
        return dataloader
    loader = copy.copy(dataloader)  # the user's own keeps its class
    cls = type(dataloader)
    loader.__class__ = type(cls.__name__, (ResumableDataLoader, cls), {"__module__": cls.__module__})
    resumable_loader = cast("ResumableDataLoader", loader)
    resumable_loader.position = Position(resumable_loader, batches_done)
    return resumable_loader


def seed_workers(dataloader: object, data_parallel_rank: int) -> None:
    """Seed the workers of a DataLoader by data-parallel rank, where Lightning would by global rank."""
    wanted = int(os.environ.get("PL_SEED_WORKERS", "0"))
    if wanted and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=data_parallel_rank)


class ResumableDataLoader(DataLoader):
    """The class that :func:`resumable` mixes in.

    Attributes:
        position: to continue from another loader's state, ``position.load(state_dict()[MARK])`` before iterating.
    """

    position: Position

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank is in the current pass."""
        return {MARK: self.position.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: a strategy loads :attr:`position` itself, since Lightning calls this in some restarts only."""

    def __iter__(self) -> Any:
        return self._continue() if self.position.take_resume() else super().__iter__()

    def _continue(self) -> Iterator[Any]:
        """Iterate, but make the iterator, which draws random numbers and asks the sampler, only at the first batch.

        Lightning asks for the first iterator of a resumed run earlier than it does in an uninterrupted one: before the
        sampler knows its epoch, and before the random state of the checkpoint is restored.
        """
        before = random_state.capture()
        iterator = super().__iter__()
        if self.position.resumed_inside:  # the uninterrupted run has had this iterator all along
            random_state.restore(before)
        yield from iterator


class Position:
    """Remembers how the current pass of a loader began, and repeats that beginning after a resume.

    Args:
        loader: whose batch sampler (or sampler, without automatic batching) is observed from now on.
        batches_done: see :func:`resumable`.
    """

    def __init__(self, loader: DataLoader, batches_done: BatchesDone) -> None:
        self.batches_done = batches_done
        self.resumed_inside = False
        self._loader = loader
        self._beginning: dict[str, Any] | None = None  # of the current pass
        self._done_before = 0  # batches of this epoch before the current pass: a short loader may cycle
        self._loaded: Mapping[str, Any] | None = None
        self._resume = False
        self._samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # DataLoader refuses a change of these by assignment, since its own set-up depends on their kind.
        object.__setattr__(loader, name, _ObservedSampler(getattr(loader, name), self))

    def state(self) -> dict[str, Any]:
        """Return the position as plain data."""
        length = self._length()
        done = 0 if self._beginning is None else max(0, self.batches_done() - self._done_before)
        if length is not None:
            done = min(done, length)  # CombinedLoader may have gone on without this loader
        return {
            "length": length,
            "batches": done,
            "beginning": self._beginning if done else None,
            "generators": self._generator_states(),
            "seeds": [getattr(s, "seed", None) for s in self._samplers],
            "order": self._order(),
            "batch_size": self._loader.batch_size,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` at the next iteration; restart, with a warning, where that is another position.

        Args:
            state: what :meth:`state` gave, with ``"ranks"`` added, the data-parallel ranks that wrote it and those that
                there are, if these are not as many.
        """
        ranks = state.get("ranks")
        if ranks is not None and state["batches"] and not self._reads_the_same(state, *ranks):
            rank_zero_warn(
                f"The checkpoint was written in mid-epoch by {ranks[0]} data-parallel ranks and is resumed by "
                f"{ranks[1]}, which read other samples: the training data of this epoch starts again, so that samples "
                "repeat. Resume with the same number, with as many samples per step and torch's own samplers, or from "
                "the end of an epoch."
            )
            return
        if state["batches"] and state["length"] != self._length():
            rank_zero_warn(
                f"The checkpoint was written after {state['batches']} of {state['length']} batches of a training "
                f"DataLoader that now has {self._length()}: its data starts again. Resume with the same dataset and "
                "batch size, or from the end of an epoch."
            )
            return
        self._loaded = state
        self._resume = True
        self._restore_generators(state["generators"])
        for sampler, seed in zip(self._samplers, state["seeds"], strict=True):
            if isinstance(sampler, DistributedSampler):  # the order of all epochs, whatever is seeded now
                sampler.seed = seed

    def _reads_the_same(self, state: Mapping[str, Any], written: int, present: int) -> bool:
        """Whether all ranks together read the samples of each step that those did which wrote ``state``."""
        order, size = self._order(), self._loader.batch_size
        if order is None or order != state.get("order") or size is None or state["length"] != self._length():
            return False
        return size * present == (state.get("batch_size") or 0) * written

    def _order(self) -> str | None:
        """What the order of samples depends on beside the epoch, over all ranks; None for anything else."""
        batch_sampler = self._samplers[1]
        sampler = getattr(batch_sampler, "sampler", None)
        if type(batch_sampler) is not BatchSampler:
            return None
        if type(sampler) is DistributedSampler:
            return f"shuffled by seed {sampler.seed}" if sampler.shuffle else "in order"
        return "in order" if type(sampler) is SequentialSampler else None

    def take_resume(self) -> bool:
        """Whether the iteration that starts now is the first one after a resume."""
        resume, self._resume = self._resume, False
        self.resumed_inside = resume and self._loaded is not None and self._loaded["batches"] > 0
        return resume

    def indices(self, sampler: Any) -> Iterator[Any]:
        """Yield what ``sampler`` does in the current pass, without what is done."""
        state, self._loaded = self._loaded, None
        if state is not None and state["batches"]:
            self._done_before = self.batches_done() - state["batches"]
            yield from self._fast_forward(sampler, state)
            return
        self._done_before = self.batches_done()
        self._beginning = {
            "random": random_state.capture(),
            "generators": self._generator_states(),
            "epochs": [getattr(s, "epoch", None) for s in self._samplers],
        }
        yield from sampler

    def _fast_forward(self, sampler: Any, state: Mapping[str, Any]) -> Iterator[Any]:
        """Begin the pass as it began, and skip; then every generator is where the checkpoint has it."""
        self._beginning = beginning = state["beginning"]
        present = random_state.capture()
        if beginning["random"] is not None:
            random_state.restore(beginning["random"])
        self._restore_generators(beginning["generators"])
        for observed, epoch in zip(self._samplers, beginning["epochs"], strict=True):
            if isinstance(observed, DistributedSampler):
                observed.set_epoch(epoch)
        iterator = iter(sampler)
        for _ in itertools.islice(iterator, state["batches"]):
            pass
        random_state.restore(present)
        self._restore_generators(state["generators"])
        return iterator

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(holder, "generator", None) for holder in (self._loader, *self._samplers)]
        return list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _restore_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)

    def _length(self) -> int | None:
        try:
            return len(self._loader)
        except TypeError:
            return None


class _ObservedSampler:
    """Stands in for a loader's sampler and tells its :class:`Position` when a pass starts."""

    def __init__(self, sampler: Any, position: Position) -> None:
        self._sampler = sampler
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        return self._position.indices(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._sampler, name)
