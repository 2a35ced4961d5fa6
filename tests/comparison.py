"""What a training run leaves behind for comparison, and the comparison itself, which names the worst offenders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class Recording:
    """What one rank saw. All but `losses` and metrics that are not synchronised is equal on all ranks."""

    losses: list[float] = field(default_factory=list)
    """Loss of each training batch on this rank, not divided by accumulate_grad_batches."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Per optimizer step, full gradients by parameter name before clipping; a gradient that is None is left out."""
    clipped: list[dict[str, Tensor]] = field(default_factory=list)
    """The same after clipping, as the optimizer used them; without the steps a loss scaler skipped."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Full parameters after the last step."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers after the last step, also those outside the state_dict."""
    metrics: dict[str, float] = field(default_factory=dict)
    """trainer.callback_metrics at the end."""
    metrics_history: list[dict[str, float]] = field(default_factory=list)
    """trainer.callback_metrics after each training batch."""
    communication: list[dict[str, int]] = field(default_factory=list)
    """Number of collectives by name from one optimizer step to the next; only with count_communication=True."""


NUMBERS = ("losses", "gradients", "clipped", "parameters", "buffers", "metrics")
NEVER_EMPTY = ("losses", "gradients", "clipped", "parameters")  # comparing nothing with nothing would pass
NOISE = 16.0
WORST = 10  # offenders listed in an error


def merge(recordings: Sequence[Recording]) -> Recording:
    """One record for all data-parallel ranks: losses averaged, after checking that the rest is equal bit for bit.

    It compares with one process that trains on the union of the batches, if all batches have the same size.
    """
    first, *others = recordings
    for rank, other in enumerate(others, start=1):
        compare(other, first, rtol=0.0, what=("gradients", "clipped", "parameters"), label=f"rank {rank} vs. 0: ")
    losses = [sum(values) / len(recordings) for values in zip(*(r.losses for r in recordings), strict=True)]
    return replace(first, losses=losses)


def compare(
    actual: Recording | Sequence[Recording],
    expected: Recording | Sequence[Recording],
    *,
    rtol: float,
    what: Sequence[str] = NUMBERS,
    label: str = "",
    noise: float = NOISE,
) -> None:
    """Raise AssertionError with the worst offenders unless `actual` equals `expected`.

    The error of a tensor is the norm of the difference, and `rtol` is relative to the norm of the expected tensor. A
    gradient that is zero in exact arithmetic (a key projection's bias) holds rounding noise only, so `noise` epsilons
    times the norm of all tensors of the same record together are allowed on top: of its dtype, at most of float32, and
    never more than `rtol`.

    Args:
        actual: one record, or one for each rank.
        expected: likewise, as many.
        rtol: relative tolerance; 0.0 means bit for bit. A number that is a float32 exactly is taken for a float32
            metric and gets at least 1e-6.
        what: fields of Recording.
        label: put in front of every name.
        noise: see above.

    Raises:
        AssertionError: missing or extra names, other shapes, dtypes or numbers of steps, values too far apart, or
            nothing recorded to compare with.
    """
    if isinstance(actual, Recording) != isinstance(expected, Recording):
        raise TypeError("compare one Recording with one, or a list with a list of the same length")
    pairs = [(label, actual, expected)] if isinstance(actual, Recording) else _by_rank(actual, expected, label)
    known = {f.name for f in fields(Recording)}
    if not what or set(what) - known:
        raise ValueError(f"what={list(what)}: name at least one of {sorted(known)}")
    tolerance = _Tolerance(rtol, noise)
    found = [
        difference
        for prefix, a, e in pairs
        for name in what
        for difference in _field_differences(prefix, name, getattr(a, name), getattr(e, name), tolerance)
    ]
    if found:
        found.sort(key=lambda difference: -difference.excess)
        shown = [difference.text for difference in found[:WORST]]
        more = [f"... and {len(found) - WORST} more"] if len(found) > WORST else []
        raise AssertionError("\n".join([f"{len(found)} differences; allowed relative error {rtol:g}", *shown, *more]))


@dataclass(frozen=True)
class _Difference:
    excess: float  # error divided by what is allowed
    text: str


@dataclass(frozen=True)
class _Tolerance:
    rtol: float
    noise: float
    scale: float = 0.0  # norm of all tensors of the record

    def allowed(self, expected: Tensor) -> float:
        """The allowed norm of the difference."""
        size = float(expected.double().norm())
        if _is_float32_number(expected) and self.rtol:
            return max(self.rtol, 1e-6) * size
        epsilon = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        floor = min(self.noise * min(epsilon, torch.finfo(torch.float32).eps), self.rtol)
        return self.rtol * size + floor * self.scale


def _is_float32_number(value: Tensor) -> bool:
    return value.dtype == torch.float64 and value.dim() == 0 and bool(value.float().double() == value)


def _by_rank(
    actual: Sequence[Recording] | Recording, expected: Sequence[Recording] | Recording, label: str
) -> list[tuple[str, Recording, Recording]]:
    assert not isinstance(actual, Recording), "the caller has told records from lists"
    assert not isinstance(expected, Recording), "the caller has told records from lists"
    if not expected or len(actual) != len(expected):
        raise AssertionError(f"{len(actual)} ranks recorded, {len(expected)} expected")
    return [(f"{label}rank {rank} ", a, e) for rank, (a, e) in enumerate(zip(actual, expected, strict=True))]


def _field_differences(prefix: str, name: str, actual: Any, expected: Any, tolerance: _Tolerance) -> list[_Difference]:
    if name in NEVER_EMPTY and (not expected or (name in ("gradients", "clipped") and not all(expected))):
        return [_Difference(math.inf, f"{prefix}{name}: nothing was recorded to compare with")]
    return _differences(prefix + name, actual, expected, tolerance)


def _differences(name: str, actual: Any, expected: Any, tolerance: _Tolerance) -> list[_Difference]:
    """Compare lists by index, dicts by key, numbers and tensors by value."""
    if isinstance(expected, list):
        if len(actual) != len(expected):
            return [_Difference(math.inf, f"{name}: {len(actual)} entries, expected {len(expected)}")]
        pairs = enumerate(zip(actual, expected, strict=True))
        return [d for i, (a, e) in pairs for d in _differences(f"{name}[{i}]", a, e, tolerance)]
    if isinstance(expected, dict):
        return _dict_differences(name, actual, expected, tolerance)
    return _value_difference(name, *_as_tensors(actual, expected), tolerance)


def _dict_differences(
    name: str, actual: Mapping[str, Any], expected: Mapping[str, Any], tolerance: _Tolerance
) -> list[_Difference]:
    found = [_Difference(math.inf, f"{name}[{key!r}]: missing") for key in expected.keys() - actual.keys()]
    found += [_Difference(math.inf, f"{name}[{key!r}]: not expected") for key in actual.keys() - expected.keys()]
    norms = [float(v.double().norm()) for v in expected.values() if isinstance(v, Tensor) and v.is_floating_point()]
    tolerance = replace(tolerance, scale=math.hypot(*norms))
    for key in sorted(expected.keys() & actual.keys()):
        found += _differences(f"{name}[{key!r}]", actual[key], expected[key], tolerance)
    return found


def _as_tensors(actual: Tensor | float, expected: Tensor | float) -> tuple[Tensor, Tensor]:
    if isinstance(expected, Tensor):
        return torch.as_tensor(actual), expected
    return torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)


def _value_difference(name: str, actual: Tensor, expected: Tensor, tolerance: _Tolerance) -> list[_Difference]:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        given, wanted = ((tuple(t.shape), t.dtype) for t in (actual, expected))
        return [_Difference(math.inf, f"{name}: shape and dtype {given}, expected {wanted}")]
    error = float((actual.double() - expected.double()).norm())
    allowed = tolerance.allowed(expected)
    if error <= allowed:  # False for nan
        return []
    excess = error / allowed if allowed and not math.isnan(error) else math.inf
    return [_Difference(excess, f"{name}: {_describe(actual, expected, error)}")]


def _describe(actual: Tensor, expected: Tensor, error: float) -> str:
    if expected.numel() == 1:
        given, wanted = float(actual), float(expected)
        return f"{given:.12g}, expected {wanted:.12g}, relative error {_ratio(error, abs(wanted)):.3g}"
    given, wanted = float(actual.double().norm()), float(expected.double().norm())
    return f"relative error {_ratio(error, wanted):.3g}, norm {given:.8g}, expected {wanted:.8g}"


def _ratio(error: float, size: float) -> float:
    return error / size if size else math.inf
