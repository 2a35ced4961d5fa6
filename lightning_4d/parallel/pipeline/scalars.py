"""The scalar program of a step: what a user's code computes from values that already were reduced over the batch.

`log("ppl", exp(loss))` is the operation `exp` on the leaf `loss`. Evaluated on the leaves of the whole batch instead
of those of one microbatch, the program gives the batch's value. `forms` tells how a program depends on its
differentiable leaves, from its structure alone, so that nothing has to be read from the device.

Vocabulary: a *leaf* is a value reduced over all rows of a microbatch; a *constant* does not depend on the batch; a
*number* is a Python number in the program, which may or may not (`x.size(0)`) depend on the batch. *Early*: known for
the whole batch before the first backward. *Late*: known after the last forward only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Constant",
    "Environment",
    "Form",
    "Leaf",
    "Node",
    "Number",
    "Operation",
    "Renumbering",
    "forms",
    "operation_name",
]

Signature = tuple[Any, ...]

_ADDITIVE = frozenset(
    [
        "add",
        "radd",
        "iadd",
        "sub",
        "rsub",
        "isub",
        "neg",
        "positive",
        "sum",
        "mean",
        "stack",
        "cat",
        "getitem",
        "squeeze",
        "unsqueeze",
        "view",
        "reshape",
        "flatten",
        "to",
        "type",
        "float",
        "double",
        "half",
        "bfloat16",
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "alias",
        "expand",
        "requires_grad",
    ]
)
_PRODUCTS = frozenset(["mul", "rmul", "imul", "multiply"])
_QUOTIENTS = frozenset(["div", "truediv", "itruediv", "idiv", "divide", "true_divide"])
_DETACHED = frozenset(["detach"])


@dataclass(frozen=True, slots=True)
class Leaf:
    """The `index`-th leaf of the trace; `ndim` of its value."""

    index: int
    ndim: int = 0

    @property
    def signature(self) -> int:
        """Equal for the same place in the program of another microbatch."""
        return hash(("leaf", self.index))


@dataclass(frozen=True, slots=True)
class Constant:
    """The `index`-th tensor of the program that does not depend on the batch."""

    index: int
    ndim: int = 0

    @property
    def signature(self) -> int:
        """Equal for the same place in the program of another microbatch."""
        return hash(("constant", self.index))


@dataclass(frozen=True, slots=True)
class Number:
    """The `index`-th Python number of the program."""

    index: int
    ndim: int = 0

    @property
    def signature(self) -> int:
        """Equal for the same place in the program of another microbatch."""
        return hash(("number", self.index))


@dataclass(eq=False, slots=True)
class Operation:
    """`func(*args, **kwargs)` with nodes in place of tensors and numbers; `item`: which of several results."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_place: bool = False
    item: int | None = None
    ndim: int = 0
    _signature: list[int] = field(default_factory=list)

    @property
    def signature(self) -> int:
        """Equal for the same operation on the same places in the program of another microbatch. Computed once."""
        if not self._signature:
            name = getattr(self.func, "__qualname__", str(self.func))
            whole = (name, self.in_place, self.item, _structure(self.args), _structure(self.kwargs))
            self._signature.append(hash(whole))
        return self._signature[0]


Node = Leaf | Constant | Number | Operation


def _structure(value: Any) -> Any:
    if isinstance(value, (Leaf, Constant, Number, Operation)):
        return value.signature
    if isinstance(value, (tuple, list)):
        return tuple(_structure(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _structure(v)) for k, v in sorted(value.items()))
    return repr(value)


@dataclass(slots=True)
class Renumbering:
    """Numbers the leaves, constants and numbers that are used, in the order in which programs meet them."""

    leaves: dict[int, int] = field(default_factory=dict)
    constants: dict[int, int] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    _made: dict[int, Operation] = field(default_factory=dict)

    def __call__(self, node: Node) -> Node:
        """The node with the new indices."""
        if isinstance(node, Leaf):
            return Leaf(self.leaves.setdefault(node.index, len(self.leaves)), node.ndim)
        if isinstance(node, Constant):
            return Constant(self.constants.setdefault(node.index, len(self.constants)), node.ndim)
        if isinstance(node, Number):
            return Number(self.numbers.setdefault(node.index, len(self.numbers)))
        if id(node) not in self._made:
            args, kwargs = self._inner(node.args), self._inner(node.kwargs)
            self._made[id(node)] = Operation(node.func, args, kwargs, node.in_place, node.item, node.ndim)
        return self._made[id(node)]

    def _inner(self, value: Any) -> Any:
        if isinstance(value, (Leaf, Constant, Number, Operation)):
            return self(value)
        if isinstance(value, dict):
            return {k: self._inner(v) for k, v in value.items()}
        return type(value)(self._inner(v) for v in value) if type(value) in (tuple, list) else value


@dataclass(slots=True)
class Environment:
    """The values of leaves, constants and numbers on which a program is evaluated. Shared parts run once."""

    leaves: Sequence[Tensor | None]
    constants: Sequence[Tensor]
    numbers: Sequence[float]
    _made: dict[int, Any] = field(default_factory=dict)

    def evaluate(self, node: Node) -> Any:
        """The value of `node`: a tensor, or a number where the program itself makes one. Differentiable."""
        if isinstance(node, Leaf):
            return self.leaves[node.index]
        if isinstance(node, Constant):
            return self.constants[node.index]
        if isinstance(node, Number):
            return self.numbers[node.index]
        if id(node) not in self._made:
            self._made[id(node)] = self._run(node)
        return self._made[id(node)]

    def _run(self, node: Operation) -> Any:
        args = [self._resolve(a) for a in node.args]
        kwargs = {k: self._resolve(v) for k, v in node.kwargs.items()}
        if node.in_place:
            args[0] = args[0].clone()
        result = node.func(*args, **kwargs)
        return result if node.item is None else result[node.item]

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, (Leaf, Constant, Number, Operation)):
            return self.evaluate(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._resolve(v) for v in value)
        return value


@dataclass(slots=True)
class Form:
    """How a node depends on the differentiable leaves.

    `factors` maps each of them to the late factors in its derivative: `()` when the derivative is known early; two
    leaves with equal entries have derivatives whose ratio is known early. `late`: the node's own value is known late
    only.
    """

    factors: dict[Node, Signature]
    late: bool

    @property
    def early(self) -> bool:
        """Whether every derivative is known before the first backward."""
        return not any(self.factors.values())

    @property
    def uniform(self) -> bool:
        """Whether one factor, common to all derivatives, is all that is unknown before the first backward."""
        return len(set(self.factors.values())) <= 1


def forms(root: Node, of_leaf: Callable[[Node], Form]) -> Form:
    """How `root` depends on differentiable leaves; `of_leaf` says it for leaves, constants and numbers."""
    made: dict[int, Form] = {}

    def visit(node: Node) -> Form:
        if not isinstance(node, Operation):
            return of_leaf(node)
        if id(node) not in made:
            inner = [(child, visit(child)) for child in _children((node.args, node.kwargs))]
            made[id(node)] = _operation_form(node, inner)
        return made[id(node)]

    return visit(root)


def _children(value: Any) -> list[Node]:
    if isinstance(value, (Leaf, Constant, Number, Operation)):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [node for v in value for node in _children(v)]
    return []


@functools.lru_cache(maxsize=4096)  # asked several times for each call of each microbatch
def operation_name(func: Callable[..., Any]) -> str:
    """The name of a torch function without underscores at its ends: `__iadd__` is `iadd`, `add_` is `add`."""
    return getattr(func, "__name__", str(func)).strip("_")


def _operation_form(node: Operation, inner: list[tuple[Node, Form]]) -> Form:
    late = any(form.late for _, form in inner)
    name = operation_name(node.func)
    if name in _DETACHED or node.func is torch.Tensor.data.__get__:  # pyright: ignore[reportAttributeAccessIssue]
        return Form({}, late)
    if name in _ADDITIVE:
        return Form(_merge(node, [form.factors for _, form in inner]), late)
    if name in _PRODUCTS and len(inner) == 2:
        (a, form_a), (b, form_b) = inner
        return Form(_merge(node, [_times(form_a, b, form_b, "value"), _times(form_b, a, form_a, "value")]), late)
    if name in _QUOTIENTS and len(inner) == 2:
        (a, form_a), (b, form_b) = inner
        lower = {leaf: (*f, ("slope", node.signature)) for leaf, f in form_b.factors.items()}
        return Form(_merge(node, [_times(form_a, b, form_b, "inverse"), lower]), late)
    return Form(_merge(node, [_slope(node, i, form, len(inner)) for i, (_, form) in enumerate(inner)]), late)


def _times(form: Form, other: Node, other_form: Form, how: str) -> dict[Node, Signature]:
    """The derivatives of a product, or quotient, with respect to one side."""
    if not other_form.late:
        return form.factors
    return {leaf: (*f, _factor(how, other.signature, other.ndim, leaf)) for leaf, f in form.factors.items()}


def _slope(node: Operation, place: int, form: Form, arguments: int) -> dict[Node, Signature]:
    """The derivatives through any other function: late if its argument is, common to leaves of one scalar argument."""
    if not form.late:
        late_elsewhere = arguments > 1
        if not late_elsewhere:
            return form.factors
    return {leaf: (*f, _factor(f"slope {place}", node.signature, node.ndim, leaf)) for leaf, f in form.factors.items()}


def _factor(how: str, signature: int, ndim: int, leaf: Node) -> Signature:
    """A late factor; one that has dimensions may differ between the leaves it meets."""
    return (how, signature) if ndim == 0 else (how, signature, leaf)


def _merge(node: Operation, parts: list[dict[Node, Signature]]) -> dict[Node, Signature]:
    merged: dict[Node, Signature] = {}
    for part in parts:
        for leaf, factors in part.items():
            ordered = tuple(sorted(factors, key=repr))
            if leaf in merged and merged[leaf] != ordered:
                ordered = (("several", node.signature, leaf),)
            merged[leaf] = ordered
    return merged
