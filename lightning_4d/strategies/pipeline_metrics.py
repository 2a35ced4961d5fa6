"""torchmetrics in a pipeline: updated on the last stage, computed everywhere.

The last stage holds the states. Before a metric is computed, which all ranks do together, the other stages take them
over. In a training step of several microbatches, what a metric's call returns is the value over the whole batch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_4d._torch_private import pytree
from lightning_4d.parallel.pipeline.combine import LeafValue
from lightning_4d.parallel.pipeline.tail_trace import TailTrace
from lightning_4d.strategies.side_effects import joined


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


def normalise_over(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let synchronised batch normalisation see the ranks that read different data; by default it sees all of them."""
    for child in module.modules():
        if isinstance(child, nn.SyncBatchNorm):
            child.process_group = group


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
        self.surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext  # of values: those of steps
        self._whole: dict[str, Metric] = {}  # of one batch
        self._put_off: list[PutOff] = []  # of one microbatch
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
    def microbatches(self, trace: Callable[[], TailTrace | None], *, trial: bool = False) -> Iterator[None]:
        """Inside, calls of metrics add to the value over the whole batch; see :meth:`finish`.

        A call with a value reduced over samples, such as a loss, is put off: it is made once, with the batch's value.

        Args:
            trace: what follows the step now; it is not to follow the metrics' own work.
            trial: leave the metrics themselves as they are.
        """
        self._called.clear()
        self._put_off = []
        for name, metric in self._metrics.items():
            update = _skipped(metric.update) if trial else _outside(metric.update, trace)
            vars(metric)["forward"] = self._forward(name, metric, update, trace)
            vars(metric)["update"] = self._updated(name, update, trace)
        try:
            yield
        finally:
            for metric in self._metrics.values():
                vars(metric).pop("forward")
                vars(metric)["update"] = vars(metric)["update"].__wrapped__

    def _updated(self, name: str, update: Callable[..., Any], trace: Callable[[], TailTrace | None]) -> Any:
        def updated(*args: Any, **kwargs: Any) -> None:
            if not self._puts_off(name, trace(), args, kwargs, is_call=False):
                update(*args, **kwargs)

        updated.__wrapped__ = update.__wrapped__  # type: ignore[attr-defined]
        return updated

    def _puts_off(self, name: str, trace: TailTrace | None, args: Any, kwargs: Any, *, is_call: bool) -> bool:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if trace is None or not any(trace.node(leaf) is not None for leaf in leaves):
            return False
        copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # followed by a trace
        self._put_off.append(PutOff(name, is_call, copies, structure))
        return True

    def take_put_off(self) -> list[PutOff]:
        """Return the calls of this microbatch that were put off, and forget them."""
        taken, self._put_off = self._put_off, []
        return taken

    def make_up(self, parts: Sequence[Sequence[PutOff]], values: Mapping[str, Any], sizes: Sequence[int]) -> None:
        """Make the calls that were put off, with the batch's values.

        Args:
            parts: by microbatch, what :meth:`take_put_off` returned.
            values: of the keys of :meth:`PutOff.reduced`.
            sizes: how many samples each microbatch has.
        """
        for number, calls in enumerate(zip(*parts, strict=True)):
            first = calls[0]
            metric = self._metrics[first.metric]
            own = first.reduced(number)
            leaves = [
                values[key] if (key := first.key(number, place)) in own else joined(key, items, sizes)
                for place, items in enumerate(zip(*(call.leaves for call in calls), strict=True))
            ]
            args, kwargs = pytree.tree_unflatten(leaves, first.structure)
            with self.surroundings(), torch.no_grad():
                metric.update(*args, **kwargs)
                if first.is_call:
                    self._whole[first.metric].update(*args, **kwargs)

    def _forward(
        self, name: str, metric: Metric, update: Callable[..., Any], trace: Callable[[], TailTrace | None]
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._puts_off(name, trace(), args, kwargs, is_call=True):
                if name not in self._called:
                    self._begin(name, metric)
                value = _unknown(trace(), name)
                self._called[name].append(value)
                return value
            with _unfollowed(trace), torch.no_grad():
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
        with self.surroundings():
            value = _without_sync(self._whole[name])
        self._metrics[name]._forward_cache = value
        return value


@dataclass
class PutOff:
    """A call of a metric with values reduced over a microbatch.

    Attributes:
        metric: its name.
        is_call: whether its value was asked for.
        leaves: of the arguments.
        structure: of the arguments.
    """

    metric: str
    is_call: bool
    leaves: list[Any]
    structure: pytree.TreeSpec

    def key(self, number: int, place: int) -> str:
        """Name leaf number ``place`` of call number ``number``."""
        return f"argument {place + 1} of the metric {self.metric!r} (call {number + 1})"

    def reduced(self, number: int) -> dict[str, Tensor | float]:
        """Return what the batch's value follows from as that of a logged value does: 0-d tensors and numbers."""
        return {
            self.key(number, place): leaf
            for place, leaf in enumerate(self.leaves)
            if (isinstance(leaf, Tensor) and leaf.dim() == 0)
            or (isinstance(leaf, (int, float)) and not isinstance(leaf, bool))
        }


def _unknown(trace: TailTrace | None, name: str) -> Tensor:
    """Stand for a value that is known after the last microbatch; it may be logged, and nothing can be made of it."""
    value = torch.tensor(random.SystemRandom().random())  # no rule makes the batch's from it
    if trace is not None:
        trace.leaf(LeafValue("opaque", value, f"what the metric {name!r} returned"))
    return value


@contextmanager
def _unfollowed(trace: Callable[[], TailTrace | None]) -> Iterator[None]:
    """Inside, no trace follows what happens."""
    open_one = trace()
    if open_one is None or not open_one.open:
        yield
        return
    open_one.__exit__(None, None, None)
    try:
        yield
    finally:
        open_one.__enter__()


def _outside(update: Callable[..., Any], trace: Callable[[], TailTrace | None]) -> Callable[..., Any]:
    def updated(*args: Any, **kwargs: Any) -> Any:
        with _unfollowed(trace):
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
