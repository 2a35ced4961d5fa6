"""Faults put in on purpose, on several axes at once: each turns the comparison of the grid with one process red.

By default on pairs of axes, on four ranks; with ``--slow`` on three axes at once, on eight.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_4d import NDStrategy
from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.context import communication
from lightning_4d.parallel.data.sharding import DataParallel
from lightning_4d.parallel.pipeline.seeds import Seeds
from lightning_4d.parallel.tensor.group import TensorGroup
from lightning_4d.strategies.crossings import Crossings
from lightning_4d.strategies.pipeline_steps import PipelineSteps, _Shared
from tests.comparison import Recording, compare
from tests.grid import GridGPT
from tests.harness import staged_tensors, train

MODEL = partial(GridGPT, ragged=True, tied=True, layers=2)
CONTEXT, TENSOR, STAGES = {"context_parallel_size": 2}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
Fault = Callable[[], AbstractContextManager[Any]]


class ShiftedLabels(GridGPT):
    """Each target is the one of the position after it."""

    def loss(self, batch: Any, stage: str) -> Tensor:
        (tokens_BT,) = batch
        return super().loss([torch.cat((tokens_BT[:, :1], tokens_BT[:, 1:].roll(-1, 1)), dim=1)], stage)


def _without_sums(*, backward: bool) -> Fault:
    """Tensor-parallel ranks do not add up their summands, of one direction."""
    original = TensorGroup.all_reduce

    def reduce(self: TensorGroup, tensor: Tensor, why: str, **kwargs: Any) -> Tensor:
        is_dropped = kwargs.get("backward", False) == backward and "loss" not in why and "logit" not in why
        return tensor if is_dropped else original(self, tensor, why, **kwargs)

    return lambda: mock.patch.object(TensorGroup, "all_reduce", reduce)


def _backward_of(function: Any, backward: Any) -> Fault:
    return lambda: mock.patch.object(function, "backward", staticmethod(backward))


def _other_positions() -> AbstractContextManager[Any]:
    """A stage takes what it receives for other positions."""
    original = Crossings.unpack
    return mock.patch.object(Crossings, "unpack", lambda self, t, *rest: original(self, t.roll(1, 1), *rest))


def _other_microbatch() -> AbstractContextManager[Any]:
    original = PipelineSteps._pieces

    def pieces(self: Any, batch: Any) -> list[Any]:
        found = original(self, batch)
        return found[::-1] if self._pipeline is not None and self.pipeline.is_last else found

    return mock.patch.object(PipelineSteps, "_pieces", pieces)


def _gradients_summed() -> AbstractContextManager[Any]:
    """Gradients are summed over the ranks that share parameters, not averaged."""
    original = DataParallel.before_backward

    def before(self: DataParallel, loss: Tensor) -> None:
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
        original(self, loss)

    return mock.patch.object(DataParallel, "before_backward", before)


def _batches_by_global_rank() -> AbstractContextManager[Any]:
    kwargs = property(lambda self: {"num_replicas": self.world_size, "rank": self.global_rank})
    return mock.patch.object(NDStrategy, "distributed_sampler_kwargs", kwargs)


def _nothing(*_: Any) -> None: ...


IN_PARTS: dict[str, Fault] = {
    "summands of a divided product are not added up": _without_sums(backward=False),
    "gradients of what divided products read are not added up": _without_sums(backward=True),
    "sums over a divided sequence stay local": lambda: mock.patch.object(
        communication, "_all_reduced", lambda tensor, groups: tensor.clone()
    ),
    "gradients of a sequence's parts are too small by its ranks": _backward_of(
        communication._Sum, lambda ctx, *grads: (grads[0], None)
    ),
    "a whole sequence gives each rank its whole gradient": _backward_of(
        communication._Cut, lambda ctx, *grads: (communication.join_parts(grads[0], ctx.sharding), None)
    ),
    "cross-entropy of classes in parts takes each part for all": lambda: mock.patch.object(
        TensorGroup, "all_reduce", lambda self, tensor, why, **_: tensor
    ),
}
IN_MICROBATCHES: dict[str, Fault] = {
    "the last stage gets another microbatch": _other_microbatch,
    "microbatches with few targets weigh as much": lambda: mock.patch.object(
        Seeds, "root", lambda self, index, part, loss: loss / len(self.sizes)
    ),
    "a stage receives other positions": _other_positions,
    "the gradient of tied weights is not summed": lambda: mock.patch.object(_Shared, "sum_gradients", _nothing),
    "a tied parameter counts twice in the norm": lambda: mock.patch.object(
        PipelineSteps, "counted_elsewhere", return_value=set()
    ),
}
IN_DATA: dict[str, Fault] = {
    "gradients are summed over data and context": _gradients_summed,
    "ranks of a group read different batches": _batches_by_global_rank,
}


def run(strategy: Any, fault: Fault | None = None, model: Any = MODEL) -> Recording | None:
    """Train for two steps; None where the fault is refused by name."""
    try:
        with fault() if fault is not None else mock.MagicMock():
            return train(model, strategy, steps=2, gather=_gathered, gradient_clip_val=0.05)
    except UnsupportedError:
        return None


def _gathered(tensors: Any) -> Any:
    try:
        return staged_tensors(tensors)
    except AssertionError:  # copies of tied weights differ: a fault that shows
        return {"copies differ": torch.zeros(1)}


def in_parts(sizes: dict[str, Any]) -> list[Recording | None]:
    """The right numbers, labels that are shifted, and each fault."""
    # With one microbatch: where ranks of a group hold different values, the probe would not end on all of them.
    strategy = partial(NDStrategy, **sizes, num_microbatches=1, pipeline_schedule="gpipe")
    shifted = run(strategy, model=partial(ShiftedLabels, ragged=True, tied=True, layers=2))
    return [run(strategy), shifted, *(run(strategy, fault) for fault in IN_PARTS.values())]


def each_of(faults: dict[str, Fault], sizes: dict[str, Any]) -> list[Recording | None]:
    strategy = partial(NDStrategy, **sizes)
    return [run(strategy), *(run(strategy, fault) for fault in faults.values())]


def in_microbatches(sizes: dict[str, Any]) -> list[Recording | None]:
    return each_of(IN_MICROBATCHES, sizes)


def in_data(sizes: dict[str, Any]) -> list[Recording | None]:
    return each_of(IN_DATA, sizes)


def check(found: list[Recording | None], names: list[str], expected: Recording) -> None:
    right, *wrong = found
    assert right is not None
    compare(right, expected, rtol=1e-10)
    for name, actual in zip(names, wrong, strict=True):
        assert _is_red(actual, expected), f"not seen: {name}"


def _is_red(actual: Recording | None, expected: Recording) -> bool:
    if actual is None:
        return True
    try:
        compare(actual, expected, rtol=1e-6)
    except AssertionError:
        return True
    return False


@pytest.fixture(scope="module")
def expected(pool):
    return pool.run(1, train, MODEL, "auto", steps=2, gradient_clip_val=0.05)[0]


def layouts(*axes: dict[str, Any], third: dict[str, Any]) -> list[Any]:
    two = axes[0] | axes[1]
    return [two, pytest.param(two | third, marks=pytest.mark.slow)]


def ranks(sizes: dict[str, Any]) -> int:
    return 2 ** len(sizes)


@pytest.mark.parametrize("sizes", layouts(CONTEXT, TENSOR, third=STAGES), ids=["2", "3"])
def test_faults_on_context_and_tensor_axes_are_seen(pool, expected, sizes):
    found = pool.run(ranks(sizes), in_parts, sizes, timeout=400)[0]
    check(found, ["labels are shifted by one", *IN_PARTS], expected)


@pytest.mark.parametrize("sizes", layouts(STAGES, TENSOR, third=CONTEXT), ids=["2", "3"])
def test_faults_on_the_pipeline_axis_are_seen(pool, expected, sizes):
    found = pool.run(ranks(sizes), in_microbatches, sizes, timeout=400)[0]
    check(found, list(IN_MICROBATCHES), expected)


@pytest.mark.parametrize("sizes", layouts({"data_parallel_shard_size": 2}, CONTEXT, third=TENSOR), ids=["2", "3"])
def test_faults_on_the_data_axis_are_seen(pool, sizes):
    expected = pool.run(2, train, MODEL, "ddp", steps=2, gradient_clip_val=0.05)[0]
    check(pool.run(ranks(sizes), in_data, sizes, timeout=400)[0], list(IN_DATA), expected)
