"""The trace of what a user's step makes of one microbatch: which tensors hold rows, and the program of the scalars.

`TailTrace` is a `TorchFunctionMode`: it sees each torch function that the step calls (not what those call in turn)
and costs a few microseconds per call. It changes no value, except that a mean over valid targets is taken as a sum
and a division.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_4d.parallel.pipeline.combine import LeafValue
from lightning_4d.parallel.pipeline.leaves import RULES
from lightning_4d.parallel.pipeline.scalars import Constant, Leaf, Node, Number, Operation, operation_name

__all__ = ["MIXED", "RANDOM", "ROWS", "Rows", "TailTrace", "TracedFloat", "TracedInt"]


class _Mark:
    """What is known of a tensor with dims."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Rows(_Mark):
    """Values of samples. `origin`: how they are made of the batch's entries alone, None if they are not."""

    def __init__(self, origin: Node | None = None) -> None:
        super().__init__("values of samples")
        self.origin = origin


ROWS = Rows()
MIXED = _Mark("values of samples that use a value of the whole batch")

Tag = _Mark | Node

_CONTENT_FREE = frozenset(["zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"])
RANDOM = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "randint_like",
        "bernoulli",
        "normal",
        "multinomial",
        "uniform",
        "exponential",
        "random",
        "log_normal",
        "cauchy",
        "geometric",
        "gumbel_softmax",
        "poisson",
        "randperm",
    ]
)
_UNFILLED = frozenset(
    ["empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"]
)  # a kernel of the user fills them


class TracedFloat(float):
    """What `item()` returns while a trace is on: a float that remembers its program through + - * / and comparisons."""

    __slots__ = ("node", "trace")
    node: Node
    trace: TailTrace

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


class TracedInt(int):
    """The same for integers."""

    node: Node  # an int has no room for slots
    trace: TailTrace

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def _traced(value: float, node: Node, trace: TailTrace) -> TracedFloat | TracedInt:
    made = TracedInt(value) if isinstance(value, int) else TracedFloat(value)
    made.node, made.trace = node, trace
    return made


def _divide(a: Any, b: Any) -> Any:
    """Python divides integers in fp64, torch in its default dtype."""
    integers = isinstance(a, Tensor) and not a.is_floating_point()
    return (a.double() if integers and a.device.type != "mps" else a) / b


def _arithmetic(owner: type, name: str) -> Callable[[Any, Any], Any]:
    plain = getattr(owner, f"__{name}__")
    swapped = name in ("radd", "rsub", "rmul", "rtruediv")
    func = getattr(operator, name.removeprefix("r") if swapped else name)
    func = _divide if func is operator.truediv else func

    def method(self: Any, other: Any) -> Any:
        value = plain(self, other)
        if not self.trace.open or isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        pair = (other, self) if swapped else (self, other)
        return _traced(value, Operation(func, self.trace.describe(pair), {}), self.trace)

    return method


def _comparison(owner: type, name: str) -> Callable[[Any, Any], Any]:
    plain, func = getattr(owner, f"__{name}__"), getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        outcome = plain(self, other)
        if isinstance(outcome, bool) and self.trace.open:
            self.trace.condition(Operation(func, self.trace.describe((self, other)), {}), outcome)
        return outcome

    return method


for _owner, _class in ((float, TracedFloat), (int, TracedInt)):
    for _name in ("lt", "le", "gt", "ge"):
        setattr(_class, f"__{_name}__", _comparison(_owner, _name))
    for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"):
        setattr(_class, f"__{_name}__", _arithmetic(_owner, _name))

_TRACED = (TracedFloat, TracedInt)


class TailTrace(TorchFunctionMode):
    """Traces one microbatch; enter it around the user's step, on the rank that runs the loss.

    Tensors that come from the batch's rows or from the blocks are to be named with `rows`; all others count as
    constants, which are compared between microbatches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open = False
        self._has_begun = False
        self.leaves: list[LeafValue] = []
        self.constants: list[Tensor] = []
        self.numbers: list[float] = []
        self.conditions: list[tuple[Node, bool]] = []
        self.replayable = True  # whether the origins hold: nothing was changed in place
        self.in_tail = False
        self.has_targets = False  # whether integers, of which some may mean "ignored", are among the rows
        self._entries = 0
        self._tags: dict[int, tuple[weakref.ref[Tensor], Tag]] = {}
        self._floats: dict[int, tuple[float, Node]] = {}
        self._without_gradient: dict[int, Operation] = {}
        self._constant_places: dict[int, int] = {}

    def __enter__(self) -> TailTrace:
        self.open = self._has_begun = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.open = False
        super().__exit__(*error)

    def close(self) -> None:
        """Let go of all tensors; numbers that outlive the trace are plain numbers from here on."""
        self.open = False
        self._tags, self._floats, self._constant_places, self._without_gradient = {}, {}, {}, {}
        self.leaves, self.constants, self.conditions, self.numbers = [], [], [], []

    def rows(self, *tensors: Any) -> None:
        """Name tensors whose dim 0, or an image of it, runs over samples.

        Once the trace has begun: hidden states, with which the tail begins. Before: entries of the batch. It is cheaper
        while the trace is not on, since it looks at the tensors.
        """
        self.in_tail = self.in_tail or self._has_begun
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._tag(tensor, ROWS)
                self.has_targets = self.has_targets or tensor.dtype in _INTEGERS

    def entries(self, *tensors: Any) -> None:
        """Name the tensors of the batch that have rows, in an order that is the same for all microbatches."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._tag(tensor, Rows(Leaf(self._entries, tensor.ndim)))
                self._entries += 1
                self.has_targets = self.has_targets or tensor.dtype in _INTEGERS

    def tag(self, tensor: Any) -> Tag | None:
        """What is known of `tensor`; None for a constant."""
        found = self._tags.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def node(self, value: Any) -> Node | None:
        """The program that made a tensor or a number, if it depends on the batch's scalars."""
        if isinstance(value, _TRACED):
            return value.node if value.trace is self else None
        if type(value) is float:
            return self._floats[id(value)][1] if id(value) in self._floats else None
        tag = self.tag(value) if isinstance(value, Tensor) else None
        if isinstance(tag, Operation) and id(tag) in self._without_gradient and value.requires_grad:
            self.leaf(
                LeafValue("opaque", value, "a custom autograd.Function")
            )  # made inside its forward: its backward is its own
            return self.node(value)
        return None if isinstance(tag, _Mark) else tag

    # What the rules call --------------------------------------------------------------------------------------------

    def leaf(self, leaf: LeafValue, made_by: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None) -> Tensor:
        """Register a leaf, the result of `made_by` (function and arguments); returns its value."""
        if made_by is not None:
            leaf.origin = self._origin(*made_by)
        self._tag(leaf.value, Leaf(len(self.leaves), leaf.value.ndim))
        self.leaves.append(leaf)
        return leaf.value

    def operation(self, func: Callable[..., Any], *args: Any) -> Tensor:
        """Run an operation on registered values and make it part of the program."""
        result = func(*args)
        self._tag(result, Operation(func, self.describe(args), {}, ndim=result.ndim))
        return result

    def condition(self, node: Node, outcome: bool) -> None:
        """Note an `if`.

        Those before the tail look at the batch alone, e.g. at a mask that masks nothing: they choose between ways to
        compute the same values of samples, and need not come out alike.
        """
        if self.in_tail:
            self.conditions.append((node, outcome))

    def describe(self, value: Any) -> Any:
        """`value` as an argument of the program: tensors and numbers become nodes."""
        node = self.node(value)
        if node is not None:
            return node
        if isinstance(value, Tensor):
            return self._constant(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self.numbers.append(value)
            return Number(len(self.numbers) - 1)
        if isinstance(value, (tuple, list)):
            described = [self.describe(v) for v in value]
            return described if isinstance(value, list) else tuple(described)
        return value

    # Each call of a torch function ----------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` and note what it made."""
        kwargs = kwargs or {}
        tags: list[Tag] = []
        self._collect(args, tags)
        if kwargs:
            self._collect(kwargs.values(), tags)
        if not tags:
            return self._untagged_operation(func, args, kwargs)
        if not any(isinstance(tag, _Mark) for tag in tags):
            return self._scalar_operation(func, args, kwargs)
        return self._row_operation(func, args, kwargs, tags)

    def _untagged_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            name = operation_name(func)
            if name in _UNFILLED or (name in RANDOM and result.ndim):
                self._tag(result, ROWS)
        return result

    def _collect(self, values: Iterable[Any], tags: list[Tag]) -> None:
        """Append what is known of the tensors and traced numbers in `values`, also in lists and tuples in them."""
        for value in values:
            if isinstance(value, Tensor):
                found = self._tags.get(id(value))
                if found is not None and found[0]() is value:
                    tags.append(found[1])
            elif isinstance(value, (float, TracedInt)):
                node = self.node(value)
                if node is not None:
                    tags.append(node)
            elif isinstance(value, (tuple, list)):
                self._collect(value, tags)

    def _argument_tag(self, value: Any) -> Tag | None:
        return self.tag(value) if isinstance(value, Tensor) else self.node(value)

    def _scalar_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of the program: none of its arguments has rows."""
        name = operation_name(func)
        described = self._described_arguments(func, args)
        named = {k: self.describe(v) for k, v in kwargs.items() if k != "out"}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            if name not in _CONTENT_FREE:
                in_place = bool(args) and result is args[0]
                node = Operation(func, described, named, in_place, ndim=result.ndim)
                self._tag(result, node)
                if not result.requires_grad:
                    self._without_gradient[id(node)] = node
        elif name == "setitem":
            self._tag(args[0], MIXED)
        elif name == "bool":
            self.condition(described[0], result)
        elif name == "item" and type(result) in (int, float):
            return _traced(result, described[0], self)
        elif name == "float":
            self._floats[id(result)] = (
                result,
                described[0],
            )  # `float()` must return a plain float: known by its identity
        elif isinstance(result, (tuple, list)):
            self._note_items(func, described, named, result)
        return result

    def _described_arguments(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments before the call; what it changes in place and the program still needs is kept as it was."""
        if not _in_place(func) or not args or not isinstance(args[0], Tensor):
            return self.describe(args)
        place = args[0].data_ptr()
        for leaf in self.leaves:
            if leaf.value.data_ptr() == place:
                leaf.value = leaf.value.clone()
        for index, constant in enumerate(self.constants):
            if constant.data_ptr() == place:
                self.constants[index] = constant.clone()
        if self.node(args[0]) is not None:
            return self.describe(args)
        self.constants.append(args[0].clone())
        return Constant(len(self.constants) - 1, args[0].ndim), *self.describe(args[1:])

    def _note_items(self, func: Any, described: Any, named: Any, results: Any) -> None:
        for item, result in enumerate(results):
            if isinstance(result, Tensor):
                self._tag(result, Operation(func, described, named, item=item, ndim=result.ndim))

    def _row_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tags: list[Tag]) -> Any:
        """An operation on rows: rows again, or a leaf."""
        mixed = any(not isinstance(tag, Rows) for tag in tags)
        rule = None if mixed else RULES.get(func)
        result = rule(self, func, args, kwargs) if rule is not None else None
        if result is not None and self.tag(result) is not None:
            return result
        if result is None:
            result = func(*args, **kwargs)
        name = operation_name(func)
        if name == "setitem":
            self.replayable = False
            self._tag(args[0], MIXED if mixed else ROWS)
        elif name not in _CONTENT_FREE:
            several = isinstance(result, (tuple, list))
            for item, tensor in enumerate(result if several else (result,)):
                if isinstance(tensor, Tensor):
                    self._note_rows(func, args, kwargs, tensor, mixed, item if several else None)
        return result

    def _note_rows(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, mixed: bool, item: int | None
    ) -> None:
        random = operation_name(func) in RANDOM
        if (_in_place(func) or "out" in kwargs) and not result.requires_grad:
            self.replayable = False
        if result.ndim == 0:
            self.leaf(LeafValue("mixed" if mixed else "opaque", result, operation_name(func)))
        else:
            origin = None if mixed or random or result.requires_grad else self._origin(func, args, kwargs, item)
            self._tag(result, MIXED if mixed else Rows(origin) if origin is not None else ROWS)

    def _origin(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], item: int | None = None
    ) -> Operation | None:
        """The call, if all rows among its arguments have an origin. Tensors that are no rows are taken as they are."""
        if not self.replayable:
            return None
        for value in _flat(args, kwargs):
            tag = self._argument_tag(value)
            if tag is not None and (not isinstance(tag, Rows) or tag.origin is None):
                return None
        return Operation(
            func, self._with_origins(args), {k: self._with_origins(v) for k, v in kwargs.items()}, item=item
        )

    def _with_origins(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            tag = self.tag(value)
            return tag.origin if isinstance(tag, Rows) else value
        if isinstance(value, (tuple, list)):
            return type(value)(self._with_origins(v) for v in value) if type(value) in (tuple, list) else value
        return value

    # Book-keeping ---------------------------------------------------------------------------------------------------

    def _tag(self, tensor: Tensor, tag: Tag) -> None:
        self._tags[id(tensor)] = (weakref.ref(tensor), tag)

    def _constant(self, tensor: Tensor) -> Constant:
        place = self._constant_places.get(id(tensor))
        if place is None:
            place = self._constant_places[id(tensor)] = len(self.constants)
            self.constants.append(tensor)  # kept alive, so that its id stays its own
        return Constant(place, tensor.ndim)


@functools.lru_cache(maxsize=4096)
def _in_place(func: Any) -> bool:
    """Whether a torch function changes its first argument, by its name: `add_`, `__iadd__`."""
    name = getattr(func, "__name__", "")
    return name.startswith("__i") or (name.endswith("_") and not name.startswith("__"))


_INTEGERS = frozenset([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors and traced numbers among the arguments, also in lists and tuples (`stack`, an index)."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, (Tensor, float, TracedInt)):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _flat(tuple(value), {})
