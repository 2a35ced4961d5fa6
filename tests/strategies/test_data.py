"""Which samples and which batch contents each data-parallel rank reads: exactly those it reads under DDP."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_4d import NDStrategy
from tests.modules import TinyGPT
from tests.strategies.scenarios import MakeTrainer, check_same, numbers, whole_parameters

VOCAB, LENGTH = 31, 12


class Augmented(Dataset[tuple[Tensor, int]]):
    """Random tokens from all three global generators, beside the sample's index."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = int(torch.randint(VOCAB, ())) + int(np.random.randint(VOCAB)) + random.randrange(VOCAB)
        return (torch.arange(LENGTH + 1) * (index + 1) + noise) % VOCAB, index


class Reading(TinyGPT):
    """Records the indices and contents of its batches; its dropout draws from the model's stream."""

    def __init__(self, workers: int = 0) -> None:
        super().__init__(layers=2, dropout=0.1)
        self.workers = workers
        self.read: dict[str, list[Tensor]] = {"train": [], "val": []}
        self.contents: dict[str, list[Tensor]] = {"train": [], "val": []}

    def make_loader(self, shuffle: bool) -> DataLoader:
        return DataLoader(Augmented(22), batch_size=4, shuffle=shuffle, num_workers=self.workers)

    def train_dataloader(self) -> DataLoader:
        return self.make_loader(shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self.make_loader(shuffle=False)

    def loss(self, batch: Any, stage: str) -> Tensor:
        tokens_BT, index_B = batch
        self.read[stage].append(index_B)
        self.contents[stage].append(tokens_BT)
        return super().loss((tokens_BT,), stage)


def reading(make: MakeTrainer, workers: int) -> dict[str, Any]:
    module = Reading(workers)
    trainer = make(max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(module)
    return {
        "read": {stage: torch.cat(indices) for stage, indices in module.read.items()},
        "contents": {stage: torch.cat(tokens) for stage, tokens in module.contents.items()},
        "metrics": numbers(trainer.callback_metrics),
        "parameters": whole_parameters(module),
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("replicate", [1, 2])
def test_F1_samples_and_contents_are_those_of_ddp(pool, workers, replicate):
    ranks = check_same(pool, 2, reading, workers, replicate=replicate)
    first, second = (rank["read"]["train"].view(2, 11) for rank in ranks)
    for epoch in range(2):
        mine, theirs = set(first[epoch].tolist()), set(second[epoch].tolist())
        assert mine.isdisjoint(theirs)
        assert mine | theirs == set(range(22))
    assert not torch.equal(first[0], first[1]), "shuffled anew in each epoch"
    contents = [rank["contents"]["train"] for rank in ranks]
    assert not torch.equal(contents[0], contents[1])


class Numbers(IterableDataset[Tensor]):
    """Samples `first`, `first + step`, ...: one data-parallel rank's share of 24."""

    def __init__(self, first: int, step: int) -> None:
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[Tensor]:
        return ((torch.arange(LENGTH + 1) * (i + 1)) % VOCAB for i in range(self.first, 24, self.step))


class Streaming(TinyGPT):
    """Splits an IterableDataset by the data-parallel coordinates of the strategy (those of the process under DDP)."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.first_tokens: list[Tensor] = []

    def train_dataloader(self) -> DataLoader:
        strategy = self.trainer.strategy
        if isinstance(strategy, NDStrategy):
            share = Numbers(strategy.data_parallel_rank, strategy.data_parallel_size)
        else:
            share = Numbers(self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(share, batch_size=2)

    def loss(self, batch: Any, stage: str) -> Tensor:
        if stage == "train":
            self.first_tokens.append(batch[:, 1])
            batch = (batch,)
        return super().loss(batch, stage)


def streaming(make: MakeTrainer) -> dict[str, Any]:
    module = Streaming()
    trainer = make(max_epochs=1, limit_val_batches=2)
    trainer.fit(module)
    return {
        "tokens": torch.cat(module.first_tokens),
        "metrics": numbers(trainer.callback_metrics),
        "parameters": whole_parameters(module),
    }


def test_F3_an_iterable_dataset_is_split_by_the_data_parallel_rank(pool):
    ranks = check_same(pool, 2, streaming)
    assert sorted(torch.cat([rank["tokens"] for rank in ranks]).tolist()) == list(range(1, 25))


class Batches(LightningDataModule):
    """A datamodule with several loaders, reloaded in every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def train_dataloader(self) -> dict[str, DataLoader]:
        self.made += 1
        return {
            "a": DataLoader(Augmented(12), batch_size=3, shuffle=True),
            "b": DataLoader(Augmented(20), batch_size=2),
        }

    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(Augmented(10), batch_size=2), DataLoader(Augmented(6), batch_size=2)]


class SeveralLoaders(TinyGPT):
    def __init__(self) -> None:
        super().__init__(layers=2)
        self.read: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [part for part in batch.values() if part is not None]
        self.read += [index for _, index in parts]
        return torch.stack([self.loss((tokens,), "train") for tokens, _ in parts]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss((batch[0],), "val"), sync_dist=True)


def several_loaders(make: MakeTrainer) -> dict[str, Any]:
    module, data = SeveralLoaders(), Batches()
    trainer = make(max_epochs=2, reload_dataloaders_every_n_epochs=1, overfit_batches=0)
    trainer.fit(module, data)
    assert data.made == 2
    return {
        "read": torch.cat(module.read),
        "metrics": numbers(trainer.callback_metrics),
        "parameters": whole_parameters(module),
    }


def test_several_loaders_of_a_datamodule(pool):
    check_same(pool, 2, several_loaders)
