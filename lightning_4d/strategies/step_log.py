"""What a step logs, kept for later, so that every rank can log the same values once they are known."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_4d.errors import UnsupportedError, explain

_SIGNATURE = inspect.signature(LightningModule.log)


@dataclass
class StepLog:
    """The ``self.log`` calls of one run of a step, in order.

    Attributes:
        options: name → what was given besides the value, and for a metric its attribute in the module.
        values: name → 0-d tensor or number; None for a metric.
        from_metric: name → the metric whose call returned the value.
    """

    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, Tensor | float | None] = field(default_factory=dict)
    from_metric: dict[str, str] = field(default_factory=dict)

    def keep(self, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``module.log``."""
        bound = _SIGNATURE.bind(module, *args, **kwargs).arguments
        bound.pop("self")
        name, value = bound.pop("name"), bound.pop("value")
        if name in self.options:
            raise UnsupportedError(
                explain(f"{name!r} is logged twice in one step", "a key has one value per step", "use two keys")
            )
        if isinstance(value, (Metric, MetricCollection)):
            bound["metric_attribute"] = bound.get("metric_attribute") or _attribute(module, name, value)
            self.options[name], self.values[name] = dict(bound), None
            return
        if isinstance(value, Tensor):
            value = value.clone()  # what is logged is the value now; a trace follows the copy
        self.options[name], self.values[name] = dict(bound), value

    @contextmanager
    def keeping(self, module: LightningModule) -> Iterator[None]:
        """Keep what ``module`` logs inside, instead of logging it."""
        before = vars(module).get("log")
        vars(module)["log"] = lambda *args, **kwargs: self.keep(module, *args, **kwargs)
        try:
            yield
        finally:
            if before is None:
                vars(module).pop("log", None)
            else:
                vars(module)["log"] = before


def _attribute(module: LightningModule, name: str, metric: Any) -> str:
    for attribute, child in module.named_modules():
        if child is metric:
            return attribute
    raise UnsupportedError(
        explain(
            f"the metric logged as {name!r} is no attribute of the module",
            "a metric is found by its name on every rank",
            "assign it in __init__, as in self.accuracy = ...",
        )
    )


def replay(module: LightningModule, options: dict[str, dict[str, Any]], values: dict[str, Any]) -> None:
    """Log on this rank what the last stage kept. Which ranks must call: all that share the batch."""
    for name, given in options.items():
        value = values[name]
        if value is None:
            value = module.get_submodule(given["metric_attribute"])
        module.log(name, cast("Any", value), **given)


def as_tensor(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a value as a 0-d tensor that keeps numbers exact."""
    if isinstance(value, Tensor):
        return value.detach().reshape(())
    return torch.tensor(float(value), dtype=torch.float64, device=device)
