"""Run a training step of one rank on fake tensors: forward, backward and the reduction of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_4d.parallel.pipeline.batch import tensors_by_path
from lightning_4d.parallel.pipeline.handover import Gradients, give_gradients, loss_with_backward, take_gradients
from lightning_4d.rehearsal.observe import Communications
from lightning_4d.rehearsal.placed import Placed, Stages
from lightning_4d.strategies.fake_step import require_loss
from lightning_4d.strategies.pipeline_results import StepTrace

__all__ = ["run_step"]


def run_step(
    trainer: Trainer,
    placed: Placed,
    batch: Any,
    seen: Communications,
    zero_gradients: Callable[[], None],
    *,
    microbatches: int | None = None,
) -> int:
    """Run one step, and leave reduced gradients; return the bytes of gradients that were whole at its end.

    Args:
        trainer: whose precision applies.
        placed: the module.
        batch: of a data-parallel rank, on fake tensors.
        seen: told which code is the user's.
        zero_gradients: forgets the gradients of the step before: as Lightning does it, between forward and backward.
        microbatches: of pipeline stages, how many to run: all, or the first ones.
    """
    step = seen.as_user_code(placed.module.training_step)
    if placed.stages is not None:
        return _run_stages(placed, placed.stages, step, zero_gradients, microbatches)
    data = placed.data
    with trainer.precision_plugin.train_step_context():
        loss = require_loss(data.run_training_step(placed.in_parts(lambda given: step(given, 0)), batch))
    zero_gradients()
    data.before_backward(loss)
    with placed.backward():
        loss.backward()
    data.after_backward()
    return 0


def _run_stages(
    placed: Placed,
    stages: Stages,
    step: Callable[..., Any],
    zero_gradients: Callable[[], None],
    microbatches: int | None,
) -> int:
    whole: list[int] = []

    def train(_: Any) -> Tensor:
        made = _run_schedule(placed, stages, step, microbatches)
        whole.append(sum(map(_bytes, made.values())))
        return loss_with_backward(torch.zeros(()), lambda _: _deliver(placed, stages, made))

    loss = placed.data.run_training_step(train, None)
    zero_gradients()
    placed.data.before_backward(loss)
    loss.backward()
    placed.data.after_backward()
    return whole[0]


def _run_schedule(placed: Placed, stages: Stages, step: Callable[..., Any], microbatches: int | None) -> Gradients:
    """Run the schedule; gradients are left where autograd left them, summed over microbatches."""
    assert stages.pipeline is not None
    data, pieces = placed.data, stages.pieces[:microbatches]
    take_gradients(data.gradient_leaves())  # of the step before: they are let go
    data.begin_schedule()
    with placed.backward():
        stages.pipeline.run(
            placed.in_parts(lambda piece: step(piece, 0)),
            pieces,
            stages.records[: len(pieces)],
            _Losses(stages.pieces),
            ("rehearsal",),
            backward=True,
        )
    return take_gradients(data.gradient_leaves())


def _deliver(placed: Placed, stages: Stages, made: Gradients) -> None:
    for shared in stages.shared:
        shared.sum_gradients(made)
    give_gradients(made)
    placed.data.end_schedule()


def _bytes(gradient: Tensor) -> int:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.numel() * local.element_size()


class _Losses:
    """Takes the losses of microbatches on the last stage, as the mean over the batch.

    Args:
        pieces: all microbatches of a step.
    """

    def __init__(self, pieces: Sequence[Any]) -> None:
        self._pieces = pieces

    def trace(self, microbatch: int, *, is_last: bool) -> StepTrace | None:
        """Follow the user's code where a step does: under it a loss is a sum and a count of targets."""
        if not is_last or len(self._pieces) == 1:
            return None
        trace = StepTrace("auto")
        trace.entries(*(tensor for _, tensor in tensors_by_path(self._pieces[microbatch]) if tensor.dim() > 0))
        return trace

    def finished(self, microbatch: int, result: Any) -> Tensor:
        """Return what the backward starts from."""
        return require_loss(result)
