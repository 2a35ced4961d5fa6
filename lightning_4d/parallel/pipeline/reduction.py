"""How the losses and logged values of microbatches make those of their batch.

The engine traces the user's step on every microbatch (`tail_trace`), and asks `BatchReduction`

* for the *root* of each microbatch, from which its backward starts before later microbatches ran: the sum of the
gradients of all
  roots, times `correction()`, is the gradient of the batch's loss;
* for the batch's loss and logged values after the last microbatch.

With P the user's program from leaves to loss, the batch's gradient is the sum over leaves of dP/dleaf at the batch's
leaves times the leaf's gradient, which is a weighted sum over microbatches. Where dP/dleaf is known early the roots
are exact. Else it is estimated from the first microbatch, and the ratio of the true and the estimated derivative,
which must be the same for all leaves, is the correction. Nothing is read from the device here, except on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.pipeline.combine import LeafValue, combine, combine_numbers, wide
from lightning_4d.parallel.pipeline.scalars import Constant, Environment, Form, Leaf, Node, Number, Renumbering, forms
from lightning_4d.parallel.pipeline.tail_trace import TailTrace

__all__ = [
    "LOSS",
    "BatchReduction",
    "Finished",
    "Plan",
    "Rules",
    "Seeds",
    "batch_environment",
    "differs",
    "leaves_of",
    "refuse",
    "refuse_mixed",
]

LOSS = "the loss"
REMEDY = (
    "use num_microbatches=1; or, if the loss is known to be a mean (or a sum) over samples, loss_reduction='mean' (or "
    "'sum')"
)
LOG_REMEDY = "log a mean, sum, maximum or minimum over the samples, or use num_microbatches=1"

_L = TypeVar("_L", Leaf, Number, Constant)
Mode = Literal["auto", "mean", "sum"]


def refuse(what: str, rule: str, remedy: str | None = None) -> UnsupportedError:
    """The refusal of a loss or of a logged key by name."""
    return UnsupportedError(explain(what, rule, remedy or (REMEDY if what.startswith(LOSS) else LOG_REMEDY)))


def refuse_mixed(what: str, operation: str) -> UnsupportedError:
    """The refusal of a value of samples that uses a value of the batch."""
    return refuse(
        what,
        f"the operation '{operation}' reduces values of samples that were computed with a value of the whole batch",
        "reduce first and compute with reduced values, e.g. (x * mask).sum() / mask.sum(); or use num_microbatches=1",
    )


@dataclass(frozen=True, slots=True)
class Rules:
    """What the probe found for a program: the rules of numbers, of opaque leaves and of keys logged as numbers."""

    numbers: tuple[str, ...] = ()
    opaque: Mapping[int, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """The programs that the probe has proven, for the life of a strategy.

    `unproven`: accept all others too, taking their numbers for constants. For tests.
    """

    rules: dict[int, Rules] = field(default_factory=dict)
    unproven: bool = False

    def of(self, finished: Finished) -> Rules | None:
        """The rules of a program; None when it was not proven yet."""
        known = self.rules.get(finished.signature)
        if known is None and self.unproven:
            return Rules(("equal",) * len(finished.numbers), {}, dict.fromkeys(finished.numeric_keys, "equal"))
        return known


@dataclass(slots=True)
class Finished:
    """What is kept of one microbatch after its forward."""

    leaves: list[LeafValue]
    constants: list[Tensor]
    numbers: list[float]
    conditions: list[tuple[Node, bool]]
    loss: Node | None
    loss_value: Tensor | None
    needs_gradient: bool
    replayable: bool
    has_targets: bool
    keys: dict[str, Node | float]
    dtypes: dict[str, torch.dtype]
    signature: int

    @property
    def numeric_keys(self) -> list[str]:
        """Keys that were logged as plain Python numbers."""
        return [key for key, value in self.keys.items() if isinstance(value, (int, float))]

    @classmethod
    def of(cls, trace: TailTrace, loss: Tensor | None, logged: Mapping[str, Tensor | float]) -> Finished:
        """Close a trace: the programs of the loss and of the logged values, with the leaves and constants they use."""
        renumber = Renumbering()
        dtypes = {key: value.dtype for key, value in logged.items() if isinstance(value, Tensor)}
        root = None
        if loss is not None:
            dtypes[LOSS] = loss.dtype
            root = renumber(_program(trace, LOSS, loss))
        keys: dict[str, Node | float] = {}
        for key, value in logged.items():
            if isinstance(value, (int, float)) and trace.node(value) is None:
                keys[key] = value
            else:
                keys[key] = renumber(_program(trace, f"the logged value '{key}'", value))
        conditions = [
            (renumber(node), outcome) for node, outcome in trace.conditions if not _is_any_or_all(trace, node)
        ]
        for leaf in trace.leaves:
            leaf.differentiable = leaf.value.requires_grad
        finished = cls(
            leaves=[trace.leaves[i] for i in renumber.leaves],
            constants=[trace.constants[i] for i in renumber.constants],
            numbers=[trace.numbers[i] for i in renumber.numbers],
            conditions=conditions,
            loss=root,
            loss_value=None if loss is None else loss.detach(),
            needs_gradient=loss is not None and loss.requires_grad,
            replayable=trace.replayable,
            has_targets=trace.has_targets,
            keys=keys,
            dtypes=dtypes,
            signature=0,
        )
        finished.signature = finished._signature()
        trace.close()
        return finished

    def _signature(self) -> int:
        keys = ((key, "number" if isinstance(v, (int, float)) else v.signature) for key, v in self.keys.items())
        return hash(
            (
                tuple((leaf.kind, leaf.name, leaf.order) for leaf in self.leaves),
                None if self.loss is None else self.loss.signature,
                tuple(keys),
                tuple(node.signature for node, _ in self.conditions),
            )
        )

    def detach(self) -> None:
        """Let go of the graph, once the root is made."""
        for leaf in self.leaves:
            leaf.detach()
        self.constants = [constant.detach() for constant in self.constants]


def _is_any_or_all(trace: TailTrace, node: Node) -> bool:
    """`if mask.any()`: alike for all microbatches, it is so for the batch; else it shows in the programs."""
    return isinstance(node, Leaf) and trace.leaves[node.index].value.dtype == torch.bool


def _program(trace: TailTrace, what: str, value: Tensor | float) -> Node:
    node = trace.node(value)
    if node is not None:
        return node
    if not isinstance(value, Tensor):
        raise refuse(what, f"it is a {type(value).__name__}, neither a tensor nor a number")
    if trace.tag(value) is not None:
        raise refuse(
            what, f"it has the shape {list(value.shape)}; only a value reduced over all samples can be combined"
        )
    if isinstance(value, Parameter):
        return trace.describe(value)
    trace.leaf(LeafValue("opaque", value, "an operation that cannot be followed"))
    return Leaf(len(trace.leaves) - 1, value.ndim)


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
                whole = _combined_number(f"the logged value '{key}'", self._rules.keys[key], numbers, self.sizes)
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


def batch_environment(parts: Sequence[Finished], sizes: Sequence[int], rules: Rules) -> Environment:
    """The batch's leaves, constants and numbers, from those of its microbatches.

    Raises:
        UnsupportedError: A number that was the same whatever the rows is not the same in all microbatches.
    """
    leaves = [
        combine(values, sizes, rules.opaque.get(place)) if _combines(values[0], place, rules) else None
        for place, values in enumerate(zip(*(part.leaves for part in parts), strict=True))
    ]
    columns = zip(*(part.numbers for part in parts), strict=True)
    numbers = [
        _combined_number(LOSS + " or a logged value", rule, column, sizes)
        for rule, column in zip(rules.numbers, columns)
    ]
    return Environment(leaves, parts[0].constants, numbers)


def _combined_number(what: str, rule: str, values: Sequence[float], sizes: Sequence[int]) -> float:
    if rule == "none":
        return values[0]  # used by nothing, or the probe had refused it
    if rule == "equal" and any(value != values[0] and value == value for value in values):
        shown = ", ".join(f"{value:g}" for value in values)
        raise refuse(
            what,
            f"it uses a Python number that was taken for a constant and is {shown} in the microbatches of one batch",
        )
    return combine_numbers(rule, values, sizes)


def _combines(leaf: LeafValue, place: int, rules: Rules) -> bool:
    return leaf.kind not in ("opaque", "mixed") or place in rules.opaque


def differs(a: Tensor, b: Tensor) -> Tensor | bool:
    """Whether two constants differ by more than rounding: a bool or a 0-d bool tensor, not read from the device."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    return torch.isclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True).all().logical_not() if a.numel() else False


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


def leaves_of(node: Node | float | None, kind: type[_L] = Leaf) -> set[_L]:
    """The leaves (or numbers, or constants) that a program uses."""
    found: set[_L] = set()

    def of_leaf(node: Node) -> Form:
        if isinstance(node, kind):
            found.add(node)
        return Form({}, False)

    if node is not None and not isinstance(node, (int, float)):
        forms(node, of_leaf)
    return found


class Seeds:
    """The roots of one batch, from the program of its first finished microbatch."""

    _SUMS = frozenset(["sum", "mean", "rows"])

    def __init__(
        self,
        first: Finished,
        rules: Rules,
        sizes: Sequence[int],
        index: int,
        entries: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        if first.loss is None:
            raise RuntimeError("the step returned no loss")
        self.program = first.loss
        self.sizes, self.rows = sizes, sum(sizes)
        self.scale = self.rows / sizes[index]  # from the first finished microbatch to the batch
        self.rules = rules
        self.kinds = [rules.opaque.get(i, leaf.kind) for i, leaf in enumerate(first.leaves)]
        self.used = sorted(leaf.index for leaf in leaves_of(first.loss) if first.leaves[leaf.index].differentiable)
        self.expected = {i: max(first.leaves[i].count, 1) * self.scale for i in self.used if self.kinds[i] == "mean"}
        self.numbers = [
            v * self.scale if rule == "sum" else v for rule, v in zip(rules.numbers, first.numbers, strict=True)
        ]
        self._first = first
        self.own = [i for i, constant in enumerate(first.constants) if constant.requires_grad]
        self._refuse_gradients_without_rule(first)
        self.totals: dict[int, Tensor] = {}
        self.early = self._form(first, constants_too=False).early
        if not self.early:
            self.totals = _early_totals(first, index, entries)
            self.early = self._form(first, constants_too=False).early
        self.corrigible = self._form(first, constants_too=True, numbers_late=True).uniform
        if not self.early and not self._form(first, constants_too=True).uniform:
            raise self._several_totals()
        self.mean_only = self.early and not self.totals and all(self.kinds[i] in ("mean", "rows") for i in self.used)
        self.slopes = None if self.early else self._estimated_slopes(first)

    # What the structure says ----------------------------------------------------------------------------------------

    def _form(self, first: Finished, constants_too: bool, numbers_late: bool = False) -> Form:
        def of_leaf(node: Node) -> Form:
            if isinstance(node, Leaf):
                known = node.index in self.totals or self.kinds[node.index] == "equal"
                return Form({node: ()} if node.index in self.used else {}, not known)
            if isinstance(node, Constant):
                return Form({node: ()} if constants_too and node.index in self.own else {}, False)
            late = isinstance(node, Number) and numbers_late and self.rules.numbers[node.index] != "equal"
            return Form({}, late)

        return forms(self.program, of_leaf)

    def _refuse_gradients_without_rule(self, first: Finished) -> None:
        if not self.used and not self.own and first.needs_gradient:
            raise refuse(LOSS, "its gradient comes from an operation that cannot be followed")
        for i in self.used:
            if self.kinds[i] not in self._SUMS:
                raise refuse(LOSS, f"the gradient of '{first.leaves[i].name}' does not add up over microbatches")

    @staticmethod
    def _several_totals() -> UnsupportedError:
        return refuse(
            LOSS,
            "its terms are divided by totals (such as the number of valid targets) that differ and are known after the "
            "last microbatch only",
        )

    # Roots ----------------------------------------------------------------------------------------------------------

    def root(self, index: int, part: Finished, loss: Tensor) -> Tensor:
        """What the backward of microbatch `index` starts from."""
        share = self.sizes[index] / self.rows
        if not loss.requires_grad:
            return loss
        if self.mean_only and all(part.leaves[i].count == self._in_proportion(i, index) for i in self.used):
            return loss * share
        scaled = [self._scaled(i, leaf, share) for i, leaf in enumerate(part.leaves)]
        if self.slopes is None:
            return Environment(scaled, part.constants, self.numbers).evaluate(self.program) * share
        variables = [*(scaled[i] for i in self.used), *(part.constants[i] for i in self.own)]
        return torch.stack([(v * s).sum() for v, s in zip(variables, self.slopes, strict=True)]).sum() * share

    def _in_proportion(self, i: int, index: int) -> int | float:
        if self.kinds[i] == "rows":
            return self._first.leaves[i].count
        return self.expected[i] * self.sizes[index] / self.rows

    def _scaled(self, i: int, leaf: LeafValue, share: float) -> Tensor:
        """The leaf as if its microbatch, a `share` of the batch, were the whole batch."""
        if i in self.totals:
            return self._guarded(leaf, self.totals[i])
        value = wide(leaf.value)
        if i not in self.used or self.kinds[i] == "rows":
            return value
        if self.kinds[i] == "sum":
            return value / share
        return value * (leaf.count / self.expected[i] / share) if leaf.count else torch.zeros_like(value)

    # Late derivatives -----------------------------------------------------------------------------------------------

    def _estimate(self, first: Finished) -> list[Tensor | None]:
        """The batch's leaves as the first microbatch suggests them; not zero or nan: it may divide by them."""
        estimates: list[Tensor | None] = []
        for kind, leaf in zip(self.kinds, first.leaves, strict=True):
            value = wide(leaf.value.detach())
            place = len(estimates)
            if place in self.totals:
                value = self._guarded(leaf, self.totals[place])
            elif value.is_floating_point() or value.dtype in (torch.int64, torch.int32):
                value = value * self.scale if kind == "sum" else value
                usable = value.isfinite() & (value != 0)
                value = torch.where(usable, value, torch.full_like(value, self.rows if kind == "sum" else 1))
            estimates.append(value)
        return estimates

    def _slopes(
        self, leaves: Sequence[Tensor | None], first: Finished, numbers: Sequence[float] | None = None
    ) -> list[Tensor]:
        """The derivatives of the program by the differentiable leaves and constants, at the given values."""
        with torch.enable_grad():
            given = [None if v is None else v.detach() for v in leaves]
            constants = [c.detach() for c in self._first.constants]
            inputs = [given[i].clone().requires_grad_() for i in self.used]  # pyright: ignore[reportOptionalMemberAccess]
            for i, variable in zip(self.used, inputs):
                given[i] = variable
            for place, constant in enumerate(first.constants):
                if place in self.own:
                    constants[place] = constant.detach().clone().requires_grad_()
                    inputs.append(constants[place])
            result = Environment(given, constants, self.numbers if numbers is None else numbers).evaluate(self.program)
            slopes = torch.autograd.grad(result, inputs, allow_unused=True)
        return [torch.zeros_like(v) if s is None else s for s, v in zip(slopes, inputs, strict=True)]

    def _estimated_slopes(self, first: Finished) -> list[Tensor]:
        """At the first microbatch's values. That of a single leaf may be anything but zero (a clamped loss) or nan."""
        slopes = self._slopes(self._estimate(first), first)
        if len(slopes) > 1:
            return slopes
        return [torch.where(slope.isfinite() & (slope != 0), slope, torch.ones_like(slope)) for slope in slopes]

    def correction(self, parts: Sequence[Finished], batch: Environment) -> Tensor | float | None:
        """The common ratio of true and used derivatives."""
        ratios = {self.expected[i] / max(sum(part.leaves[i].count for part in parts), 1) for i in self.expected}
        in_proportion = all(abs(ratio - 1) < 1e-12 for ratio in ratios)
        numbers_kept = all(abs(a - b) <= 1e-12 * abs(b) for a, b in zip(self.numbers, batch.numbers, strict=True))
        if self.slopes is None and in_proportion and numbers_kept:
            return None
        if not self.corrigible or not (in_proportion or (len(ratios) == 1 and len(self.expected) == len(self.used))):
            raise self._several_totals()
        ratio = 1.0 if in_proportion else ratios.pop()
        if self.slopes is None and numbers_kept:
            return ratio
        pairs = zip(self._first.leaves, batch.leaves, strict=True)
        leaves = [None if value is None else self._guarded(leaf, value) for leaf, value in pairs]
        used = self.slopes or self._slopes(leaves, self._first)
        true = self._slopes(leaves, self._first, batch.numbers)
        a, b = (
            torch.stack([s.sum().double() if s.device.type != "mps" else s.sum() for s in slopes])
            for slopes in (true, used)
        )
        return (a * b).sum() / (b * b).sum() * ratio

    @staticmethod
    def _guarded(leaf: LeafValue, value: Tensor) -> Tensor:
        """No valid target in the whole batch: the sum's gradient is zero, and stays so when not divided by zero."""
        return torch.where(value == 0, torch.ones_like(value), value) if leaf.guard else value


def _early_totals(first: Finished, index: int, entries: Sequence[Sequence[Tensor]] | None) -> dict[int, Tensor]:
    """Totals of the batch that its entries alone give, by the first finished microbatch's operations on the others'."""
    if entries is None or not first.replayable:
        return {}
    totals: dict[int, Tensor] = {}
    for leaf in leaves_of(first.loss):
        value = first.leaves[leaf.index]
        if value.kind == "sum" and value.origin is not None and not value.differentiable:
            try:
                others = [
                    Environment(own, (), ()).evaluate(value.origin) for j, own in enumerate(entries) if j != index
                ]
            except (
                RuntimeError,
                IndexError,
                ValueError,
                TypeError,
            ):  # e.g. a shape written out, which fits one microbatch only
                continue
            parts = [value, *(LeafValue("sum", other, value.name) for other in others)]
            totals[leaf.index] = combine(parts, ())
    return totals
