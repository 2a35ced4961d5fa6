"""`Sharded`: one rank's part of a tensor, with the shape of the whole.

User code keeps its meaning: ``x.view(B, T, self.n_heads, -1)`` is written for all heads, and `Sharded` reports and
takes global shapes, while each operation runs on this rank's part. Each operation that may run so has a rule, in the
modules beside this one. One without a rule gets the gathered tensor, which is right and slower. What a gathered copy
cannot make right (changing it in place, hooks on it, custom autograd Functions) raises by name.

Interception is by ``__torch_function__``, so it travels with the data: into checkpointed code, into functions that were
imported by name, into backward.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from lightning_4d._torch_private import make_wrapper, without_torch_function
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.parts import Divided
from lightning_4d.parallel.tensor import group as collectives
from lightning_4d.parallel.tensor.group import TensorGroup
from lightning_4d.parallel.views import spelled, unmarked, views_of

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}
"""By the function as ``__torch_function__`` gets it. A rule returns NotImplemented where it needs the whole tensor."""

_ENTERED = "_lightning_4d_entered"


_grad_fn: Any = Tensor.grad_fn.__get__  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


class Runtime:
    """What all sharded tensors of one module have in common.

    Args:
        group: the ranks that share the tensors.
        sequence_parallel: keep the residual stream in parts of the sequence between the sharded layers.
    """

    def __init__(self, group: TensorGroup, *, sequence_parallel: bool = False) -> None:
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.on_gather: Callable[[Any, Sharded], None] | None = None  # hears of gathers for want of a rule
        self.newest_entered: Tensor | None = None  # see `entered`
        self.quiet = False
        self._named: set[tuple[str, str]] = set()

    def name_gather(self, function: Any, value: Sharded) -> None:
        """Say once for each line of the user's code that it needs the whole tensor."""
        if self.on_gather is not None:
            self.on_gather(function, value)
        if self.quiet:
            return
        what, (file, line) = function_name(function), _user_line()
        where = f"{file}:{line}"
        if (what, where) not in self._named:
            self._named.add((what, where))
            if self.group.rank == 0:
                warnings.warn_explicit(
                    f"{what} needs a whole tensor of shape {tuple(value.shape)}, which is in parts over the "
                    "tensor-parallel ranks: it is gathered, which is right and costs time",
                    UserWarning,
                    file,
                    line,
                )


class Sharded(Divided):
    """A tensor whose dim ``dim`` is divided among the ranks of a group.

    The dim consists of ``parts`` equal parts, and each rank holds its share of each of them, in order: of the output of
    one Linear for queries, keys and values (three parts), a third of the local features are queries.

    Args:
        local: this rank's share; autograd goes through it.
        dim: the divided dim, not negative.
        parts: see above.
        runtime: the group, and what else is common.
        origin: names of the parameters that made it sharded.
    """

    parts: int
    runtime: Runtime
    origin: frozenset[str]
    _sizes: torch.Size
    _entered_whole: tuple[int, Tensor] | None
    _whole: tuple[int, Tensor] | None

    @staticmethod
    def __new__(
        cls: type[Sharded],
        local: Tensor,
        dim: int,
        parts: int,
        runtime: Runtime,
        origin: frozenset[str] = frozenset(),
    ) -> Sharded:
        """Make a tensor without memory of its own."""
        sizes = list(local.shape)
        sizes[dim] *= runtime.group.size
        made = make_wrapper(cls, sizes, local)
        made.local, made.split_dim, made.parts, made.runtime, made.origin = local, dim, parts, runtime, origin
        made._sizes = torch.Size(sizes)
        made._entered_whole = made._whole = None
        return made

    # What user code reads most often, without the way through __torch_function__.
    shape = property(lambda self: self._sizes)  # pyright: ignore[reportAssignmentType]
    ndim = property(lambda self: len(self._sizes))  # pyright: ignore[reportAssignmentType]
    dtype = property(lambda self: self.local.dtype)  # pyright: ignore[reportAssignmentType]
    device = property(lambda self: self.local.device)  # pyright: ignore[reportAssignmentType]
    requires_grad = property(  # pyright: ignore[reportAssignmentType]
        lambda self: self.local.requires_grad, lambda self, value: self.requires_grad_(value)
    )
    grad_fn = property(lambda self: self.local.grad_fn)  # pyright: ignore[reportAssignmentType]

    def size(self, dim: int | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The global sizes, or that of one dim."""
        return self._sizes if dim is None else self._sizes[dim]

    def dim(self) -> int:
        """The number of dims."""
        return len(self._sizes)

    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return self._sizes.numel()

    def __len__(self) -> int:
        return self._sizes[0]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return (
            f"Sharded(shape={tuple(self._sizes)}, dim={self.split_dim}, parts={self.parts}, "
            f"rank {self.runtime.group.rank} of {self.runtime.group.size})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, int]]:
        """Where the memory is, for those who count it."""
        return ["local"], (self.split_dim, self.parts)

    @property
    def split_size(self) -> int:
        """The global size of the divided dim."""
        return self._sizes[self.split_dim]

    def like(self, local: Tensor, dim: int | None = None, parts: int | None = None) -> Sharded:
        """Return another part of the same group, by default divided as this one is."""
        dim = self.split_dim if dim is None else dim
        return Sharded(local, dim, self.parts if parts is None else parts, self.runtime, self.origin)

    def gathered(self, why: str = "whole tensor") -> Tensor:
        """Return the whole tensor. Which ranks must call: all of the group."""
        self.check()
        if self._whole is not None and self._whole[0] == self.local._version:
            return self._whole[1]
        whole = collectives.gather(self.local, self.split_dim, self.parts, self.runtime.group, why)
        if not whole.requires_grad and not self.runtime.sequence_parallel:
            self._whole = self.local._version, whole  # metrics ask several times
        return whole

    def gathered_for_parts(self, why: str) -> Tensor:
        """Return the whole tensor for use with parts; the gradients of all such uses are summed once.

        Which ranks must call: all of the group.
        """
        if self._entered_whole is not None and self._entered_whole[0] == self.local._version:
            return self._entered_whole[1]
        whole = collectives.gather_for_parts(self.local, self.split_dim, self.parts, self.runtime.group, why)
        self._entered_whole = self.local._version, whole
        return whole

    def check(self) -> None:
        """Refuse a tensor that a custom autograd Function returned: it has lost the way to this rank's part."""
        with without_torch_function():
            lost = _grad_fn(self) is not None
        if lost:
            raise refusal()

    @classmethod
    def run_as(cls, rule: Any, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call ``function`` on this rank's parts, as the rule for another one says, or on whole tensors."""
        result = RULES[rule](function, args, kwargs)
        return on_whole(function, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function's rule, or run it on gathered tensors."""
        if len(types) > 1 and not all(_is_ours(kind) for kind in types):  # pyright: ignore[reportArgumentType]
            return NotImplemented  # the other kind of tensor has this one inside, or takes it to be whole
        kwargs = kwargs or {}
        for arg in args:
            if type(arg) is Sharded:
                arg.check()
        rule = RULES.get(func)
        if rule is not None:
            result = rule(func, *spelled(args, kwargs))
            if result is not NotImplemented:
                return result
        return on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: below ``__torch_function__`` the way of the gradient would be lost."""
        raise refusal(f"{func}")


def _is_ours(kind: type) -> bool:
    if kind is Sharded or kind is Tensor:
        return True
    theirs = getattr(kind.__torch_function__, "__func__", None)  # None: torch's way to have none, as in nn.Parameter
    return theirs is None or theirs is getattr(Tensor.__torch_function__, "__func__", None)


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register the decorated rule for these functions; None among them is passed over."""

    def register(made: Rule) -> Rule:
        RULES.update({function: made for function in functions if function is not None})
        return made

    return register


def functions(names: str, namespaces: Sequence[Any] = ()) -> list[Any]:
    """Find the functions and methods of torch with one of these names, separated by blanks; missing ones are left out.

    Args:
        names: of functions.
        namespaces: where to look; by default torch, Tensor, torch.nn.functional, torch.special and torch.linalg.
    """
    spaces = namespaces or (torch, Tensor, torch.nn.functional, torch.special, torch.linalg)
    return [found for name in names.split() for space in spaces if (found := getattr(space, name, None)) is not None]


def getter(*names: str) -> list[Any]:
    """What ``__torch_function__`` gets for reading these properties of a Tensor."""
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


def on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on gathered tensors."""
    if args and type(args[0]) is Sharded and changes_first(func):
        raise UnsupportedError(
            explain(
                f"{function_name(func)} on a tensor of shape {tuple(args[0].shape)} at {_place()}",
                "a tensor in parts over the tensor-parallel ranks is changed in place by elementwise operations only",
                "write y = f(x) instead of f_(x), or give tensor_parallel_plan a 'replicate' for "
                + (", ".join(sorted(args[0].origin)) or "the layer that made it"),
            )
        )
    if any(type(value) is Sharded for value in kwargs.values()) and type(kwargs.get("out")) is Sharded:
        raise refusal(f"{function_name(func)}(out=...)")

    copies: list[Tensor] = []

    def whole(value: Any) -> Any:
        if type(value) is Sharded:
            value.runtime.name_gather(func, value)
            copies.append(value.gathered(f"{function_name(func)} has no rule for it"))
            return copies[-1]
        if isinstance(value, (list, tuple)) and any(type(item) is Sharded for item in value):
            return type(value)(whole(item) for item in value)
        return value

    result = func(*(whole(arg) for arg in args), **{key: whole(value) for key, value in kwargs.items()})
    return views_of(copies, result)


def changes_first(func: Any) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    if name in ("__setitem__", "__set__", "requires_grad_"):
        return True
    in_place = name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__")
    return in_place or (name.endswith("_") and not name.endswith("__"))


def find_sharded(values: Iterable[Any]) -> Sharded | None:
    """The first sharded tensor among values, also inside lists and tuples."""
    for value in values:
        if type(value) is Sharded:
            return value
        if isinstance(value, (list, tuple)) and (found := find_sharded(value)) is not None:
            return found
    return None


def entered(tensor: Tensor, runtime: Runtime, why: str) -> Tensor:
    """Return a plain tensor for use with parts, the same for all uses of it: its gradient is summed once, not by use.

    So queries, keys and values that read the same norm's output cost one all-reduce in backward, not three.
    """
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    known = tensor.__dict__.get(_ENTERED)
    if known is not None and known[0] == tensor._version and known[1] is runtime:
        result = known[2]()
        if result is not None:
            return result
    result = collectives.enter(tensor, runtime.group, why)
    if tensor.grad_fn is not None:  # a leaf would keep its graph alive for ever
        # By a weak reference: the result is a view of the tensor and keeps it alive, so that the two would stay for
        # ever. What autograd does not save (autocast saves a copy) lives until the next one enters, or the step ends.
        vars(tensor)[_ENTERED] = (tensor._version, runtime, weakref.ref(result))
        runtime.newest_entered = result
    return result


def cut_like(tensor: Tensor, dim: int, like: Sharded, why: str) -> Tensor:
    """Take this rank's part of a plain tensor along ``dim``, as ``like`` is divided."""
    return collectives.cut(tensor, dim, like.parts, like.runtime.group, why)


def whole_values(value: Any) -> Any:
    """Replace sharded tensors in nested dicts, lists and tuples by whole ones."""
    if type(value) is Sharded:
        return unmarked(value.gathered("it leaves the step"))
    if type(value) in (list, tuple):
        return type(value)(whole_values(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(whole_values(item) for item in value))
    if isinstance(value, dict):
        replaced = {key: whole_values(item) for key, item in value.items()}
        if any(replaced[key] is not item for key, item in value.items()):
            return replaced if type(value) is dict else _updated(value, replaced)
    return unmarked(value)


def _updated(value: Any, items: Any) -> Any:
    """A dict of another class (a Hugging Face model output) with these items, in place."""
    for key, item in items.items():
        value[key] = item
    return value


def function_name(func: Any) -> str:
    """The name of a function that ``__torch_function__`` got, for messages."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__") and owner is not None:
        return f"torch.Tensor.{owner.__name__}"
    return resolve_name(func) or getattr(func, "__name__", str(func))


def _place() -> str:
    return ":".join(map(str, _user_line()))


def _user_line() -> tuple[str, int]:
    """The innermost line of code that is neither torch's nor of this package: file and number."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("torch", "lightning_4d"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "unknown", 0


def refusal(what: str = "a custom torch.autograd.Function, or code below torch's functions") -> UnsupportedError:
    """The error for what parts cannot be given to."""
    return UnsupportedError(
        explain(
            f"{what} got a tensor that is in parts over the tensor-parallel ranks ({_place()})",
            "only functions of torch are known to work on parts",
            "give tensor_parallel_plan a 'replicate' for the layers whose output it reads",
        )
    )
