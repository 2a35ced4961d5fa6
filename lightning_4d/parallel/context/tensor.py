"""`SequenceTensor`: shows the whole sequence, holds this rank's part of it.

Code sees the shape of the whole tensor, whatever rank it runs on, and may do with it what it likes. Operations with a
rule (:mod:`lightning_4d.parallel.context.rules`) work on the part. Any other operation gathers the whole tensor first,
which is right and slower, and says so once. What a gather could not make right is done on the parts as well, or
raises: operations that change a tensor in place, views of a gathered copy, custom autograd functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_4d import _torch_private as private
from lightning_4d._torch_private import tree_flatten, tree_map, tree_unflatten
from lightning_4d.errors import UnsupportedError, explain, user_line
from lightning_4d.parallel.context.communication import Sharding, gather, gather_plain, take_part
from lightning_4d.parallel.context.report import report_gather
from lightning_4d.parallel.parts import Divided
from lightning_4d.parallel.views import GatheredView, spelled, unmarked, views_of

Rule = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]

RULES: dict[Any, Rule] = {}
"""By function: what to do instead. A rule returns ``NotImplemented`` for arguments that it does not cover."""


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register the decorated rule for ``functions``."""

    def register(handler: Rule) -> Rule:
        for function in functions:
            RULES[function] = handler
        return handler

    return register


class SequenceTensor(torch.Tensor):
    """A tensor whose sequence is divided among ranks; made by :func:`wrap`."""

    part: Tensor
    sharding: Sharding
    _shape: torch.Size

    @staticmethod
    def __new__(cls: type[SequenceTensor], part: Tensor, sharding: Sharding) -> SequenceTensor:
        """Show ``part`` as the whole tensor that ``sharding`` describes."""
        shape = list(part.shape)
        shape[sharding.dim] = sharding.size
        self = private.wrapper_tensor(cls, shape, part)
        self.part = part
        self.sharding = sharding
        self._shape = torch.Size(shape)
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = RULES.get(func)
        if handler is not None:
            given, named = spelled(args, kwargs)
            result = handler(func, given, named)
            if result is not NotImplemented:
                return result
        return run_gathered(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedError(
            explain(
                f"{func} on a tensor whose sequence is divided among ranks, from code below Python ({user_line()[0]})",
                "only calls that Python sees can be divided or gathered",
                "gather it first: x = x + 0 inside lightning_4d.parallel.context.whole(x)",
            )
        )

    # What is asked most, without a detour through __torch_function__.

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of the whole tensor."""
        return self._shape

    @property
    def ndim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of dims."""
        return len(self._shape)

    @property
    def requires_grad(self) -> bool:
        """Whether the part takes part in the gradient."""
        return self.part.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.part.requires_grad = value

    @property
    def grad_fn(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of the part."""
        return self.part.grad_fn

    @property
    def is_leaf(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of the part."""
        return self.part.is_leaf

    @property
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """None: a part keeps no gradient."""
        return None

    @property
    def _version(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.part._version

    def dim(self) -> int:
        """The number of dims."""
        return len(self._shape)

    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return self._shape.numel()

    nelement = numel

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor."""
        return self._shape if dim is None else self._shape[dim]

    def requires_grad_(self, mode: bool = True) -> SequenceTensor:
        """Let the part take part in the gradient, or not."""
        self.part.requires_grad_(mode)
        return self

    def __len__(self) -> int:
        return self._shape[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"SequenceTensor(shape={tuple(self._shape)}, sequence in dim {self.sharding.dim}, "
            f"part={tuple(self.part.shape)}, dtype={self.part.dtype})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Sharding]:
        return ["part"], self.sharding

    @staticmethod
    def __tensor_unflatten__(parts: Mapping[str, Tensor], sharding: Sharding, size: Any, stride: Any) -> SequenceTensor:
        return SequenceTensor(parts["part"], sharding)


def wrap(part: Tensor, sharding: Sharding) -> SequenceTensor:
    """Show ``part`` as the whole tensor that ``sharding`` describes."""
    return SequenceTensor(part, sharding)


def whole(value: Any) -> Any:
    """Replace each SequenceTensor in ``value`` (a tensor, or nested containers) by the whole plain tensor.

    Which ranks must call: all that share the sequences.
    """

    def of(leaf: Any) -> Any:
        return gather(leaf.part, leaf.sharding) if isinstance(leaf, SequenceTensor) else unmarked(leaf)

    return tree_map(of, value)


# --------------------------------------------------------------------------------------------------- without a rule


_REFUSED = {
    name: remedy
    for names, remedy in (
        (
            ("backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "retains_grad"),
            "use the loss, or gather first by lightning_4d.parallel.context.whole(x)",
        ),
        (
            ("resize_", "resize_as_", "set_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
            "use the form without the underscore",
        ),
        (("detach_", "share_memory_", "rename_"), "use x.detach() and copies"),
        (
            ("data_ptr", "storage", "untyped_storage", "storage_offset", "__dlpack__", "__cuda_array_interface__"),
            "gather first by lightning_4d.parallel.context.whole(x)",
        ),
    )
    for name in names
}


def run_gathered(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` with whole tensors; keep in the parts what it changed in place.

    Raises:
        UnsupportedError: ``func`` is about memory or gradients of the very tensor, which a gathered copy has not.
    """
    name = getattr(func, "__name__", str(func))
    _refuse(name)
    report_gather(name)
    is_changing = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    leaves, structure = tree_flatten((args, dict(kwargs)))
    copies: dict[int, tuple[SequenceTensor, Tensor, int]] = {}
    for leaf in leaves:
        if isinstance(leaf, SequenceTensor) and id(leaf) not in copies:
            full = gather_plain(leaf.part, leaf.sharding)
            if is_changing and full.requires_grad:
                full = full.clone()  # it may be a view that an autograd function returned, which autograd protects
            copies[id(leaf)] = (leaf, full, full._version)
    leaves = [copies[id(leaf)][1] if id(leaf) in copies else leaf for leaf in leaves]
    given, named = tree_unflatten(leaves, structure)
    other_kinds = any(isinstance(leaf, Divided) for leaf in leaves)  # they have rules of their own
    with nullcontext() if other_kinds else private.without_torch_function():
        result = func(*given, **named)
    changed = [(original, full) for original, full, version in copies.values() if full._version != version]
    for original, full in changed:
        _write_back(name, original, full)
    return tree_map(lambda leaf: _result(leaf, copies, changed), result)


def _refuse(name: str) -> None:
    if name in _REFUSED:
        raise UnsupportedError(
            explain(
                f"{name} on a tensor whose sequence is divided among ranks ({user_line()[0]})",
                "each rank holds its own part of it only",
                _REFUSED[name],
            )
        )


def _write_back(name: str, original: SequenceTensor, full: Tensor) -> None:
    if full.shape != original.shape or full.dtype != original.part.dtype:
        raise UnsupportedError(
            explain(
                f"{name} changes shape or dtype of a tensor whose sequence is divided among ranks ({user_line()[0]})",
                "what is changed in place keeps its shape and dtype",
                "use an operation that returns a new tensor",
            )
        )
    from lightning_4d.parallel.context.communication import cut

    original.part.copy_(cut(full, original.sharding))


def _result(
    leaf: Any,
    copies: Mapping[int, tuple[SequenceTensor, Tensor, int]],
    changed: Sequence[tuple[SequenceTensor, Tensor]],
) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    for original, full in changed:
        if leaf is full:
            return original
    return views_of([full for _, full, _ in copies.values()], leaf)


# -------------------------------------------------------------------------------------------------- autograd functions


def guard_autograd_functions() -> None:
    """Let custom autograd functions see whole tensors: their graph would not know what a SequenceTensor holds.

    Once per process; functions called without a SequenceTensor are not changed.
    """
    private.intercept_autograd_functions(SequenceTensor, _gather_for_function, _refuse_function)


def _gather_for_function(function: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
    report_gather(f"{function.__name__}.apply")
    return tuple(gather_plain(arg.part, arg.sharding) if isinstance(arg, SequenceTensor) else arg for arg in args)


def _refuse_function(function: type) -> None:
    reentrant = function.__name__ == "CheckpointFunction"
    raise UnsupportedError(
        explain(
            f"{function.__name__} returns a tensor whose sequence is divided among ranks ({user_line()[0]})",
            "its gradient would not reach what was computed inside",
            "use lightning_4d.callbacks.ActivationCheckpointing, or use_reentrant=False"
            if reentrant
            else "return whole tensors, by lightning_4d.parallel.context.whole(x)",
        )
    )


__all__ = [
    "RULES",
    "GatheredView",
    "SequenceTensor",
    "guard_autograd_functions",
    "rule",
    "run_gathered",
    "take_part",
    "whole",
    "wrap",
]
