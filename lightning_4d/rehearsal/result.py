"""What a rehearsal finds, as plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from lightning_4d.layout import ParallelLayout

__all__ = ["Collectives", "Rehearsal"]


@dataclass(frozen=True)
class Collectives:
    """Collectives of one kind along one axis, in one step of one rank.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``send``, ``recv``, ...
        axis: of the mesh; ``dp_shard+cp`` where a group lies along several.
        count: calls.
        bytes: of the whole tensors: what an all-gather returns, what a reduce-scatter takes, in all calls together.
        ranks: of the group.
    """

    kind: str
    axis: str
    count: int
    bytes: int
    ranks: int


@dataclass(frozen=True)
class Rehearsal:
    """One rank of a layout, set up.

    Attributes:
        layout: of the job, in text form.
        rank: of the job.
        coordinate: of the rank, by axis.
        blocks: names of the first and last block that it runs, for each of its stages.
        microbatches: of a step.
        parameters: elements of the rank's own shards.
        parameter_bytes: of these.
        gradient_bytes: of the reduced gradients.
        optimizer_bytes: of the states of the user's optimizers after a step.
        gathered_bytes: of parameters that are whole at once: those of all blocks with pipeline stages, else those
            outside the blocks and two blocks', if they are sharded.
        whole_gradient_bytes: of gradients that are whole until the last microbatch's backward is done.
        activation_bytes: the most that autograd keeps at once; with activation checkpointing, outside of what it keeps.
        peak_bytes: the most that exists at once in a step: parameters, optimizer states, and every tensor that the step
            makes; None where few microbatches tell of many.
        collectives: of a step that is not the first.
        seconds: what the rehearsal took.
    """

    layout: str
    rank: int
    coordinate: dict[str, int]
    blocks: list[tuple[str, str]]
    microbatches: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    whole_gradient_bytes: int
    activation_bytes: int
    peak_bytes: int | None
    collectives: list[Collectives]
    seconds: float

    @property
    def total_bytes(self) -> int:
        """All memory together; the parts are not all at their most at once."""
        held = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return held + self.gathered_bytes + self.whole_gradient_bytes + self.activation_bytes

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        return asdict(self) | {"total_bytes": self.total_bytes}


def collectives_of(
    calls: Counter[tuple[str, str]], sizes: Counter[tuple[str, str]], layout: ParallelLayout
) -> list[Collectives]:
    """Return what was counted, by axis."""
    found = []
    for (kind, axis), count in sorted(calls.items(), key=lambda item: (item[0][1], item[0][0])):
        ranks = 1
        for one in axis.split("+"):
            ranks *= layout.axis_sizes[one]
        found.append(Collectives(kind, axis, count, sizes[kind, axis], ranks))
    return found
