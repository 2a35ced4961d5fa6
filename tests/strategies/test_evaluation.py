"""Evaluation where data-parallel ranks have different numbers of batches: never a hang, and the right values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, get_worker_info

from tests.modules import TinyGPT
from tests.pool import WorkerError
from tests.strategies.scenarios import MakeTrainer, check_same, numbers, quiet, sharded, whole_parameters


class Some(Sampler[int]):
    """`lengths[rank]` samples on each rank, taken in turn."""

    def __init__(self, rank: int, lengths: tuple[int, ...]) -> None:
        self.rank, self.lengths = rank, lengths

    def __len__(self) -> int:
        return self.lengths[self.rank]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.rank + len(self) * len(self.lengths), len(self.lengths)))


class Stream(IterableDataset[tuple[Tensor]]):
    """The same samples, without a length."""

    def __init__(self, dataset: TensorDataset, sampler: Some) -> None:
        self.dataset, self.sampler = dataset, sampler

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        assert get_worker_info() is None
        return (self.dataset[i] for i in self.sampler)


class Uneven(TinyGPT):
    """Validates, tests and predicts `lengths[rank]` samples, as `kind` says."""

    def __init__(self, kind: str, lengths: tuple[int, ...]) -> None:
        super().__init__(samples=64, layers=2)
        self.kind, self.lengths = kind, lengths

    def loader(self, lengths: tuple[int, ...]) -> DataLoader:
        sampler = Some(self.trainer.global_rank, lengths)
        data = self.dataset("val")
        if self.kind.startswith("stream"):
            return DataLoader(Stream(data, sampler), batch_size=2)
        return DataLoader(data, batch_size=2, sampler=sampler)

    def val_dataloader(self) -> Any:
        if self.kind in ("several", "streams"):
            return [self.loader(self.lengths), self.loader(self.lengths[::-1])]
        if self.kind in ("max_size", "min_size", "max_size_cycle"):
            loaders = {"a": self.loader(self.lengths), "b": self.loader(tuple(n + 2 for n in self.lengths))}
            return CombinedLoader(loaders, mode=self.kind)
        return self.loader(self.lengths)

    test_dataloader = predict_dataloader = val_dataloader

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if isinstance(batch, dict):  # of a CombinedLoader; an exhausted loader gives None
            batch = [torch.cat([part[0] for part in batch.values() if part is not None])]
        size = len(batch[0])
        self.log("val_loss", self.loss(batch, "val"), sync_dist=True, batch_size=size)
        self.log("count", float(size), reduce_fx="sum", sync_dist=True, batch_size=size)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0][:, :-1])


def uneven(make: MakeTrainer, kind: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    module = Uneven(kind, lengths)
    trainer = make(max_epochs=2, limit_train_batches=2, num_sanity_val_steps=1, use_distributed_sampler=False)
    trainer.fit(module)
    fitted = numbers(trainer.callback_metrics)
    combined = kind in ("max_size", "min_size", "max_size_cycle")  # Lightning predicts from sequential loaders only
    predicted = None if combined else trainer.predict(module)
    validated = trainer.validate(module, verbose=False)
    limited = make(limit_val_batches=2, use_distributed_sampler=False).validate(module, verbose=False)
    return {
        "fitted": fitted,
        "predicted": predicted if predicted is not None else {},
        "validated": validated,
        "limited": limited,
        "tested": trainer.test(module, verbose=False),
        "parameters": whole_parameters(module),
    }


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [("sampler", (6, 1)), ("sampler", (3, 10)), ("stream", (2, 9)), ("several", (7, 2)), ("streams", (4, 9)),
     ("max_size", (3, 8)), ("min_size", (8, 3)), ("max_size_cycle", (2, 6))],
)  # fmt: skip
def test_unequal_numbers_of_batches(pool, kind, lengths):
    check_same(pool, 2, uneven, kind, lengths, timeout=60)


def stream_without_samples_on_a_rank() -> None:
    quiet()
    sharded(1)(use_distributed_sampler=False).validate(Uneven("stream", (4, 0)), verbose=False)


def test_a_rank_without_any_batch_is_told_so(pool):
    with pytest.raises(WorkerError, match="no batch"):
        pool.run(2, stream_without_samples_on_a_rank, timeout=60)


def uneven_training(make: MakeTrainer) -> dict[str, Any]:
    """19 samples over 2 ranks in batches of 4: the last one has 2 samples on each rank."""
    module = TinyGPT(samples=19, layers=2)
    trainer = make(max_epochs=2)
    trainer.fit(module)
    return {"metrics": numbers(trainer.callback_metrics), "parameters": whole_parameters(module)}


def test_uneven_last_batches(pool):
    check_same(pool, 2, uneven_training)
