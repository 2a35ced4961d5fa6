"""The probe: does the user's loss, and does each logged value, combine over microbatches as their operations say?

It runs the tail of the step on random hidden states: once on all rows, and on unequal parts of the same rows, several
times. What the rules make of the parts must be what the whole gives. So it finds a loss that mixes samples (a
contrastive one, or batch-normed in the head), and the rule of what cannot be followed: Python numbers, and operations
outside torch.

Random numbers that the user's code draws per row are those of the whole also in the parts; dropout is off.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_4d.parallel.pipeline.combine import combine, combine_numbers, fits
from lightning_4d.parallel.pipeline.finished import (
    LOSS,
    Finished,
    Mode,
    Plan,
    Rules,
    batch_environment,
    differs,
    leaves_of,
    refuse,
    refuse_mixed,
)
from lightning_4d.parallel.pipeline.scalars import Environment, Node, Number, operation_name
from lightning_4d.parallel.pipeline.seeds import Seeds
from lightning_4d.parallel.pipeline.tail_trace import RANDOM, TailTrace

__all__ = ["Outcome", "Run", "check_decomposes", "unequal_splits"]

TENSOR_RULES = ("equal", "rows", "sum", "max", "min")
NUMBER_RULES = ("equal", "sum", "rows", "max", "min")
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the user's step returned and logged: `loss` is None in evaluation."""

    loss: Tensor | None
    logged: Mapping[str, Tensor | float]


Run = Callable[[TailTrace, int, int, int], Outcome]
"""`run(trace, draw, start, stop)`: the user's step on rows `start:stop` of the batch, inside `trace`, which it enters
around the step and to which it names the batch's entries and the hidden states, as in the step itself. Random hidden
states take the place of what the last block returns: draw `draw` fixes them for all rows of the batch, whichever are
asked for. It runs in the grad mode of the step itself, and leaves buffers, metrics and logs as they were."""


def unequal_splits(rows: int) -> list[list[int]]:
    """Ways to cut `rows` rows, as sizes: a single row and the rest, two thirds and the rest, halves, three parts.

    >>> unequal_splits(12)
    [[1, 11], [8, 4], [6, 6], [2, 4, 6]]
    >>> unequal_splits(2)
    [[1, 1]]
    """
    sixth, third, half = rows // 6, rows // 3, rows // 2
    splits = [[1, rows - 1], [rows - third, third], [half, rows - half], [sixth, third, rows - sixth - third]]
    legal = [split for split in splits if min(split) > 0]
    return [split for i, split in enumerate(legal) if split not in legal[:i]]


def check_decomposes(run: Run, rows: int, plan: Plan, mode: Mode = "auto") -> None:
    """Prove that the step's loss and logged values combine over microbatches, and add the rules found to `plan`.

    Args:
        run: See `Run`. Called on all rows and on their parts, at most ten times; no rank but this one takes part.
        rows: Rows of the batch; at least 2. With 1 row there is one microbatch and nothing to prove.
        plan: Receives the rules.
        mode: `loss_reduction`; "mean" and "sum" are the user's word and are not checked.

    Raises:
        UnsupportedError: By name: the loss or the logged key that is not the same when computed from parts.
    """
    trials: list[_Trial] = []
    with _randomness_kept():
        for draw, sizes in enumerate(unequal_splits(rows)):
            trials.append(_trial(run, draw, rows, sizes))
    first = trials[0].whole
    # `squeeze()` makes a scalar of a single row: then only larger parts can be compared, here as in the step.
    trials = [trial for trial in trials if 1 not in trial.sizes or trial.runs_as(first)] or trials
    for trial in trials:
        trial.refuse_other_operations(first)
    rules = Rules(
        tuple(_number_rule(trials, i) for i in range(len(first.numbers))),
        _opaque_rules(trials),
        {key: _key_rule(trials, key) for key in first.numeric_keys},
    )
    for trial in trials:
        trial.refuse_wrong_values(rules, mode)
    if first.loss is not None and mode == "auto":
        Seeds(first, rules, [rows], 0, [()])  # refuses losses whose gradient does not add up
    plan.rules[first.signature] = rules


@dataclass(slots=True)
class _Trial:
    """One draw of hidden states: the step on all rows and on parts of them."""

    whole: Finished
    parts: list[Finished]
    sizes: list[int]

    def runs_as(self, first: Finished) -> bool:
        """Whether the whole and the parts run the operations of `first`."""
        return all(part.signature == first.signature for part in [self.whole, *self.parts])

    def refuse_other_operations(self, first: Finished) -> None:
        if not self.runs_as(first):
            raise refuse(
                LOSS + " or a logged value",
                f"training_step runs other operations on {sum(self.sizes)} rows than on a part of them",
                "make it run the same operations whatever the rows, or use num_microbatches=1",
            )

    def refuse_wrong_values(self, rules: Rules, mode: Mode) -> None:
        roots: dict[str, Node] = {LOSS: self.whole.loss} if self.whole.loss is not None and mode == "auto" else {}
        roots |= {f"the logged value '{k}'": v for k, v in self.whole.keys.items() if not isinstance(v, (int, float))}
        for what, root in roots.items():
            self._refuse_numbers(what, root, rules)
        batch = batch_environment(self.parts, self.sizes, rules)
        own = Environment([leaf.value for leaf in self.whole.leaves], self.whole.constants, self.whole.numbers)
        for what, root in roots.items():
            self._refuse_leaves(what, root, batch)
            least = [leaf.value.dtype for leaf in self.whole.leaves]
            if not _agree(batch.evaluate(root), own.evaluate(root), 1.0, least):
                raise refuse(what, "its value for the whole batch is not what its values in parts of the batch make")
        self._refuse_constants()
        self._refuse_conditions()

    def _refuse_conditions(self) -> None:
        outcomes = zip(*(part.conditions for part in [self.whole, *self.parts]), strict=True)
        for (_, expected), *others in outcomes:
            if any(outcome != expected for _, outcome in others):
                raise refuse(
                    LOSS + " or a logged value",
                    "an `if` on a value reduced over the batch comes out otherwise on a part of the batch",
                    "make training_step run the same operations whatever that value, or use num_microbatches=1",
                )

    def _refuse_numbers(self, what: str, root: Node, rules: Rules) -> None:
        for number in leaves_of(root, Number):
            if rules.numbers[number.index] == "none":
                raise refuse(
                    what,
                    f"it uses a Python number that is {self.whole.numbers[number.index]:g} for the batch and no sum or "
                    "mean of what it is in parts of the batch",
                    "compute with the tensor in place of the number (no .item(), float() or int()), or use "
                    "num_microbatches=1",
                )

    def _refuse_leaves(self, what: str, root: Node, batch: Environment) -> None:
        for leaf in leaves_of(root):
            whole = self.whole.leaves[leaf.index]
            if whole.kind == "mixed":
                raise refuse_mixed(what, whole.name)
            if whole.kind == "opaque" and batch.leaves[leaf.index] is None:
                caution = (
                    " (a mean could be over valid targets only, as there are integers in the batch)"
                    if self.whole.has_targets
                    else ""
                )
                raise refuse(what, f"no proven rule makes the batch's value of '{whole.name}' from its parts{caution}")
            value, scale = batch.leaves[leaf.index], _scale([part.leaves[leaf.index].value for part in self.parts])
            if value is not None and not _agree(value, whole.value, scale):
                raise refuse(
                    what,
                    f"it mixes samples: the operation '{whole.name}' gives {_shown(whole.value)} on the whole batch, "
                    f"but {_shown(value)} from its parts",
                )

    def _refuse_constants(self) -> None:
        for part in self.parts:
            for a, b in zip(self.whole.constants, part.constants, strict=True):
                if a is not b and bool(differs(a.detach(), b.detach())):
                    raise refuse(
                        LOSS + " or a logged value",
                        "it uses a tensor that depends on the rows but was not made by torch functions of the step, "
                        "so it cannot be followed",
                    )


def _trial(run: Run, draw: int, rows: int, sizes: list[int]) -> _Trial:
    drawn: list[Tensor] = []
    whole = _finished(run, _ProbeTrace(drawn, rows, 0, rows), draw, 0, rows)
    parts, start = [], 0
    for size in sizes:
        trace = _ProbeTrace(drawn, rows, start, start + size)
        parts.append(_finished(run, trace, draw, start, start + size))
        parts[-1].detach()
        start += size
    return _Trial(whole, parts, sizes)


def _finished(run: Run, trace: _ProbeTrace, draw: int, start: int, stop: int) -> Finished:
    torch.manual_seed(draw)
    random.seed(draw)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(draw)
    outcome = run(trace, draw, start, stop)
    return Finished.of(trace, outcome.loss, outcome.logged)


# Rules of what cannot be followed -----------------------------------------------------------------------------------


def _number_rule(trials: Sequence[_Trial], place: int) -> str:
    columns = [(t.whole.numbers[place], [p.numbers[place] for p in t.parts], t.sizes) for t in trials]
    return _first_fitting(columns, _candidates(NUMBER_RULES, trials[0].whole)) or "none"


def _key_rule(trials: Sequence[_Trial], key: str) -> str:
    columns = [(float(t.whole.keys[key]), [float(p.keys[key]) for p in t.parts], t.sizes) for t in trials]  # pyright: ignore[reportArgumentType]
    rule = _first_fitting(columns, _candidates(NUMBER_RULES, trials[0].whole))
    if rule is None:
        raise refuse(
            f"the logged value '{key}'",
            f"it is a Python number whose value for the batch ({columns[0][0]:g}) is neither the sum, the mean, the "
            f"maximum nor the minimum of those in parts of the batch ({', '.join(f'{v:g}' for v in columns[0][1])})",
            "log the tensor in place of the number, so that its operations can be followed; or use num_microbatches=1",
        )
    return rule


def _candidates(rules: Sequence[str], whole: Finished) -> list[str]:
    """Without the mean over samples where it may be one over valid targets, of which this batch may ignore none."""
    return [rule for rule in rules if rule != "rows" or not whole.has_targets]


def _first_fitting(columns: Sequence[tuple[float, list[float], list[int]]], candidates: Sequence[str]) -> str | None:
    for rule in candidates:
        if all(
            (rule != "equal" or all(fits(v, parts[0], 1e-6) for v in parts))
            and fits(combine_numbers(rule, parts, sizes), whole, 1e-4 if isinstance(whole, float) else 0.0)
            for whole, parts, sizes in columns
        ):
            return rule
    return None


def _opaque_rules(trials: Sequence[_Trial]) -> dict[int, str]:
    rules: dict[int, str] = {}
    for place, leaf in enumerate(trials[0].whole.leaves):
        if leaf.kind == "opaque":
            candidates = _candidates(("rows", "sum") if leaf.differentiable else TENSOR_RULES, trials[0].whole)
            fitting = [rule for rule in candidates if all(_opaque_fits(trial, place, rule) for trial in trials)]
            if fitting:
                rules[place] = fitting[0]
    return rules


def _opaque_fits(trial: _Trial, place: int, rule: str) -> bool:
    parts = [part.leaves[place] for part in trial.parts]
    if rule != "equal":
        return _agree(combine(parts, trial.sizes, rule), trial.whole.leaves[place].value, 0.0)
    return all(_agree(part.value, trial.whole.leaves[place].value, 0.0) for part in parts)


# Comparison ---------------------------------------------------------------------------------------------------------


def _agree(given: Any, expected: Any, scale: float, least: Sequence[torch.dtype] = ()) -> bool:
    """Whether they agree up to rounding, relative to their size or to `scale`, the size of what they were made of.

    `least`: dtypes of what they were made of.
    """
    a, b = torch.as_tensor(given).detach(), torch.as_tensor(expected).detach()
    dtypes = [dtype for dtype in (a.dtype, b.dtype, *least) if dtype.is_floating_point]
    tolerance = max((TOLERANCES.get(dtype, 1e-2) for dtype in dtypes), default=0.0)
    if fits(a, b, tolerance):
        return True
    a, b = a.double().cpu(), b.double().cpu()
    return bool(((a - b).abs() <= tolerance * scale).all())


def _scale(values: Sequence[Tensor]) -> float:
    return max(float(value.detach().double().abs().nan_to_num(0, 0, 0).max()) for value in values) if values else 0.0


def _shown(value: Any) -> str:
    return f"{float(torch.as_tensor(value).detach().double().sum()):.6g}"


# Randomness ---------------------------------------------------------------------------------------------------------

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)


class _ProbeTrace(TailTrace):
    """A trace in which dropout is off and random numbers drawn per row are those that the whole drew for that row."""

    def __init__(self, drawn: list[Tensor], rows: int, start: int, stop: int) -> None:
        super().__init__()
        self._drawn, self._rows, self._start, self._stop = drawn, rows, start, stop
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As `TailTrace`, with repeatable randomness."""
        if func in _DROPOUTS:
            return args[0] if args else (kwargs or {})["input"]
        result = super().__torch_function__(func, types, args, kwargs)
        if operation_name(func) in RANDOM - {"randperm"} and isinstance(result, Tensor):
            self._repeat(result)
        return result

    @torch.no_grad()
    def _repeat(self, result: Tensor) -> None:
        call, self._calls = self._calls, self._calls + 1
        if self._stop - self._start == self._rows:
            self._drawn.append(result.detach().clone())
        elif call < len(self._drawn):
            whole, size = self._drawn[call], self._stop - self._start
            if whole.shape == result.shape:
                result.copy_(whole)
            elif (
                result.ndim
                and whole.shape[1:] == result.shape[1:]
                and result.shape[0] * self._rows == whole.shape[0] * size
            ):
                per_row = whole.shape[0] // self._rows
                result.copy_(whole[self._start * per_row : self._stop * per_row])


@contextlib.contextmanager
def _randomness_kept() -> Iterator[None]:
    """The global random states are afterwards what they were."""
    python = random.getstate()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
