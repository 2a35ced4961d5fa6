"""Gradients of the step before: pipeline stages make new ones before Lightning clears these."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_4d.parallel.pipeline.handover import Gradients


def without_stale(gradients: Gradients, trainer: Trainer) -> Gradients:
    """Leave out the gradients that Lightning clears after this training step, before anything can read them.

    Lightning runs training step, clearing, backward; what a schedule makes in the training step would stand beside the
    old gradients, and take as much memory again.

    Args:
        gradients: those that parameters have when a training step begins.
        trainer: in a training step.
    """
    if not gradients or not _clears_next(trainer):
        return gradients
    cleared: set[Tensor] = {
        parameter
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {parameter: gradient for parameter, gradient in gradients.items() if parameter not in cleared}


def _clears_next(trainer: Trainer) -> bool:
    loop, module = trainer.fit_loop.epoch_loop, trainer.lightning_module
    first = (loop.batch_progress.current.ready - 1) % trainer.accumulate_grad_batches == 0
    return first and module.automatic_optimization and not _looks_on(trainer, module)


def _looks_on(trainer: Trainer, module: LightningModule) -> bool:
    """Whether code of the user's runs before gradients are cleared, or clears them."""
    if is_overridden("on_before_zero_grad", module) or is_overridden("optimizer_zero_grad", module):
        return True
    callbacks: list[Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return any(is_overridden("on_before_zero_grad", callback) for callback in callbacks)
