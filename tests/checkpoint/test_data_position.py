"""A loader continues where it was, whatever its sampler; nothing is loaded twice and the user's object is untouched."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from lightning_4d.strategies.data_position import MARK, resumable


class Numbers(Dataset):
    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)


def weighted() -> DataLoader:
    return DataLoader(Numbers(), batch_size=3, sampler=WeightedRandomSampler([1.0] * 20, 20))


def own_generator(seed: int = 5) -> DataLoader:
    return DataLoader(Numbers(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(seed))


def batches_of_samples() -> DataLoader:
    return DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 3, drop_last=True))


def without_batches() -> DataLoader:
    return DataLoader(Numbers(), batch_size=None, shuffle=True)


LOADERS = [
    partial(DataLoader, Numbers(), 3, shuffle=True),
    weighted,
    own_generator,
    batches_of_samples,
    without_batches,
]


def as_lists(items: Any) -> list[Any]:
    return [torch.as_tensor(item).tolist() for item in items]


@pytest.mark.parametrize("make", LOADERS, ids=["shuffle", "weighted", "generator", "batch_sampler", "unbatched"])
@pytest.mark.parametrize("done", [0, 1, 4])
def test_a_loader_continues_in_its_second_pass(make, done):
    torch.manual_seed(0)
    progress = 0
    loader = resumable(make(), lambda: progress)
    list(loader)
    iterator = iter(loader)
    for _ in range(done):
        next(iterator)
        progress += 1
    state, random = loader.state_dict(), torch.get_rng_state()
    rest, following = as_lists(iterator if done else loader), as_lists(loader)

    torch.manual_seed(99)
    again = resumable(make(), lambda: done)
    again.position.load(state[MARK])
    assert state[MARK]["batches"] == done
    iterator = iter(again)
    torch.set_rng_state(random)  # as a strategy does between the iterator's making and its first batch
    if isinstance(make, partial):
        again.dataset.loaded.clear()
    if done:
        assert as_lists(iterator) == rest
        assert as_lists(again) == following
    if done and isinstance(make, partial):
        assert len(again.dataset.loaded) == 20 - 3 * done + 20  # skipped samples are not loaded


def test_the_users_loader_keeps_its_class_and_sampler():
    loader = DataLoader(Numbers(), batch_size=3)
    cls, sampler = type(loader), loader.batch_sampler
    made = resumable(loader, lambda: 0)
    assert type(loader) is cls
    assert loader.batch_sampler is sampler
    assert isinstance(made, DataLoader)
    assert len(made) == len(loader) == 7
    assert made.batch_sampler.batch_size == 3
    assert resumable(made, lambda: 0) is made


def test_what_cannot_be_continued_stays_as_it_is():
    stream = DataLoader(Stream())
    assert resumable(stream, lambda: 0) is stream
    assert resumable([1, 2], lambda: 0) == [1, 2]


def test_a_short_loader_that_cycles_counts_its_own_batches():
    progress = 0
    loader = resumable(DataLoader(Numbers(), batch_size=5), lambda: progress)
    iterator = iter(loader)
    for _ in range(6):
        try:
            next(iterator)
        except StopIteration:
            iterator = iter(loader)
            next(iterator)
        progress += 1
    assert loader.state_dict()[MARK]["batches"] == 2
