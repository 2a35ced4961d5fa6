"""The exceptions of lightning_4d and the one form in which their messages are written.

Every message has three parts in this order: what was given, the rule it breaks, the nearest thing that works.
`explain` joins them, so that all errors of the package read alike; `user_line` says where. Standard library only.
"""

from __future__ import annotations

import sys
from types import FrameType

__all__ = [
    "CheckpointError",
    "LayoutError",
    "Lightning4DError",
    "PlanError",
    "UnsupportedError",
    "explain",
    "user_line",
]

_FOREIGN = ("torch.", "torch", "lightning.", "lightning_4d", "torchmetrics.", "importlib.", "contextlib")


class Lightning4DError(Exception):
    """Base of every error that lightning_4d raises on purpose."""


class LayoutError(Lightning4DError, ValueError):
    """A layout that does not exist: illegal sizes, a rank or an axis outside of it, a text that does not parse."""


class UnsupportedError(Lightning4DError, RuntimeError):
    """A refusal by name of something the module or the user does that could not give the numbers of plain DDP."""


class CheckpointError(Lightning4DError, RuntimeError):
    """A checkpoint that cannot be written, is incomplete, or does not fit what it is loaded into."""


class PlanError(Lightning4DError, ValueError):
    """A model or a cluster that the planner cannot read, or for which no layout works."""


def explain(given: str, rule: str, remedy: str) -> str:
    """Compose an error message: what was given -> the rule -> the nearest thing that works.

    Args:
        given: What the user gave, with names and values, e.g. ``"tensor_parallel_size=3 with world_size=8"``.
        rule: The rule that this breaks, as a clause without a final full stop.
        remedy: What to do instead, in the imperative, with a value that works.

    Returns:
        One sentence. Blanks and full stops around the parts are dropped, so the punctuation is always the same.

    >>> explain("num_workers=-1", "a number of workers is at least 0", "use num_workers=0")
    'num_workers=-1: a number of workers is at least 0; use num_workers=0.'
    """
    return f"{_clause(given)}: {_clause(rule)}; {_clause(remedy)}."


def _clause(text: str) -> str:
    return text.strip().rstrip(".").rstrip()


def user_line() -> tuple[str, FrameType | None]:
    """The nearest line outside of torch, Lightning and this package: "file:line", and its frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_FOREIGN):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}", frame
        frame = frame.f_back
    return "an unknown line", None
