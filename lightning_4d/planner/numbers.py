"""The number type of the planner, and the few array functions that several files use.

Every formula of the planner takes floats or numpy arrays that broadcast against each other: one layout, a column of
layouts of one model, or a table of different models on different clusters, all by the same code.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["GIB", "Number", "ceil_div", "choose", "ratio"]

Number: TypeAlias = "float | NDArray[Any]"
"""A float, or an array of floats."""

GIB = 2**30


def ceil_div(value: Number, by: Number) -> Number:
    """Return how many pieces of size `by` cover `value`."""
    return np.ceil(np.asarray(value, float) / by)


def choose(index: Number, *options: Number) -> Number:
    """Return ``options[index]``, element by element: a lookup in a short table."""
    return np.choose(np.asarray(index, int), options)


def ratio(value: Number, by: Number) -> Number:
    """Return ``value / by``, and 0 where `by` is 0."""
    by = np.asarray(by, float)
    return np.asarray(value, float) / np.where(by == 0, 1.0, by) * (by != 0)
