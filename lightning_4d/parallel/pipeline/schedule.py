"""The pipeline schedules: names, which rank holds which stage, and the numbers of microbatches that each allows.

The schedules themselves are those of ``torch.distributed.pipelining``; nothing here decides an order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_4d import _torch_private as private
from lightning_4d.errors import UnsupportedError, explain

Placement = Literal["single", "loop", "v"]


@dataclass(frozen=True)
class ScheduleKind:
    """One of torch's schedules.

    Attributes:
        name: as in ``pipeline_schedule=``.
        torch_name: the class in ``torch.distributed.pipelining``.
        placement: ``"single"``: one stage on each rank; ``"loop"``: stage s on rank s % ranks; ``"v"``: two stages on
            each rank, s and 2·ranks - 1 - s.
        splits_backward: whether gradients of inputs and of weights are computed at different times.
    """

    name: str
    torch_name: str
    placement: Placement
    splits_backward: bool = False

    @property
    def default_stages_per_rank(self) -> int:
        """Stages on each rank, where the split is automatic."""
        return 1 if self.placement == "single" else 2

    def allows_stages_per_rank(self, stages: int) -> bool:
        """Whether a rank may hold so many stages."""
        return {"single": stages == 1, "loop": stages >= 2, "v": stages == 2}[self.placement]

    def allows_microbatches(self, microbatches: int, ranks: int) -> bool:
        """Whether a step may consist of so many microbatches."""
        if microbatches < 1:
            return False
        if self.name == "1f1b":
            return microbatches >= ranks
        if self.name in ("interleaved_1f1b", "interleaved_zero_bubble"):
            # torch: the number of rounds, max(1, microbatches // ranks), must divide the microbatches
            return microbatches % max(1, microbatches // ranks) == 0
        if self.name == "dualpipev":
            return microbatches >= 2 * ranks
        return True


_KINDS = {
    kind.name: kind
    for kind in (
        ScheduleKind("gpipe", "GPipe", "single"),
        ScheduleKind("1f1b", "1F1B", "single"),
        ScheduleKind("interleaved_1f1b", "Interleaved1F1B", "loop"),
        ScheduleKind("looped_bfs", "LoopedBFS", "loop"),
        ScheduleKind("interleaved_zero_bubble", "InterleavedZeroBubble", "loop", splits_backward=True),
        ScheduleKind("zbv", "ZBVZeroBubble", "v", splits_backward=True),
        ScheduleKind("dualpipev", "DualPipeV", "v", splits_backward=True),
    )
}
_ANY_COUNT: dict[Placement, str] = {"single": "gpipe", "loop": "looped_bfs", "v": "zbv"}


def schedule_names() -> list[str]:
    """Return the names that ``pipeline_schedule=`` takes, torch's own spellings left out."""
    return list(_KINDS)


def find_schedule(name: str) -> ScheduleKind:
    """Return the schedule called ``name``, in our spelling or torch's, in any case.

    Raises:
        UnsupportedError: there is none.
    """
    wanted = str(name).lower().replace("_", "").replace("schedule", "")
    for kind in _KINDS.values():
        if wanted in (kind.name.replace("_", ""), kind.torch_name.lower()):
            return kind
    raise UnsupportedError(
        explain(f"pipeline_schedule={name!r}", f"the schedules are {', '.join(_KINDS)}", "use '1f1b'")
    )


def stage_ranks(kind: ScheduleKind, ranks: int, stages: int) -> list[int]:
    """Return the pipeline rank of each stage, by stage."""
    if kind.placement == "v":
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(stages)]


def for_microbatches(kind: ScheduleKind, microbatches: int, ranks: int) -> ScheduleKind:
    """Return ``kind``, or for a small last batch the schedule of the same placement that takes any number."""
    return kind if kind.allows_microbatches(microbatches, ranks) else _KINDS[_ANY_COUNT[kind.placement]]


def legal_microbatches(kind: ScheduleKind, ranks: int, most: int) -> list[int]:
    """Return the numbers of microbatches up to ``most`` that the schedule takes."""
    return [count for count in range(1, most + 1) if kind.allows_microbatches(count, ranks)]


def check_microbatches(kind: ScheduleKind, microbatches: int, ranks: int) -> None:
    """Refuse a number of microbatches that the schedule does not take.

    Raises:
        UnsupportedError: names the legal numbers nearby.
    """
    if kind.allows_microbatches(microbatches, ranks):
        return
    legal = legal_microbatches(kind, ranks, max(4 * ranks, 2 * microbatches))
    nearest = min(legal, key=lambda count: (abs(count - microbatches), count))
    raise UnsupportedError(
        explain(
            f"num_microbatches={microbatches} with pipeline_schedule={kind.name!r} on {ranks} pipeline ranks",
            f"this schedule takes {', '.join(map(str, legal[:8]))}, ...",
            f"use num_microbatches={nearest}, or 'auto'",
        )
    )


def choose_microbatches(kind: ScheduleKind, rows: int, ranks: int) -> int:
    """Choose how many microbatches a batch of ``rows`` samples is cut into.

    As many as four for each rank, which keeps a rank idle for less than a fifth of the step under the simplest
    schedules; a divisor of ``rows`` where there is one of at least half as many, so that all are equal.
    """
    most = min(rows, 4 * ranks)
    legal = legal_microbatches(kind, ranks, most)
    if not legal:
        return most  # a small last batch: `for_microbatches` finds a schedule
    even = [count for count in legal if rows % count == 0 and 2 * count >= legal[-1]]
    return (even or legal)[-1]


def build_schedule(kind: ScheduleKind, stages: Sequence[Any], microbatches: int) -> Any:
    """Return torch's schedule over this rank's stages, whose ``_step_microbatches`` runs one step.

    Args:
        kind: the schedule.
        stages: this rank's, in the order of their numbers.
        microbatches: of one step.
    """
    cls = private.pipeline_schedule_class(kind.torch_name)
    first: Any = stages[0] if kind.placement == "single" else list(stages)
    return cls(first, n_microbatches=microbatches, loss_fn=_output_is_loss, scale_grads=False)


def _output_is_loss(output: Any, _target: Any) -> Any:
    return output


Actions = dict[int, list[Any]]


def action_list(kind: ScheduleKind, ranks: int, stages: int, microbatches: int) -> Actions:
    """Return what each rank computes, in order, as torch's schedule says: rank → actions; None is a pause.

    No process group is needed; nothing runs.
    """
    return private.pipeline_actions(
        kind.torch_name,
        ranks,
        stages,
        microbatches,
        _rank_stages(kind, ranks, stages),
        single=kind.placement == "single",
    )


def in_flight(actions: Sequence[Any]) -> int:
    """Return how many microbatches of one rank's stages hold activations at once, at most, by its actions."""
    now = most = 0
    for action in _flat(actions):
        kind = action.computation_type.value
        if kind == "F":
            now += 1
            most = max(most, now)
        elif kind in ("B", "I"):
            now -= 1
    return max(most, 1)


def _flat(actions: Sequence[Any]) -> Iterator[Any]:
    for action in actions:
        if action is not None:
            yield from _flat(action.sub_actions) if action.sub_actions else (action,)


def _rank_stages(kind: ScheduleKind, ranks: int, stages: int) -> Callable[[int], list[int]]:
    placed = stage_ranks(kind, ranks, stages)
    return lambda rank: [stage for stage, owner in enumerate(placed) if owner == rank]
