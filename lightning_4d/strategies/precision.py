"""Make Lightning's precision plugins work on parameters and gradients that are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import Optimizer

from lightning_4d._torch_private import share_overflow
from lightning_4d.parallel.data import DataParallel
from lightning_4d.parallel.gradients import Elsewhere, clip_gradients_by_norm, clip_gradients_by_value

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def autocast_dtype(plugin: Precision) -> torch.dtype | None:
    """Return the dtype to which a precision plugin's autocast casts weights; None for a plugin without autocast."""
    return _AUTOCAST.get(plugin.precision) if isinstance(plugin, MixedPrecision) else None


def adapt_precision_plugin(
    plugin: Precision, data: DataParallel, elsewhere: Callable[[], Elsewhere | None] = lambda: None
) -> None:
    """Replace, on this plugin, what would act on one rank's part of the gradients only; gather in autocast's dtype.

    A plugin with its own clipping keeps it. A gradient scaler agrees over all ranks whether a step overflowed.

    Args:
        plugin: Lightning's.
        data: the sharded module.
        elsewhere: what other pipeline stages hold, if there are any.
    """

    def by_norm(optimizer: Optimizer, clip_val: float) -> None:
        data.reduce_manual_gradients()
        clip_gradients_by_norm(plugin.main_params(optimizer), clip_val, elsewhere=elsewhere())

    def by_value(optimizer: Optimizer, clip_val: float) -> None:
        data.reduce_manual_gradients()
        clip_gradients_by_value(plugin.main_params(optimizer), clip_val)

    if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
        plugin.clip_grad_by_norm = by_norm
    if type(plugin).clip_grad_by_value is Precision.clip_grad_by_value:
        plugin.clip_grad_by_value = by_value
    # What autocast casts is found in the first step as one run; a pipeline's stages are many runs.
    data.gather_in(autocast_dtype(plugin) if elsewhere() is None else None)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        share_overflow(scaler)
