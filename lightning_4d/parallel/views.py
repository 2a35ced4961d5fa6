"""Views of gathered copies, which must not be changed in place; and the one spelling of arguments that rules know.

Both kinds of tensors that are divided among ranks share this: what has no rule runs on a gathered copy, and torch takes
NumPy's names of arguments beside its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_4d._torch_private import tree_flatten, tree_map, tree_unflatten, without_torch_function
from lightning_4d.errors import UnsupportedError, explain, user_line

_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x2": "other"}
_FIRST = ("x", "a", "x1")  # NumPy's names of `input`


class GatheredView(Tensor):
    """A view of a gathered copy: an ordinary tensor, except that changing it in place raises.

    On one process the change would reach the tensor that it is a view of; here it would be lost.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on ordinary tensors.

        Raises:
            UnsupportedError: it changes one of the views.
        """
        leaves, structure = tree_flatten((args, dict(kwargs or {})))
        with without_torch_function():
            views = [leaf for leaf in leaves if isinstance(leaf, GatheredView)]
            leaves = [leaf.as_subclass(Tensor) if isinstance(leaf, GatheredView) else leaf for leaf in leaves]
            versions = [view._version for view in views]
        given, named = tree_unflatten(leaves, structure)
        result = func(*given, **named)
        with without_torch_function():
            if any(view._version != version for view, version in zip(views, versions, strict=True)):
                raise _changed(func)
            return views_of(views, result)


def views_of(copies: Iterable[Tensor], result: Any) -> Any:
    """Replace what shares memory with ``copies`` in ``result``, a tensor or nested containers, by a GatheredView."""
    plain = [copy for copy in copies if _has_memory(copy)]
    return tree_map(lambda leaf: leaf.as_subclass(GatheredView) if _is_of(leaf, plain) else leaf, result)


def as_view(tensor: Tensor) -> Tensor:
    """Show a copy that stands for a view: nothing may change it in place."""
    return tensor.as_subclass(GatheredView) if _has_memory(tensor) else tensor


def unmarked(value: Any) -> Any:
    """Return an ordinary tensor for a GatheredView, and anything else as it is: for what leaves a step."""
    with without_torch_function():
        return value.as_subclass(Tensor) if isinstance(value, GatheredView) else value


def _is_of(leaf: Any, copies: list[Tensor]) -> bool:
    if not isinstance(leaf, Tensor) or not _has_memory(leaf):
        return False
    place = leaf.untyped_storage().data_ptr()
    return any(copy.untyped_storage().data_ptr() == place for copy in copies)


def _has_memory(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor: not one that shows a whole, nor one without data."""
    ordinary = type(tensor) in (Tensor, nn.Parameter, GatheredView)
    return ordinary and tensor.layout is torch.strided and not tensor.is_meta


def _changed(func: Any) -> UnsupportedError:
    name, line = getattr(func, "__name__", func), user_line()[0]
    return UnsupportedError(
        explain(
            f"{name} changes a view of a tensor that is divided among ranks ({line})",
            "the view is of a gathered copy, and the change would not reach the tensor itself",
            "change the tensor itself, by x[index] = value, or a clone of the view",
        )
    )


def spelled(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a torch function with torch's own names, and ``input`` in the first place.

    >>> spelled((), {"input": 1, "axis": 2, "keepdims": True})
    ((1,), {'dim': 2, 'keepdim': True})
    """
    if not kwargs:
        return args, {}
    named = {_NUMPY.get(name, name): value for name, value in kwargs.items()}
    if not args and "condition" not in named:  # torch.where has its input in the second place
        for name in ("input", *_FIRST):
            if name in named:
                return (named.pop(name),), named
    return args, named
