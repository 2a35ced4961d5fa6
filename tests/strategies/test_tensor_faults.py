"""Each collective of tensor parallelism is needed: without it, the comparison with one process is red."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_4d import NDStrategy, TPStrategy
from lightning_4d.parallel.tensor.group import TensorGroup
from tests.harness import Recording, compare, reference, train
from tests.modules import TinyGPT
from tests.parallel.tensor.modules import Llama
from tests.strategies.scenarios import error_of, quiet, trainer_with

MODEL = partial(Llama, layers=1, kv_heads=1)
WHY = {
    "output of a row-wise product": ("row-wise", False),
    "input gradient of a column-wise product": ("column-wise", True),
    "vocabulary-parallel embedding": ("vocabulary-parallel", False),
    "largest logit and sums of the loss": ("cross-entropy", False),
    "gradient of keys that are cut": ("a product with parts", True),
    "gradient of a norm's parameter": ("mul", True),
}


def without(pattern: str, backward: bool) -> Recording:
    """Train with the all-reduces and all-gathers of one reason left out."""
    all_reduce, all_gather = TensorGroup.all_reduce, TensorGroup.all_gather

    def reduce(self: TensorGroup, tensor: Tensor, why: str, **kwargs: Any) -> Tensor:
        dropped = pattern in why and kwargs.get("backward", False) == backward
        return tensor if dropped else all_reduce(self, tensor, why, **kwargs)

    def gather(self: TensorGroup, tensor: Tensor, dim: int, why: str, **kwargs: Any) -> Tensor:
        if pattern in why and kwargs.get("backward", False) == backward:
            return torch.cat([tensor] * self.size, dim)
        return all_gather(self, tensor, dim, why, **kwargs)

    with mock.patch.object(TensorGroup, "all_reduce", reduce), mock.patch.object(TensorGroup, "all_gather", gather):
        return train(MODEL, TPStrategy, steps=1)


def all_faults() -> dict[str, Recording]:
    return {name: without(*which) for name, which in WHY.items()}


def test_dropping_any_collective_turns_the_comparison_red(pool):
    expected = reference(pool, 1, MODEL, steps=1)[0]
    compare(pool.run(2, train, MODEL, TPStrategy, steps=1)[0], expected, rtol=1e-10)
    for name, actual in pool.run(2, all_faults)[0].items():
        assert is_red(actual, expected), f"without the {name} the numbers are still right"


def is_red(actual: Recording, expected: Recording) -> bool:
    try:
        compare(actual, expected, rtol=1e-6)
    except AssertionError:
        return True
    return False


def counted(make: Callable[[], Any], strategy: Any) -> list[dict[str, int]]:
    return train(make, strategy, steps=4, count_communication=True).communication


def test_collectives_of_a_real_step(pool):
    layers = 2  # steps 0 and 1 also compare the batches of the ranks
    plain = partial(Llama, layers=layers, qk_norm="")
    (step,) = {tuple(sorted(s.items())) for s in pool.run(2, counted, plain, TPStrategy)[0][2:]}
    # Each block 2 forward and 2 backward; the embedding 1, the head's input gradient 1, the loss 2.
    assert dict(step)["all_reduce"] == 4 * layers + 4
    assert dict(step).get("all_gather", 0) == 0
    sequence = partial(TPStrategy, sequence_parallel=True)
    (step,) = {tuple(sorted(s.items())) for s in pool.run(2, counted, plain, sequence)[0][2:]}
    assert dict(step)["reduce_scatter"] == 4 * layers + 2
    assert dict(step)["all_gather"] == 4 * layers + 2


def test_accumulation_communicates_weights_once(pool):
    strategy = partial(NDStrategy, data_parallel_shard_size=2, tensor_parallel_size=2)
    steps = pool.run(4, accumulated, strategy)[0]
    assert {s["reduce_scatter"] for s in steps[1:]} == {3}  # two blocks and the rest, once for two batches


def accumulated(strategy: Any) -> list[dict[str, int]]:
    return train(Llama, strategy, steps=3, count_communication=True, accumulate_grad_batches=2).communication


class OwnBatches(TinyGPT):
    """Each rank changes the batch in its own way."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [(batch[0] + self.global_rank) % self.vocab]


def fit_own_batches() -> str:
    quiet()
    trainer = trainer_with(lambda: NDStrategy(tensor_parallel_size=2))(max_steps=1, limit_val_batches=0)
    return error_of(lambda: trainer.fit(OwnBatches()))


def test_ranks_that_share_layers_read_the_same_batches(pool):
    for error in pool.run(2, fit_own_batches):
        assert error.startswith("UnsupportedError: tensor-parallel ranks 0 and 1 read different batches"), error


class SynchronisedNorm(TinyGPT):
    """Synchronised batch normalisation runs on no CPU, but is made on one."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = torch.nn.BatchNorm1d(4)


def synchronised_over() -> list[int]:
    module = SynchronisedNorm()
    make = trainer_with(lambda: NDStrategy(tensor_parallel_size=2))
    make(sync_batchnorm=True, max_steps=1, limit_val_batches=0).fit(module)
    return dist.get_process_group_ranks(module.batch_norm.process_group)


def test_batch_norm_is_synchronised_over_data_parallel_ranks(pool):
    assert pool.run(4, synchronised_over) == [[0, 2], [1, 3], [0, 2], [1, 3]]
