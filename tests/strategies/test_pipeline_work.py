"""What a steady pipeline step does besides computing, counted: messages, and walks over the module's tree."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import nn

from lightning_4d import NDStrategy
from tests.harness import staged_tensors, train
from tests.modules import TinyGPT

STEPS = 5  # the first two also compare the batches of the ranks, and the first the loss with its parts


class Walks(Callback):
    """By step: which functions of lightning_4d began to walk over a tree of modules."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._original, counts = nn.Module.named_modules, Counter[str]()

        def counted(module: nn.Module, memo: Any = None, *args: Any, **kwargs: Any) -> Any:
            if memo is None:
                counts.update(_callers())
            return self._original(module, memo, *args, **kwargs)

        nn.Module.named_modules = counted  # type: ignore[method-assign]
        self.steps.append(counts)

    def on_train_batch_end(self, *_: Any) -> None:
        nn.Module.named_modules = self._original  # type: ignore[method-assign]


def _callers() -> set[str]:
    """The innermost function of lightning_4d on the stack, if torch or Lightning were not asked by others."""
    frame = sys._getframe(2)
    while frame is not None and "lightning_4d" not in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return set() if frame is None else {f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"}


def steady(microbatches: int) -> tuple[list[dict[str, int]], list[Counter[str]]]:
    walks = Walks()
    strategy = partial(NDStrategy, pipeline_parallel_size=2, pipeline_schedule="1f1b", num_microbatches=microbatches)
    recording = train(
        partial(TinyGPT, layers=4, batch_size=8),
        strategy,
        steps=STEPS,
        gather=staged_tensors,
        count_communication=True,
        callbacks=lambda: [walks],
    )
    return recording.communication[2:], walks.steps[2:]


@pytest.mark.parametrize("microbatches", [2, 8])
def test_a_steady_step_does_no_more_than_it_must(pool, microbatches):
    for communication, walks in pool.run(2, steady, microbatches):
        assert len(communication) == STEPS - 2
        for step in communication:  # one broadcast tells the loss and what is logged, one is the Trainer's (SIGTERM)
            assert step == {"send": microbatches, "recv": microbatches, "broadcast": 2}
        assert len(walks) == STEPS - 2
        for step in walks:
            assert not step, step
