"""When each rank of a pipeline does what: a simulation of a schedule, for its picture and its bubble.

Every rank does one thing at a time. Of what is ready it prefers a backward, then a forward as long as it holds no more
microbatches than the schedule allows, then a weight gradient that was put off. Transfers take no time here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_4d.errors import PlanError, explain
from lightning_4d.planner.facts import SCHEDULES, Schedule

__all__ = ["Work", "bubble", "timeline"]

Kind = Literal["forward", "backward", "input_gradient", "weight_gradient"]


class Work(NamedTuple):
    """A piece of work, with the fields of `lightning_4d.visual.Cell`."""

    rank: int
    start: float
    end: float
    kind: Kind
    microbatch: int
    stage: int


def timeline(
    schedule: str, ranks: int, microbatches: int, chunks: int = 1, forward: float = 1.0, backward: float = 2.0
) -> list[Work]:
    """Return what each rank does when.

    Args:
        schedule: one of `facts.SCHEDULES` by name.
        ranks: pipeline ranks.
        microbatches: of a step.
        chunks: stages of each rank.
        forward: time of a stage's forward for one microbatch.
        backward: likewise of its backward, input and weight gradients together.

    Raises:
        PlanError: no such schedule.
    """
    known = next((each for each in SCHEDULES if each.name == schedule), None)
    if known is None:
        names = ", ".join(each.name for each in SCHEDULES)
        raise PlanError(explain(f"schedule {schedule!r}", f"schedules are {names}", "use '1f1b'"))
    return _Simulation(known, ranks, microbatches, known.chunks or max(2, chunks), forward, backward).run()


def bubble(work: list[Work]) -> float:
    """Return the share of ranks x time in which nothing is done."""
    ranks = 1 + max(each.rank for each in work)
    return 1 - sum(each.end - each.start for each in work) / (ranks * max(each.end for each in work))


@dataclass
class _Simulation:
    schedule: Schedule
    ranks: int
    microbatches: int
    chunks: int
    forward: float
    backward: float
    done: dict[tuple[Kind, int, int], float] = field(default_factory=dict)  # (kind, stage, microbatch) -> when
    counts: dict[tuple[Kind, int], int] = field(default_factory=dict)
    put_off: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # weight gradients of each rank
    held: dict[int, int] = field(default_factory=dict)  # (stage, microbatch) pairs that a rank holds
    work: list[Work] = field(default_factory=list)

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """V schedules turn round at the last rank; the others start anew."""
        lap, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.schedule.chunks == 2 and lap % 2 else place

    def run(self) -> list[Work]:
        free = [0.0] * self.ranks
        left = self.stages * self.microbatches * (3 if self.schedule.splits_backward else 2)
        while left:
            options = [option for rank in range(self.ranks) if (option := self.next_of(rank, free[rank]))]
            start, _, rank, kind, stage, microbatch = min(options)
            free[rank] = self.do(rank, start, kind, stage, microbatch)
            left -= 1
        return sorted(self.work)

    def next_of(self, rank: int, free: float) -> tuple[float, int, int, Kind, int, int] | None:
        """What the rank does next, and when: the earliest, of equally early ones the preferred."""
        backward = self.backward_kind
        options: list[tuple[float, int, int, Kind, int, int]] = []
        for stage, microbatch in self.candidates(rank, backward):
            ready = self.backward_ready(stage, microbatch)
            if ready is not None:
                options.append((max(free, ready), self.backward_turn, rank, backward, stage, microbatch))
        for turn, (stage, microbatch) in enumerate(self.candidates(rank, "forward")):
            ready = self.forward_ready(rank, stage, microbatch)
            if ready is not None:
                options.append((max(free, ready), 1 + turn, rank, "forward", stage, microbatch))
        if self.put_off.get(rank):
            stage, microbatch = self.put_off[rank][0]
            options.append((free, 1_000_000, rank, "weight_gradient", stage, microbatch))
        return min(options) if options else None

    @property
    def backward_kind(self) -> Kind:
        return "input_gradient" if self.schedule.splits_backward else "backward"

    @property
    def backward_turn(self) -> int:
        """One forward, one backward: what it may still hold goes first; where backwards are split, input gradients do."""
        return 0 if self.schedule.splits_backward else 999_999

    @property
    def is_v(self) -> bool:
        return self.schedule.chunks == 2

    def candidates(self, rank: int, kind: Kind) -> list[tuple[int, int]]:
        """Stages and microbatches that may come next: of V schedules one of each stage, else the next one of all."""
        stages = [stage for stage in range(self.stages) if self.rank_of(stage) == rank]
        first = [(stage, self.counts.get((kind, stage), 0)) for stage in stages]
        first = [(stage, microbatch) for stage, microbatch in first if microbatch < self.microbatches]
        if self.is_v:
            return sorted(first, reverse=kind == "forward")
        order = self.turn if kind == "forward" else self.turn_back
        return sorted(first, key=order)[:1]

    def turn(self, one: tuple[int, int]) -> tuple[int, int, int]:
        """In which order forwards are taken: microbatches in groups of `ranks`, stage by stage."""
        stage, microbatch = one
        return (0 if self.schedule.holds_all else microbatch // self.ranks, stage // self.ranks, microbatch)

    def turn_back(self, one: tuple[int, int]) -> tuple[int, int, int]:
        stage, microbatch = one
        return (0 if self.schedule.holds_all else microbatch // self.ranks, -(stage // self.ranks), microbatch)

    def forward_ready(self, rank: int, stage: int, microbatch: int) -> float | None:
        may_wait = not self.is_v or stage < self.ranks  # of a V, only its first leg starts anything new
        if may_wait and not self.schedule.holds_all and self.held.get(rank, 0) >= self.most_held(rank):
            return None
        return 0.0 if stage == 0 else self.done.get(("forward", stage - 1, microbatch))

    def most_held(self, rank: int) -> int:
        if self.is_v:
            return 2 * self.ranks
        if self.chunks == 1:
            return self.ranks - rank
        return (self.ranks - rank - 1) * 2 + (self.chunks - 1) * self.ranks + 1

    def backward_ready(self, stage: int, microbatch: int) -> float | None:
        own = self.done.get(("forward", stage, microbatch))
        after = own if stage == self.stages - 1 else self.done.get((self.backward_kind, stage + 1, microbatch))
        if own is None or after is None or (self.schedule.holds_all and not self.all_forwards_done(stage)):
            return None
        return max(own, after)

    def all_forwards_done(self, stage: int) -> bool:
        return self.counts.get(("forward", stage), 0) == self.microbatches

    def do(self, rank: int, start: float, kind: Kind, stage: int, microbatch: int) -> float:
        length = {"forward": self.forward, "backward": self.backward}.get(kind, self.backward / 2)
        self.done[kind, stage, microbatch] = start + length
        self.counts[kind, stage] = self.counts.get((kind, stage), 0) + 1
        self.work.append(Work(rank, start, start + length, kind, microbatch, stage))
        if kind == "forward":
            self.held[rank] = self.held.get(rank, 0) + 1
        else:
            self.finish(rank, kind, stage, microbatch)
        return start + length

    def finish(self, rank: int, kind: Kind, stage: int, microbatch: int) -> None:
        if kind == "input_gradient":
            self.put_off.setdefault(rank, []).append((stage, microbatch))
            return
        if kind == "weight_gradient":
            self.put_off[rank].remove((stage, microbatch))
        self.held[rank] -= 1
