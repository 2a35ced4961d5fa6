"""Faults put in on purpose: each turns the comparison of a pipeline with one process red."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_4d import NDStrategy
from lightning_4d.parallel.pipeline import reduction, seeds
from lightning_4d.strategies import pipeline_steps
from tests import staged_modules as staged
from tests.harness import compare, staged_tensors, train
from tests.modules import TinyGPT

FOUR = partial(TinyGPT, layers=4)
TIED = partial(TinyGPT, layers=4, tied=True)
FIVE = partial(TinyGPT, layers=4, batch_size=5, samples=20)


class RootOfMean(staged.Staged):
    """A loss whose derivative by the mean is known after the last microbatch only."""

    def loss(self, batch: Any, stage: str) -> Tensor:
        return super().loss(batch, stage).sqrt()


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _wrong_microbatch() -> Any:
    original = pipeline_steps.PipelineSteps._pieces

    def pieces(self: Any, batch: Any) -> list[Any]:
        found = original(self, batch)
        return found[::-1] if self._pipeline is not None and self.pipeline.is_last else found

    return mock.patch.object(pipeline_steps.PipelineSteps, "_pieces", pieces)


def _equal_weights() -> Any:
    return mock.patch.object(seeds.Seeds, "root", lambda self, index, part, loss: loss / len(self.sizes))


def _scale_dropped() -> Any:
    original = pipeline_steps.PipelineSteps._deliver

    def deliver(self: Any, made: Any, gradient: Any, correction: Any, scale: Any) -> None:
        original(self, made, gradient, correction, None)

    return mock.patch.object(pipeline_steps.PipelineSteps, "_deliver", deliver)


def _gradients_lost() -> Any:
    original = pipeline_steps.take_gradients
    calls = [0]

    def take(leaves: Any) -> Any:
        calls[0] += 1
        found = original(leaves)
        return {} if calls[0] % 2 == 1 else found  # what was accumulated before this batch is forgotten

    return mock.patch.object(pipeline_steps, "take_gradients", take)


FAULTS: dict[str, tuple[dict[str, Any], Any]] = {
    "the gradient of tied weights is not summed": (
        {"module": TIED},
        lambda: mock.patch.object(pipeline_steps._Shared, "sum_gradients", _nothing),
    ),
    "a tied parameter counts twice in the norm": (
        {"module": TIED, "gradient_clip_val": 0.05},
        lambda: mock.patch.object(pipeline_steps.PipelineSteps, "counted_elsewhere", return_value=set()),
    ),
    "the last stage gets another microbatch": ({"module": FOUR}, _wrong_microbatch),
    "microbatches weigh the same": ({"module": FIVE}, _equal_weights),
    "no correction by the batch's total": (
        {"module": RootOfMean},
        lambda: mock.patch.object(reduction.BatchReduction, "correction", _nothing),
    ),
    "every microbatch's loss counts as the batch's": (
        {"module": FOUR},
        lambda: mock.patch.object(seeds.Seeds, "root", lambda self, index, part, loss: loss),
    ),
    "gradients are not divided by the scale": ({"module": FOUR, "scaled": True}, _scale_dropped),
    "accumulated gradients are lost": (
        {"module": FOUR, "accumulate_grad_batches": 2},
        _gradients_lost,
    ),
}


def run(names: list[str], strategy: Any, *, with_fault: bool) -> list[Any]:
    found = []
    for name in names:
        settings, fault = FAULTS[name]
        settings = dict(settings)
        if settings.pop("scaled", False):
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            settings |= {"precision": None, "plugins": MixedPrecision("16-mixed", "cpu", scaler)}
        with fault() if with_fault else mock.MagicMock():
            found.append(train(strategy=strategy, gather=_gathered, steps=2, **settings))
    return found


def _gathered(tensors: Any) -> Any:
    try:
        return staged_tensors(tensors)
    except AssertionError:  # copies of tied weights differ: a fault that shows
        return {"copies differ": torch.zeros(1)}


def test_every_fault_turns_a_comparison_red(pool):
    names = list(FAULTS)
    (expected,) = pool.run(1, run, names, "auto", with_fault=False, timeout=200)
    strategy = partial(NDStrategy, pipeline_parallel_size=2, num_microbatches=2)
    right = pool.run(2, run, names, strategy, with_fault=False, timeout=300)
    wrong = pool.run(2, run, names, strategy, with_fault=True, timeout=300)
    for name, reference, good, bad in zip(names, expected, right[0], wrong[0], strict=True):
        rtol = 5e-3 if FAULTS[name][0].get("scaled") else 1e-10
        compare(good, reference, rtol=rtol, label=f"{name}: ")
        assert _differs(bad, reference, rtol), f"not noticed: {name}"


def _differs(bad: Any, reference: Any, rtol: float) -> bool:
    try:
        compare(bad, reference, rtol=rtol, what=("losses", "gradients", "clipped", "parameters"))
    except AssertionError:
        return True
    return False
