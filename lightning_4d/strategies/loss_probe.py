"""Prove, before a loss is first computed from microbatches, that it and what is logged can be: see :mod:`.probe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.pipeline.batch import batched_entries, cut, rows_of
from lightning_4d.parallel.pipeline.flow import Output
from lightning_4d.parallel.pipeline.probe import Outcome, check_decomposes
from lightning_4d.parallel.pipeline.randomness import seed_of
from lightning_4d.parallel.pipeline.record import StepRecord
from lightning_4d.parallel.pipeline.tail_trace import TailTrace
from lightning_4d.strategies.pipeline_results import take_scalars
from lightning_4d.strategies.side_effects import Attributes, is_scalar
from lightning_4d.strategies.step_log import StepLog

if TYPE_CHECKING:
    from lightning_4d.strategies.pipeline_steps import PipelineSteps

_FEWEST = 3  # rows that show how things combine


class LossProbe:
    """Runs the code after the blocks on random hidden states, on some rows of a batch and on parts of them.

    Args:
        steps: of the strategy.
        batch: a batch of training.
        arguments: what Lightning hands on besides it.
        rows: how many rows a microbatch has, so how many the last stage has memory for.
    """

    def __init__(self, steps: PipelineSteps, batch: Any, arguments: tuple[Any, ...], rows: int) -> None:
        self._steps = steps
        self._arguments = arguments
        self._batch = batch
        self._most = rows

    def together(self) -> None:
        """Run it on the last stage, and raise on all ranks where it refuses. Which ranks must call: all pipeline ranks.

        Raises:
            UnsupportedError: names the loss or the logged value that cannot be computed from microbatches.
        """
        pipeline = self._steps.pipeline
        refused: UnsupportedError | None = None
        if pipeline.is_last:
            try:
                self()
            except UnsupportedError as error:
                refused = error
        box = [str(refused) if refused is not None else None]
        dist.broadcast_object_list(box, group=pipeline.group, group_src=pipeline.last_rank, device=pipeline.device)
        if refused is not None:
            raise refused
        if box[0] is not None:
            raise UnsupportedError(box[0])

    def __call__(self) -> None:
        """Run it on this rank, that of the last stage."""
        rows = rows_of(self._batch, self._steps.whole)
        assert rows is not None
        self._rows = min(rows, max(_FEWEST, self._most))
        self._some = cut(self._batch, rows, 0, self._rows, self._steps.whole)
        steps, module = self._steps, self._steps.module
        self._whole = steps.record("training_step", self._some, self._arguments)
        attributes, buffers = Attributes(module), {b: b.clone() for b in module.buffers()}
        before = vars(module).get("log")
        try:
            check_decomposes(self._run, self._rows, steps.losses, steps.loss_reduction)
        finally:
            attributes.restore()
            _restore_log(module, before)
            for buffer, value in buffers.items():
                buffer.copy_(value)

    def _run(self, trace: TailTrace, draw: int, start: int, stop: int) -> Outcome:
        steps, module = self._steps, self._steps.module
        piece = cut(self._some, self._rows, start, stop, self._steps.whole)
        record = steps.record("training_step", piece, self._arguments)
        mode = steps.loss_reduction
        trace.rows = lambda *tensors: take_scalars(trace, mode, tensors)  # type: ignore[method-assign]
        trace.entries(*batched_entries(piece, stop - start, self._steps.whole).values())
        hidden = self._hidden(record, draw, start, stop)
        log, attributes = StepLog(), Attributes(module)
        vars(module)["log"] = lambda *args, **kwargs: log.keep(module, *args, **kwargs)

        with steps.metrics.step(), steps.metrics.microbatches(lambda: trace, trial=True):
            step = steps.in_parts(module.training_step)
            result = steps.pipeline.run_tail(
                lambda one: step(one, *self._arguments), piece, record, hidden, trace, ("probe", draw)
            )
            logged = {
                n: v for n, v in log.values.items() if v is not None and steps.metrics.metric_of(log.given[n]) is None
            }
        for number, call in enumerate(steps.metrics.take_put_off()):
            logged |= call.reduced(number)
        logged |= {
            name: item for name, item in attributes.effects().with_returned(result).leaves().items() if is_scalar(item)
        }
        attributes.restore()
        loss = result.get("loss") if isinstance(result, dict) else result
        return Outcome(loss, logged)

    def _hidden(self, record: StepRecord, draw: int, start: int, stop: int) -> dict[Output, Tensor]:
        """Random values of what each block returns, this piece's rows of those of the whole."""
        found = {}
        for number, (part, whole) in enumerate(zip(record.blocks, self._whole.blocks, strict=True)):
            slots = whole.slots()
            for slot, kind in part.slots().items():
                tensor = _random(slots[slot].spec, seed_of("hidden", draw, number, slot), self._steps.pipeline.device)
                for dim, (size, full) in enumerate(zip(kind.spec.shape, slots[slot].spec.shape, strict=True)):
                    if size != full:
                        tensor = tensor.narrow(dim, start * full // self._rows, size)
                found[Output(number, slot)] = tensor.requires_grad_(kind.spec.requires_grad)
        return found


def _random(spec: Any, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        # Half the size of a normalised state, so that losses stay in a range where their rules can be told apart.
        return (0.5 * torch.randn(spec.shape, generator=generator, dtype=torch.float32)).to(device, spec.dtype)
    return torch.randint(0, 2, spec.shape, generator=generator).to(device, spec.dtype)


def _restore_log(module: Any, before: Any) -> None:
    if before is None:
        vars(module).pop("log", None)
    else:
        vars(module)["log"] = before
