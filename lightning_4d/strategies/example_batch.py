"""One batch of the Trainer's own data before training starts, taken without a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.strategies import random_state


def example_batch(trainer: Trainer) -> tuple[Any, Any]:
    """Return a batch as the first step of this run will see it, and one of a sample less; random states stay.

    The data loaders are asked for once more. Batches are loaded in this process, on the Trainer's device. What has the
    same size in both has no batch dimension. Where no smaller batch can be had (an IterableDataset, batches of one
    sample) the second is None.

    Raises:
        UnsupportedError: the data can be iterated over only once, or is empty.
    """
    is_fit = trainer.state.fn == TrainerFn.FITTING
    loop: Any = trainer.fit_loop if is_fit else _evaluation_loop(trainer)
    with _random_states_kept():
        # Training steps get a batch of every loader at once, evaluation steps one of one loader.
        loaders, mode = loop._data_source.dataloader(), "max_size_cycle" if is_fit else "sequential"
        batch = next(iter(_combined(loaders, mode, _in_process)), None)
        if batch is None:
            raise UnsupportedError(
                explain(
                    "a dataloader without a batch",
                    "pipeline stages are made for the shapes of a batch",
                    "give every data-parallel rank at least one batch",
                )
            )
        combined = _combined(loaders, mode, _smaller)
        less = None if None in combined.flattened else next(iter(combined))[0]
        return _on_device(trainer, batch[0]), None if less is None else _on_device(trainer, less)


def _on_device(trainer: Trainer, batch: Any) -> Any:
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _evaluation_loop(trainer: Trainer) -> Any:
    loops = {
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return loops[trainer.state.fn]  # pyright: ignore[reportArgumentType]


def _combined(loaders: Any, mode: Any, prepare: Callable[[Any], Any]) -> CombinedLoader:
    if isinstance(loaders, CombinedLoader):
        mode, loaders = loaders._mode, loaders.iterables
    combined = CombinedLoader(loaders, mode)
    combined.flattened = [prepare(loader) for loader in combined.flattened]
    combined.limits = [1.0] * len(combined.flattened)
    return combined


def _in_process(loader: Any) -> Any:
    """Return a loader that starts no worker processes."""
    if not isinstance(loader, DataLoader):
        if iter(loader) is loader:
            raise UnsupportedError(
                explain(
                    f"a {type(loader).__name__} as a dataloader",
                    "pipeline stages are made for the shapes of a batch, and looking at one would use it up",
                    "give an object whose __iter__ starts anew, such as a DataLoader",
                )
            )
        return loader
    plain = copy.copy(loader)
    vars(plain).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, pin_memory=False)
    vars(plain).pop("_iterator", None)
    vars(plain)["_DataLoader__multiprocessing_context"] = None
    vars(plain)["_iterator"] = None
    return plain


def _smaller(loader: Any) -> Any:
    """Return a loader of one batch with a sample less; None where there is none."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    indices = list(next(iter(loader.batch_sampler), ())) if loader.batch_sampler is not None else []
    if len(indices) < 2:
        return None
    plain = _in_process(loader)
    vars(plain)["batch_sampler"] = [indices[:-1]]
    return plain


@contextmanager
def _random_states_kept() -> Iterator[None]:
    state = random_state.capture()
    try:
        yield
    finally:
        random_state.restore(state)
