"""Module hooks that stay behind when the module is copied: a copy is another module, which nobody divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A forward hook or pre-hook; a copy of the module gets one that does nothing.

    Args:
        function: the hook.
        before: arguments that it gets in front of the hook's own, the module among these left out.
    """

    def __init__(self, function: Callable[..., Any], *before: Any) -> None:
        self._function = function
        self._before = before

    def __call__(self, module: Any, *arguments: Any) -> Any:
        """Run the hook."""
        return self._function(*self._before, *arguments)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def nothing() -> None:
    """Stand for something of the module that a copy does without."""


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None: ...
