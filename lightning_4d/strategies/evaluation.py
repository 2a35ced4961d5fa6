"""Let data-parallel ranks evaluate different numbers of batches without waiting for each other for ever.

Gathering a block's parameters needs every rank. A rank that runs out of batches of a dataloader before others takes
part in the gathering of their remaining steps, and does nothing else in them. This happens dataloader by dataloader,
because Lightning reduces metrics after each. Ranks that gather different blocks in one step are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from torch.utils.data import IterableDataset

from lightning_4d.errors import UnsupportedError, explain

if TYPE_CHECKING:
    from lightning_4d.strategies.nd import NDStrategy


class EvaluationBalance:
    """Runs evaluation steps, and after a rank's last one of a dataloader joins the remaining steps of others.

    With loaders of known length the numbers of steps are compared once, at the start. Else each step is announced.
    """

    def __init__(self, strategy: NDStrategy) -> None:
        self._strategy = strategy
        self._clear()

    def _clear(self) -> None:
        self._balance = False  # ranks may have different numbers of steps
        self._announce = False  # some loader has no length
        self._local: list[int] | None = None  # steps of each dataloader here, where their lengths are known
        self._most: list[int] = []  # on the rank that has the most
        self._loader = 0
        self._steps = 0  # in this dataloader
        self._compared = False  # the first step's calls

    def start(self) -> None:
        """Compare the numbers of batches, and make buffers equal. Which ranks must call: all.

        Raises:
            UnsupportedError: a rank has no batch at all.
        """
        self._strategy.data.synchronize_buffers()
        self._clear()
        if self._strategy.data_parallel_size == 1:
            return
        loop = _loop(self._trainer)
        self._local = _steps_by_loader(loop)
        unknown = self._local is None
        if unknown:
            _look_ahead(loop.data_fetcher)
        empty = _is_empty(loop.data_fetcher, self._local)
        self._announce, any_empty = (n > 0 for n in self._maximum([int(unknown), int(empty)]))
        if any_empty:
            raise UnsupportedError(_no_batch(f"on {'this' if empty else 'another'} rank"))
        if self._announce:
            self._balance = True
            if unknown and not isinstance(loop.data_fetcher, _PrefetchDataFetcher):
                raise UnsupportedError(_not_ahead())
            return
        assert self._local is not None
        self._most = self._maximum(self._local)
        self._balance = self._maximum([int(self._local != self._most)])[0] > 0

    def finish(self) -> None:
        """Compare what the ranks called in this evaluation. Which ranks must call: all."""
        self._strategy.data.compare_gathers()

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one evaluation step; after the last one of a dataloader, join what others still have of it."""
        data = self._strategy.data
        if self._announce:
            self._count_running(1)
        with data.record_gathers() as gathers:
            output = data.run(step, *args, **kwargs)
        data.note_gathers(gathers)
        if not self._compared:
            self._compared = True
            data.compare_gathers()
        self._steps += 1
        if not self._balance or not self._is_last_of_loader():
            return output
        if self._announce:
            while self._count_running(0):
                data.replay_gathers(gathers)
        else:
            for _ in range(self._most[self._loader] - self._steps):
                data.replay_gathers(gathers)
        self._loader += 1
        self._steps = 0
        return output

    def _is_last_of_loader(self) -> bool:
        if self._local is not None:
            return self._steps == self._local[self._loader]
        ahead = _loop(self._trainer).data_fetcher.batches
        if not ahead:
            return True
        _, batch_index, loader = ahead[0]
        if loader > self._loader + 1:
            raise UnsupportedError(_no_batch(f"of dataloader {self._loader + 1} on this rank"))
        return batch_index == 0

    @property
    def _trainer(self) -> Trainer:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module.trainer

    def _count_running(self, running: int) -> int:
        count = torch.tensor(running, device=self._strategy.root_device)
        dist.all_reduce(count, group=self._strategy.mesh.data_parallel_group)
        return int(count)

    def _maximum(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values, device=self._strategy.root_device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._strategy.mesh.data_parallel_group)
        return tensor.tolist()


class _Loop:
    """The running evaluation loop's number of batches and its fetcher, in one form for evaluation and prediction."""

    def __init__(self, trainer: Trainer) -> None:
        loop: Any = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        self.max_batches: list[int | float] = loop.max_batches
        self.loaders: list[Any] = loop._combined_loader.flattened
        self.sequential: bool = loop._combined_loader._mode == "sequential"
        self.data_fetcher: Any = loop._data_fetcher


def _loop(trainer: Trainer) -> _Loop:
    return _Loop(trainer)


def _steps_by_loader(loop: _Loop) -> list[int] | None:
    """Return the number of steps of each dataloader, or None if some length is unknown, or only promised."""
    if loop.data_fetcher.length is None or not all(map(_has_exact_length, loop.loaders)):
        return None
    return [int(n) for n in loop.max_batches] if loop.sequential else [int(loop.data_fetcher.length)]


def _has_exact_length(loader: Any) -> bool:
    return sized_len(loader) is not None and not isinstance(getattr(loader, "dataset", None), IterableDataset)


def _look_ahead(fetcher: _DataFetcher) -> None:
    """Fetch one batch ahead, as Lightning does for loaders without a length, unless their number is limited."""
    if isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is not None:
        fetcher.length = None
        try:
            fetcher.batches.append(_DataFetcher.__next__(fetcher))
        except StopIteration:
            pass  # no batch at all


def _is_empty(fetcher: _DataFetcher, steps: list[int] | None) -> bool:
    if steps is not None:
        return 0 in steps
    return isinstance(fetcher, _PrefetchDataFetcher) and not fetcher.batches


def _no_batch(where: str) -> str:
    return explain(
        f"an evaluation dataloader gives no batch {where}",
        "every data-parallel rank takes part in an evaluation with at least one batch of each dataloader",
        "give each rank at least one sample, or leave the dataloader out on all ranks",
    )


def _not_ahead() -> str:
    return explain(
        "an evaluation step that takes dataloader_iter, over a dataset without a length",
        "ranks that end early join the steps of others, so the last batch must be known when it runs",
        "take batches instead of dataloader_iter, or give the dataset a length",
    )
