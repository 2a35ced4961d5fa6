"""One batch of the Trainer's own data before training starts, taken without a trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.strategies import random_state


def example_batch(trainer: Trainer) -> Any:
    """Return a batch as the first step of this run will see it, on its device; random states stay as they are.

    The data loaders are asked for once more. Batches are loaded in this process.

    Raises:
        UnsupportedError: the data can be iterated over only once, or is empty.
    """
    loop: Any = trainer.fit_loop if trainer.state.fn == TrainerFn.FITTING else _evaluation_loop(trainer)
    with _random_states_kept():
        combined = _combined(loop._data_source.dataloader())
        batch = next(iter(combined), None)
        if batch is None:
            raise UnsupportedError(
                explain(
                    "a dataloader without a batch",
                    "pipeline stages are made for the shapes of a batch",
                    "give every data-parallel rank at least one batch",
                )
            )
        batch = trainer.precision_plugin.convert_input(batch[0])
        module = trainer.lightning_module
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _evaluation_loop(trainer: Trainer) -> Any:
    loops = {
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return loops[trainer.state.fn]  # pyright: ignore[reportArgumentType]


def _combined(loaders: Any) -> CombinedLoader:
    mode: Any = "max_size_cycle"
    if isinstance(loaders, CombinedLoader):
        mode, loaders = loaders._mode, loaders.iterables
    combined = CombinedLoader(loaders, mode)
    combined.flattened = [_in_process(loader) for loader in combined.flattened]
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


@contextmanager
def _random_states_kept() -> Iterator[None]:
    state = random_state.capture()
    try:
        yield
    finally:
        random_state.restore(state)
