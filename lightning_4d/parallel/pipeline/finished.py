"""What is kept of a microbatch after its forward: the programs of its loss and logged values, and what they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.pipeline.combine import LeafValue, combine, combine_numbers
from lightning_4d.parallel.pipeline.scalars import Constant, Environment, Form, Leaf, Node, Number, Renumbering, forms
from lightning_4d.parallel.pipeline.tail_trace import TailTrace

__all__ = [
    "LOSS",
    "Finished",
    "Mode",
    "Plan",
    "Rules",
    "batch_environment",
    "combined_number",
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
        combined_number(LOSS + " or a logged value", rule, column, sizes)
        for rule, column in zip(rules.numbers, columns)
    ]
    return Environment(leaves, parts[0].constants, numbers)


def combined_number(what: str, rule: str, values: Sequence[float], sizes: Sequence[int]) -> float:
    """The batch's value of a Python number by its rule.

    Raises:
        UnsupportedError: A number taken for a constant is not the same in all microbatches.
    """
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
