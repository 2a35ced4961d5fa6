"""The number type of the planner, and the few array functions that several files use.

Every formula of the planner takes floats or numpy arrays that broadcast against each other: one layout, a column of
layouts of one model, or a table of different models on different clusters, all by the same code.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["GIB", "Number", "ceil_div", "choose", "count_text", "gib_text", "ratio"]

Number: TypeAlias = "float | NDArray[Any]"
"""A float, or an array of floats."""

GIB = 2**30


def gib_text(bytes_: float) -> str:
    """Write bytes in GiB, with as many digits as they deserve.

    >>> gib_text(75.3 * GIB), gib_text(0.42 * GIB)
    ('75', '0.42')
    """
    gib = bytes_ / GIB
    return f"{gib:.0f}" if gib >= 10 else f"{gib:.2g}"


def count_text(count: float) -> str:
    """Write a number of parameters as people say it.

    >>> count_text(8.03e9), count_text(870_656), count_text(405.85e9)
    ('8.03B', '871K', '406B')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


def ceil_div(value: Number, by: Number) -> Number:
    """Return how many pieces of size `by` cover `value`."""
    return np.ceil(np.asarray(value, float) / by)


def choose(index: Number, *options: Number) -> Number:
    """Return ``options[index]``, element by element: a lookup in a short table."""
    return np.choose(np.asarray(index, int), list(options))  # pyright: ignore[reportCallIssue, reportArgumentType]


def ratio(value: Number, by: Number) -> Number:
    """Return ``value / by``, and 0 where `by` is 0."""
    by = np.asarray(by, float)
    return np.asarray(value, float) / np.where(by == 0, 1.0, by) * (by != 0)
