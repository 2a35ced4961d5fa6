"""What a step logs, kept for later, so that every rank can log the same values once they are known."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_4d.errors import UnsupportedError, explain

_SIGNATURE = inspect.signature(LightningModule.log)


@dataclass
class StepLog:
    """The ``self.log`` calls of one run of a step, in order.

    Attributes:
        options: name → what was given besides the value, and for a metric its attribute in the module.
        values: name → 0-d tensor or number; None for a metric.
        given: name → the very object that was given, by which it is known what made it.
        from_metric: name → the metric whose call returned the value.
    """

    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, Tensor | float | None] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
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
        self.given[name] = value
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


_attributes: WeakKeyDictionary[LightningModule, dict[str, str]] = WeakKeyDictionary()  # by key, as last found


def _attribute(module: LightningModule, name: str, metric: Any) -> str:
    known = _attributes.setdefault(module, {})
    if name in known and _at(module, known[name]) is metric:
        return known[name]
    for attribute, child in module.named_modules():
        if child is metric:
            known[name] = attribute
            return attribute
    raise UnsupportedError(
        explain(
            f"the metric logged as {name!r} is no attribute of the module",
            "a metric is found by its name on every rank",
            "assign it in __init__, as in self.accuracy = ...",
        )
    )


def _at(module: nn.Module | None, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = None if module is None else module._modules.get(name)
    return module


def replay(module: LightningModule, options: dict[str, dict[str, Any]], values: dict[str, Any]) -> None:
    """Log on this rank what the last stage kept. Which ranks must call: all that share the batch."""
    for name, given in options.items():
        value = values[name]
        if value is None:
            value = module.get_submodule(given["metric_attribute"])
        module.log(name, cast("Any", value), **given)


def caches(module: LightningModule, options: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    """Return the values of this step of metrics that are logged as objects, by their attribute."""
    metrics = {given["metric_attribute"]: None for given in options.values() if given.get("metric_attribute")}
    found = {attribute: getattr(module.get_submodule(attribute), "_forward_cache", None) for attribute in metrics}
    return {a: value for a, value in found.items() if isinstance(value, Tensor) and value.numel() == 1}


def set_caches(module: LightningModule, values: dict[str, Tensor]) -> None:
    """Let metrics tell these values of this step, which they were called in on another rank."""
    for attribute, value in values.items():
        vars(module.get_submodule(attribute))["_forward_cache"] = value


def as_tensor(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a value as a 0-d tensor that keeps numbers exact."""
    if isinstance(value, Tensor):
        return value.detach().reshape(())
    return torch.tensor(float(value), dtype=torch.float64, device=device)
