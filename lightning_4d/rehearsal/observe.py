"""See what a step communicates; on fake tensors, also answer for the values that are not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lightning_4d import _torch_private as private
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.layout import AXES, ParallelLayout

__all__ = ["Communications"]


class Communications:
    """The collectives of one rank, by what they are and along which axes.

    Args:
        layout: of the job.

    Attributes:
        calls: how many, by (kind, axes); axes as ``"tp"`` or, of groups along several, ``"dp_shard+cp"``.
        bytes: of the whole tensors of all these calls together.
    """

    def __init__(self, layout: ParallelLayout) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self._layout = layout
        self._axes: dict[tuple[int, ...], str] = {}
        self._in_user_code = False

    def watching(self) -> AbstractContextManager[Any]:
        """A context in which every collective of this thread is noted, whoever starts it, also in backward."""
        return private.dispatch_mode(self._handle)

    def clear(self) -> None:
        """Forget what was seen."""
        self.calls.clear()
        self.bytes.clear()

    def as_user_code(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as code of the user's, in which a value that is not there is an error."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._in_user_code = self._in_user_code, True
            try:
                return function(*args, **kwargs)
            finally:
                self._in_user_code = before

        return run

    def _handle(self, mode: Any, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation is private.READ_NUMBER and private.is_fake(args[0]):
            return self._value_of(args[0])
        found = private.collective_of(operation, args)
        if found is not None:
            self._note(*found)
        return operation(*args, **kwargs)

    def _note(self, kind: str, ranks: tuple[int, ...], size: int) -> None:
        if len(ranks) > 1:
            key = kind, self.axes_of(ranks)
            self.calls[key] += 1
            self.bytes[key] += size

    def _value_of(self, tensor: torch.Tensor) -> bool | int | float:
        """What ranks ask each other (do all agree? did any use it?) is answered by yes."""
        if self._in_user_code:
            raise UnsupportedError(
                explain(
                    "the step reads a value of a tensor (.item(), bool(), .tolist())",
                    "a rehearsal runs on tensors that have shapes only",
                    "take conditions on values out of the step",
                )
            )
        return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

    def axes_of(self, ranks: tuple[int, ...]) -> str:
        """Return the axes along which the ranks of a group differ, outermost first."""
        if ranks not in self._axes:
            places = [self._layout.coordinate(rank) for rank in ranks]
            along = [axis for axis in AXES if len({place[axis] for place in places}) > 1]
            self._axes[ranks] = "+".join(along)
        return self._axes[ranks]
