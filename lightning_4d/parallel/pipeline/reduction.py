"""How the losses and logged values of microbatches make those of their batch.

The engine traces the user's step on every microbatch (`tail_trace`), and asks `BatchReduction`

* for the *root* of each microbatch, from which its backward starts before later microbatches ran: the sum of the
  gradients of all roots, times `correction()`, is the gradient of the batch's loss (`seeds` says how);
* for the batch's loss and logged values after the last microbatch.

Nothing is read from the device here, except on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_4d.parallel.pipeline.combine import LeafValue, combine, wide
from lightning_4d.parallel.pipeline.finished import (
    LOSS,
    Finished,
    Mode,
    Plan,
    Rules,
    batch_environment,
    combined_number,
    differs,
    leaves_of,
    refuse,
    refuse_mixed,
)
from lightning_4d.parallel.pipeline.scalars import Environment
from lightning_4d.parallel.pipeline.seeds import Seeds
from lightning_4d.parallel.pipeline.tail_trace import TailTrace

__all__ = ["BatchReduction", "Plan"]


class BatchReduction:
    """The reduction of one batch. The engine makes one per training, validation or test step.

    Args:
        sizes: The number of samples of each microbatch.
        plan: What the probe has proven; kept by the engine from step to step.
        mode: `loss_reduction`: "mean" and "sum" say how losses combine, in place of what the trace finds.
        entries: For each microbatch the tensors of its own that have rows, in the order in which `TailTrace.entries`
            is told of
            them: totals that depend on the batch alone (the number of valid targets) are then known before the first
                backward.
        prove: Called when the plan does not know the step's program yet: runs the probe and adds to the plan.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        plan: Plan,
        mode: Mode = "auto",
        prove: Callable[[], None] | None = None,
        entries: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        self.sizes = list(sizes)
        self.plan = plan
        self.mode: Mode = mode
        self._prove = prove
        self._entries = entries
        self._parts: dict[int, Finished] = {}
        self._first: Finished | None = None
        self._rules = Rules()
        self._seeds: Seeds | None = None
        self._batch: Environment | None = None

    # During the step ------------------------------------------------------------------------------------------------

    def finish(
        self, index: int, trace: TailTrace, loss: Tensor | None, logged: Mapping[str, Tensor | float]
    ) -> Tensor | None:
        """After microbatch `index`'s forward: what its backward starts from.

        Args:
            index: The microbatch; the first call may be for any of them.
            trace: The trace that was on during the user's step.
            loss: The 0-d tensor that the step returned; None in evaluation.
            logged: The value of each key that the step logged.

        Returns:
            A 0-d tensor with the graph; None without a loss.

        Raises:
            UnsupportedError: The loss or a key has no rule; the microbatches took different paths through the user's
                code.
        """
        part = Finished.of(trace, loss, logged)
        first = self._start(part)
        if part.signature != first.signature:
            raise refuse(
                "the operations on losses and logged values",
                "they differ between two microbatches of one batch, so no rule makes the batch's values of them",
                "make training_step run the same operations for all data, or use num_microbatches=1",
            )
        root = None if loss is None else self._root(index, part, loss)
        part.detach()
        self._parts[index] = part
        self._batch = None
        return root

    def _start(self, part: Finished) -> Finished:
        if self._first is None:
            rules = self.plan.of(part)
            if rules is None and self._prove is not None:
                self._prove()
                rules = self.plan.of(part)
            if rules is None:
                raise refuse(LOSS, "its operations were not proven to combine over microbatches")
            self._first, self._rules = part, rules
            _refuse_leaves_without_rule(part, rules, self.mode)
        return self._first

    def _root(self, index: int, part: Finished, loss: Tensor) -> Tensor:
        if self.mode == "sum":
            return loss
        weight = self.sizes[index] / sum(self.sizes)
        if self.mode == "mean":
            return loss * weight
        if self._seeds is None:
            self._seeds = Seeds(part, self._rules, self.sizes, index, self._entries)
        return self._seeds.root(index, part, loss)

    # After the step -------------------------------------------------------------------------------------------------

    def loss(self) -> Tensor:
        """The batch's loss, detached; all microbatches must be finished."""
        first = self._whole()
        if self.mode != "auto":
            return self._loss_by_mode()
        if first.loss is None:
            raise RuntimeError("the step returned no loss")
        return _cast(self._values().evaluate(first.loss), first.dtypes[LOSS])

    def _loss_by_mode(self) -> Tensor:
        shaped = [LeafValue("sum", part.loss_value, LOSS) for part in self._ordered() if part.loss_value is not None]
        total = combine(shaped, self.sizes, "rows" if self.mode == "mean" else "sum")
        return _cast(total, self._whole().dtypes[LOSS])

    def logged(self) -> dict[str, Tensor | float]:
        """The batch's value of every logged key: a detached tensor, or a number where numbers were logged."""
        first = self._whole()
        result: dict[str, Tensor | float] = {}
        for key, value in first.keys.items():
            if isinstance(value, (int, float)):
                numbers = [float(part.keys[key]) for part in self._ordered()]  # pyright: ignore[reportArgumentType]
                whole = combined_number(f"the logged value '{key}'", self._rules.keys[key], numbers, self.sizes)
                result[key] = type(value)(whole)
            else:
                result[key] = _cast(self._values().evaluate(value), first.dtypes.get(key))
        return result

    def correction(self) -> Tensor | float | None:
        """The factor for all gradients of the batch, None when it is known to be exactly 1.

        A 0-d tensor on the device where it depends on the data, nothing is read from it.
        """
        if self._seeds is None:
            return None
        return self._seeds.correction(self._ordered(), self._values())

    def disagreement(self) -> Tensor | bool:
        """Whether a value taken for a constant, or the outcome of an `if`, was not the same for microbatches and batch.

        A bool or a 0-d bool tensor. On the CPU read it at every step, elsewhere now and then: true means wrong
        numbers, see `check`.
        """
        parts, flag = self._ordered(), False
        first = parts[0]
        for constants in zip(*(part.constants for part in parts), strict=True):
            for other in constants[1:]:
                if other is not constants[0] and other.data_ptr() != constants[0].data_ptr():
                    flag = flag | differs(constants[0], other)
        for place, total in (self._seeds.totals if self._seeds is not None else {}).items():
            flag = flag | differs(wide(total), wide(torch.as_tensor(self._values().leaves[place])))
        for place, rule in self._rules.opaque.items():
            for part in parts[1:] if rule == "equal" else ():
                flag = flag | differs(first.leaves[place].value, part.leaves[place].value)
        for place, (node, outcome) in enumerate(first.conditions):
            if any(part.conditions[place][1] != outcome for part in parts):
                return True
            flag = flag | (torch.as_tensor(self._values().evaluate(node)).reshape(()).bool() != outcome)
        return flag

    def check(self) -> None:
        """Raise if `disagreement()`; reads the device.

        Raises:
            UnsupportedError: The step used a value of its microbatch where a constant, or the batch's value, was
                needed.
        """
        if bool(self.disagreement()):
            raise refuse(
                LOSS + " or a logged value",
                "it uses a tensor, or an `if` on one, that is not the same for all microbatches and cannot be followed",
            )

    def _whole(self) -> Finished:
        if self._first is None or len(self._parts) != len(self.sizes):
            raise RuntimeError(f"{len(self._parts)} of {len(self.sizes)} microbatches are finished")
        return self._first

    def _ordered(self) -> list[Finished]:
        self._whole()
        return [self._parts[index] for index in range(len(self.sizes))]

    def _values(self) -> Environment:
        """The leaves, constants and numbers of the batch."""
        if self._batch is None:
            self._batch = batch_environment(self._ordered(), self.sizes, self._rules)
        return self._batch


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    value = torch.as_tensor(value).detach()
    return value if dtype is None or not value.is_floating_point() else value.to(dtype)


def _refuse_leaves_without_rule(part: Finished, rules: Rules, mode: Mode) -> None:
    roots = {LOSS: part.loss} if mode == "auto" else {}
    roots |= {f"the logged value '{key}'": node for key, node in part.keys.items()}
    for what, node in roots.items():
        for leaf in leaves_of(node):
            value = part.leaves[leaf.index]
            if value.kind == "mixed":
                raise refuse_mixed(what, value.name)
            if value.kind == "opaque" and leaf.index not in rules.opaque:
                raise refuse(what, f"the operation '{value.name}' has no known rule over samples")
