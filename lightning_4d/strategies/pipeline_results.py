"""What becomes of the microbatches of one step on the last stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.pipeline.batch import Path, batched_entries
from lightning_4d.parallel.pipeline.combine import LeafValue
from lightning_4d.parallel.pipeline.passes import Trace
from lightning_4d.parallel.pipeline.reduction import BatchReduction, Mode, Plan
from lightning_4d.parallel.pipeline.tail_trace import TailTrace
from lightning_4d.strategies.fake_step import require_loss
from lightning_4d.strategies.pipeline_metrics import PutOff, StageMetrics
from lightning_4d.strategies.side_effects import Attributes, Effects, is_scalar, joined
from lightning_4d.strategies.step_log import StepLog, as_tensor, caches

News = tuple[dict[str, Any], Sequence[Tensor]]


class StepTrace(TailTrace):
    """A trace that takes scalars which blocks leave for the loss (a balance loss) at the user's word.

    Args:
        mode: the user's ``loss_reduction``.
    """

    def __init__(self, mode: Literal["auto", "mean", "sum"]) -> None:
        super().__init__()
        self._mode: Mode = mode

    def rows(self, *tensors: Any) -> None:
        """Say which tensors hold values of samples; a scalar is their mean, or their sum."""
        take_scalars(self, self._mode, tensors)


def take_scalars(trace: TailTrace, mode: Literal["auto", "mean", "sum"], tensors: Sequence[Any]) -> None:
    """Name tensors to a trace: values of samples, and scalars made of samples inside a block."""
    TailTrace.rows(trace, *(tensor for tensor in tensors if tensor.dim() > 0))
    for tensor in tensors:
        if tensor.dim() == 0 and tensor.is_floating_point():
            trace.leaf(LeafValue("sum" if mode == "sum" else "rows", tensor, "a scalar made inside a block"))


class TrainingResults:
    """Losses and logged values of the microbatches of one training step.

    Args:
        module: the user's.
        pieces: the microbatches.
        sizes: how many samples each has.
        reduction: the user's ``loss_reduction``.
        scale: multiplies the loss before its backward, where a gradient scaler does.
        plan: what is known of the module's losses, kept from step to step.
        metrics: the module's.
        prove: finds out more; see :class:`BatchReduction`.
        whole: paths of entries of a batch without a batch dimension.
        checks: compare what was taken for equal in all microbatches; on the CPU it always is.
    """

    def __init__(
        self,
        module: LightningModule,
        pieces: Sequence[Any],
        sizes: Sequence[int],
        reduction: Literal["auto", "mean", "sum"],
        scale: Tensor | None,
        plan: Plan,
        metrics: StageMetrics,
        prove: Any = None,
        *,
        whole: frozenset[Path] = frozenset(),
        checks: bool = True,
    ) -> None:
        self._module = module
        self._metrics = metrics
        self._running: TailTrace | None = None
        self._pieces, self._sizes, self._scale = pieces, sizes, scale
        self._is_whole = len(pieces) == 1
        self._mode: Mode = reduction
        self._checks = checks
        entries = [list(batched_entries(p, size, whole).values()) for p, size in zip(pieces, sizes, strict=True)]
        self._entries = entries
        self._reduction = BatchReduction(sizes, plan, reduction, prove, None if self._is_whole else entries)
        self._log = StepLog()
        self._logs: list[StepLog] = []
        self._attributes = Attributes(module)
        self._effects: list[Effects] = []
        self.effects = Effects()  # of the whole batch, on the last stage
        self._traces: dict[int, TailTrace] = {}
        self._order: list[int] = []  # microbatches as they were finished
        self._put_off: list[list[PutOff]] = []
        self._loss: Tensor | None = None
        self._is_dict = False

    @contextmanager
    def keeping_log(self) -> Iterator[None]:
        """Keep what the step logs."""
        before = vars(self._module).get("log")
        vars(self._module)["log"] = lambda *args, **kwargs: self._log.keep(self._module, *args, **kwargs)
        metrics = nullcontext() if self._is_whole else self._metrics.microbatches(lambda: self._running)
        try:
            with self._metrics.step(), metrics:
                yield
            self._attributes.restore()
        finally:
            vars(self._module).pop("log")
            if before is not None:
                vars(self._module)["log"] = before

    def trace(self, microbatch: int, *, is_last: bool) -> Trace | None:
        """Begin a microbatch on a stage; only what the last one logs counts."""
        self._attributes.restore()
        self._metrics.take_put_off()
        self._log = StepLog()
        if self._is_whole or not is_last:
            return None
        trace = self._running = self._traces[microbatch] = StepTrace(self._mode)
        trace.entries(*self._entries[microbatch])
        return trace

    def finished(self, microbatch: int, result: Any) -> Tensor | None:
        """Take what the step returned; return what the backward starts from."""
        loss = self._loss_of(result)
        self._effects.append(self._attributes.effects().with_returned(result))
        if self._is_whole:
            root = loss * 1  # a tensor of our own, which may be detached in place
            self._loss = loss.detach()
        else:
            self._running = None
            logged = self._values_to_reduce()
            root = self._reduction.finish(microbatch, self._traces.pop(microbatch), loss, logged)
        self._effects[-1].detach()  # a trace knew the tensors themselves
        self._logs.append(self._log)
        self._order.append(microbatch)
        return root if root is None or self._scale is None else root * self._scale

    def _values_to_reduce(self) -> dict[str, Tensor | float]:
        """The logged values, without metrics and what metrics returned: those know the batch's value themselves."""
        values = {}
        for name, value in self._log.values.items():
            metric = self._metrics.metric_of(self._log.given.get(name))
            if metric is not None:
                self._log.from_metric[name] = metric
            elif value is not None:
                values[name] = value
        self._put_off.append(self._metrics.take_put_off())
        for number, call in enumerate(self._put_off[-1]):
            values |= call.reduced(number)
        return values | {name: item for name, item in self._effects[-1].leaves().items() if is_scalar(item)}

    def _effects_of_batch(self, scalars: Mapping[str, Any]) -> Effects:
        """What one run on the whole batch would leave in attributes."""
        first = self._effects[0]
        every = [effects.leaves() for effects in self._effects]
        if any(leaves.keys() != every[0].keys() for leaves in every):
            raise UnsupportedError(
                explain(
                    "training_step leaves different things in attributes of the module for different microbatches",
                    "they cannot be joined to the batch's",
                    "use num_microbatches=1",
                )
            )
        sizes = [self._sizes[i] for i in self._order]
        joined_leaves = {
            name: scalars[name] if name in scalars else joined(name, [leaves[name] for leaves in every], sizes)
            for name in every[0]
        }
        return first.with_leaves(joined_leaves)

    def _loss_of(self, result: Any) -> Tensor:
        self._is_dict = isinstance(result, dict)
        return require_loss(result)  # the object itself: what made it is known by it

    def news(self) -> News:
        """Return what all ranks need to know: loss, correction of gradients, logged values."""
        first = self._logs[0]
        if self._is_whole:
            assert self._loss is not None
            loss, correction, values = self._loss, None, first.values
            self.effects = self._effects[0]
        else:
            loss, correction = self._reduction.loss(), self._reduction.correction()
            reduced = self._reduction.logged()
            self.effects = self._effects_of_batch(reduced)
            values = {**first.values, **{name: value for name, value in reduced.items() if name in first.values}}
            self._metrics.make_up(self._put_off, reduced, [self._sizes[i] for i in self._order])
            values |= {name: self._metrics.finish(metric) for name, metric in first.from_metric.items()}
            for given in first.options.values():
                if given.get("metric_attribute"):
                    self._metrics.finish(given["metric_attribute"])
            if loss.device.type == "cpu" or self._checks:  # elsewhere it waits for the device
                self._reduction.check()
        device = loss.device
        numbers = [loss, as_tensor(1.0 if correction is None else correction, device)]
        logged = [name for name, value in values.items() if value is not None]
        numbers += [as_tensor(values[name], device) for name in logged]  # pyright: ignore[reportArgumentType]
        kept = caches(self._module, first.options)
        numbers += [as_tensor(value, device) for value in kept.values()]
        return {
            "logged": logged,
            "caches": list(kept),
            "numbers": [name for name in logged if not isinstance(first.values[name], Tensor)],
            "options": first.options,
            "is_dict": self._is_dict,
            "has_effects": bool(self.effects),
            "dtype": loss.dtype,
        }, numbers


class EvaluationResults:
    """The result and logged values of one evaluation step, which runs on the whole batch at once.

    Args:
        module: the user's.
        metrics: the module's.
    """

    def __init__(self, module: LightningModule, metrics: StageMetrics) -> None:
        self._module = module
        self._metrics = metrics
        self._log = StepLog()
        self._attributes = Attributes(module)
        self.effects = Effects()
        self.result: Any = None

    @contextmanager
    def keeping_log(self) -> Iterator[None]:
        """Keep what the step logs."""
        with self._metrics.step(), self._log.keeping(self._module):
            yield
        self._attributes.restore()

    def trace(self, microbatch: int, *, is_last: bool) -> Trace | None:
        """Begin the batch on a stage; only what the last one logs counts."""
        self._attributes.restore()
        self._log.options.clear()
        self._log.values.clear()
        return None

    def finished(self, microbatch: int, result: Any) -> Tensor | None:
        """Take what the step returned."""
        self.result = result
        self.effects = self._attributes.effects()
        return None

    def news(self) -> News:
        """Return what all ranks need to know."""
        values = self._log.values
        logged = [name for name, value in values.items() if value is not None]
        device = next((v.device for v in values.values() if isinstance(v, Tensor)), torch.device("cpu"))
        kept = caches(self._module, self._log.options)
        numbers = [as_tensor(values[name], device) for name in logged]  # pyright: ignore[reportArgumentType]
        return {
            "logged": logged,
            "caches": list(kept),
            "numbers": [name for name in logged if not isinstance(values[name], Tensor)],
            "options": self._log.options,
            "has_result": self.result is not None,
            "has_effects": bool(self.effects),
        }, [*numbers, *(as_tensor(value, device) for value in kept.values())]
