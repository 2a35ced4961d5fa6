"""When each rank of a pipeline computes what: simulated from a schedule's own actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_4d.parallel.pipeline.schedule import Actions

KINDS = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


class Span(NamedTuple):
    """One computation of one rank.

    Attributes:
        rank: the pipeline rank.
        start: in the unit of the durations.
        end: likewise.
        kind: ``"forward"``, ``"backward"`` (both gradients), ``"input_gradient"`` or ``"weight_gradient"``.
        microbatch: its number.
        stage: its number.
    """

    rank: int
    start: float
    end: float
    kind: str
    microbatch: int
    stage: int


def simulate(actions: Actions, durations: Mapping[str, float]) -> list[Span]:
    """Return what each rank computes when, if each computation starts as soon as its inputs and its rank are there.

    Communication takes no time.

    Args:
        actions: by rank, see :func:`.schedule.action_list`.
        durations: of each kind of computation.

    Raises:
        RuntimeError: the actions wait for each other for ever.
    """
    waiting = {rank: _flat(listed) for rank, listed in actions.items()}
    last = max(action.stage_index for listed in waiting.values() for action in listed)
    done: dict[tuple[str, int, int], float] = {}  # (kind, stage, microbatch) → end
    free = dict.fromkeys(waiting, 0.0)
    spans: list[Span] = []
    while any(waiting.values()):
        progress = False
        for rank, listed in waiting.items():
            while listed:
                ready = _ready(listed[0], done, last)
                if ready is None:
                    break
                action, progress = listed.pop(0), True
                kind = KINDS[action.computation_type.value]
                start = max(free[rank], ready)
                free[rank] = end = start + durations[kind]
                done[_key(kind), action.stage_index, action.microbatch_index] = end
                spans.append(Span(rank, start, end, kind, action.microbatch_index, action.stage_index))
        if not progress:
            raise RuntimeError("the actions of a schedule wait for each other")
    return spans


def efficiency(spans: list[Span]) -> float:
    """Return which part of the ranks' time, from the first start to the last end, is computation."""
    length = max(span.end for span in spans) - min(span.start for span in spans)
    ranks = len({span.rank for span in spans})
    return sum(span.end - span.start for span in spans) / (length * ranks)


def _flat(actions: list[Any]) -> list[Any]:
    found = []
    for action in actions:
        if action is not None:
            found += _flat(list(action.sub_actions)) if action.sub_actions else [action]
    return [action for action in found if action.computation_type.value in KINDS]


def _key(kind: str) -> str:
    return "input" if kind in ("backward", "input_gradient") else kind


def _ready(action: Any, done: Mapping[tuple[str, int, int], float], last: int) -> float | None:
    """When the inputs of an action are there; None: some are not yet."""
    kind, stage, microbatch = KINDS[action.computation_type.value], action.stage_index, action.microbatch_index
    if kind == "forward":
        needed = [("forward", stage - 1, microbatch)] if stage > 0 else []
    elif kind == "weight_gradient":
        needed = [("input", stage, microbatch)]
    else:
        needed = [("forward", stage, microbatch)]
        needed += [("input", stage + 1, microbatch)] if stage < last else []
    if any(need not in done for need in needed):
        return None
    return max((done[need] for need in needed), default=0.0)
