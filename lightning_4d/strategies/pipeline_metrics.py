"""torchmetrics in a pipeline: updated on the last stage, computed everywhere.

The last stage holds the states. Before a metric is computed, which all ranks do together, the other stages take them
over. In a training step of several microbatches, what a metric's call returns is the value over the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """Return the metrics of a module by name, those inside other metrics left out."""
    found: dict[str, Metric] = {}
    inside: set[nn.Module] = set()
    for name, child in module.named_modules():
        if isinstance(child, Metric) and child not in inside:
            found[name] = child
            inside.update(child.modules())
    return found


def reduce_over(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let metrics gather over the ranks that read different data, not over all."""
    for child in module.modules():
        if isinstance(child, Metric) and child.process_group is None and child.dist_sync_fn is None:
            child.dist_sync_fn = _GatherOver(group)


class _GatherOver:
    """Gathers over one group. Unlike a metric's ``process_group`` it lets the metric be copied and pickled."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        return gather_all_tensors(value, group or self._group)

    def __deepcopy__(self, _memo: Any) -> _GatherOver:
        return self

    def __reduce__(self) -> str:
        return "gather_all_tensors"


class StageMetrics:
    """The metrics of one module.

    Args:
        module: the user's.
        group: the pipeline ranks.
        source: the rank of the last stage within the group.
        device: where the group's backend communicates.
    """

    def __init__(self, module: LightningModule, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group, self._source, self._device = group, source, device
        self._metrics = metrics_of(module)
        self._stale: set[str] = set()  # the last stage may have updated them since they were taken over
        self._in_step = False
        self._whole: dict[str, Metric] = {}  # of one batch
        self._called: dict[str, list[Tensor]] = {}  # what the calls of one step returned
        for name, metric in self._metrics.items():
            self._before_compute(name, metric)

    def _before_compute(self, name: str, metric: Metric) -> None:
        compute = metric.compute

        def computed(*args: Any, **kwargs: Any) -> Any:
            if not self._in_step and name in self._stale:
                self._stale.discard(name)
                self._take_over(metric)
            return compute(*args, **kwargs)

        metric.compute = computed  # type: ignore[method-assign]

    def _take_over(self, metric: Metric) -> None:
        """Give all pipeline ranks the states of the last stage. Which ranks must call: all of them."""
        is_source = dist.get_rank(self._group) == self._source
        box = [_states(metric) if is_source else None]
        dist.broadcast_object_list(box, group=self._group, group_src=self._source, device=self._device)
        if not is_source:
            _adopt(metric, box[0], self._device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step runs inside: metrics are the last stage's own."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            self._stale.update(self._metrics)

    # ------------------------------------------------------------------------------------------------- microbatches

    @contextmanager
    def microbatches(
        self, outside_trace: Callable[[], AbstractContextManager[Any]], *, trial: bool = False
    ) -> Iterator[None]:
        """Inside, calls of metrics add to the value over the whole batch; see :meth:`finish`.

        Args:
            outside_trace: surrounds the metric's own work, which no trace is to follow.
            trial: leave the metrics themselves as they are.
        """
        self._called.clear()
        for name, metric in self._metrics.items():
            update = _outside(metric.update, outside_trace)
            if trial:
                update = _skipped(metric.update)
            vars(metric)["forward"] = self._forward(name, metric, update, outside_trace)
            vars(metric)["update"] = update
        try:
            yield
        finally:
            for metric in self._metrics.values():
                vars(metric).pop("forward")
                vars(metric)["update"] = vars(metric)["update"].__wrapped__

    def _forward(
        self,
        name: str,
        metric: Metric,
        update: Callable[..., Any],
        outside_trace: Callable[[], AbstractContextManager[Any]],
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with outside_trace(), torch.no_grad():
                if name not in self._called:
                    self._begin(name, metric)
                update(*args, **kwargs)
                whole = self._whole[name]
                whole.update(*args, **kwargs)
                value = _without_sync(whole)
            self._called[name] += _leaves(value)
            return value

        return forward

    def _begin(self, name: str, metric: Metric) -> None:
        if name not in self._whole:
            self._whole[name] = whole = copy.deepcopy(metric)
            for attribute in ("forward", "update"):  # ours, of the original
                vars(whole).pop(attribute, None)
            whole.update = whole._wrap_update(type(whole).update.__get__(whole))  # type: ignore[method-assign]
            whole.compute = whole._wrap_compute(type(whole).compute.__get__(whole))  # type: ignore[method-assign]
        self._whole[name].reset()
        self._called[name] = []

    def metric_of(self, value: Any) -> str | None:
        """Return the name of the metric whose call in this step returned ``value``, or None."""
        for name, returned in self._called.items():
            if any(value is one for one in returned):
                return name
        return None

    def finish(self, name: str) -> Any:
        """Return a metric's value over the whole batch, for a metric that was called in this step; else None."""
        if name not in self._called:
            return None
        value = _without_sync(self._whole[name])
        self._metrics[name]._forward_cache = value
        return value


def _outside(
    update: Callable[..., Any], outside_trace: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    def updated(*args: Any, **kwargs: Any) -> Any:
        with outside_trace():
            return update(*args, **kwargs)

    updated.__wrapped__ = update  # type: ignore[attr-defined]
    return updated


def _skipped(update: Callable[..., Any]) -> Callable[..., Any]:
    def skipped(*_: Any, **__: Any) -> None: ...

    skipped.__wrapped__ = update  # type: ignore[attr-defined]
    return skipped


def _without_sync(metric: Metric) -> Any:
    metric._computed = None
    before, metric._to_sync = metric._to_sync, False
    try:
        return metric.compute()
    finally:
        metric._to_sync = before


def _leaves(value: Any) -> list[Tensor]:
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _states(metric: Metric) -> Any:
    """All that updates change in a metric and the metrics inside it, on the CPU."""
    cpu = torch.device("cpu")
    return [
        (
            {key: _moved(getattr(part, key), cpu) for key in part._defaults},
            part._update_count,
            {k: v for k, v in vars(part).items() if isinstance(v, (int, float, str, bool)) and not k.startswith("_")},
        )
        for part in metric.modules()
        if isinstance(part, Metric)
    ]


def _adopt(metric: Metric, states: Any, device: torch.device) -> None:
    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    for part, (values, count, plain) in zip(parts, states, strict=True):
        for key, value in values.items():
            setattr(part, key, _moved(value, device))
        for key, value in plain.items():
            vars(part)[key] = value
        part._update_count = count
        part._computed = None


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.detach().to(device) if isinstance(value, Tensor) else value
