"""A pipeline schedule as a Gantt chart: one row per rank, one box per piece of work, bubbles as what stays grey.

The data are plain `Cell`s, planned or measured, in any unit of time and any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_4d.errors import LayoutError, explain
from lightning_4d.visual.canvas import GREY, INK, checked_path, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Cell", "Kind", "draw_schedule", "efficiency", "schedule_text"]

Kind = Literal["forward", "backward", "input_gradient", "weight_gradient"]
"""What a rank does: "backward" is both gradients at once; zero-bubble schedules part them."""

_COLOURS: dict[str, str] = {
    "forward": "#4C8BC0",
    "backward": "#5FAE5F",
    "input_gradient": "#E3A23B",
    "weight_gradient": "#B77BB4",
}
_LETTERS: dict[str, str] = {"forward": "F", "backward": "B", "input_gradient": "I", "weight_gradient": "W"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One piece of work of one rank.

    Attributes:
        rank: pipeline rank, from 0.
        start: when it begins, in any unit; all cells of a chart use the same one.
        end: when it is done; not before `start`.
        kind: "forward", "backward" (both gradients), "input_gradient" or "weight_gradient".
        microbatch: which microbatch, from 0.
        stage: which stage of the model, from 0; a rank may hold several.

    Raises:
        LayoutError: an unknown kind, or an end before the start.
    """

    rank: int
    start: float
    end: float
    kind: Kind
    microbatch: int
    stage: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        if self.kind not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise LayoutError(explain(f"kind={self.kind!r}", f"a cell's kind is one of {kinds}", "use kind='forward'"))
        if not self.end >= self.start:
            given = f"start={self.start!r}, end={self.end!r}"
            raise LayoutError(explain(given, "a cell ends when it starts or later", f"use end={self.start!r} or more"))


def efficiency(cells: Iterable[Cell]) -> float:
    """Return the share of ranks x time in which work is done, in 0 .. 1: what is left of 1 is the bubble.

    Time runs from the first start to the last end. Ranks are those from 0 to the highest one that has a cell.

    >>> two_ranks = [Cell(0, 0, 1, "forward", 0), Cell(1, 1, 2, "forward", 0)]
    >>> efficiency(two_ranks)
    0.5
    """
    known = _known(cells)
    span = max(cell.end for cell in known) - min(cell.start for cell in known)
    ranks = max(cell.rank for cell in known) + 1
    return sum(cell.end - cell.start for cell in known) / (span * ranks) if span else 1.0


def draw_schedule(cells: Iterable[Cell], path: str | Path, title: str = "") -> None:
    """Draw a Gantt chart of a pipeline schedule into `path`, PNG or SVG by its suffix.

    One row per rank, colours by kind, paler for a rank's later stages, the microbatch's number in each box, bubbles
    grey, and the efficiency in the title.

    Args:
        cells: the work of all ranks, at least one cell; see `Cell`.
        path: the file to write; an existing one is replaced.
        title: stands before the efficiency.

    Raises:
        LayoutError: no cell.
        UnsupportedError: another suffix than .png and .svg, or matplotlib is not installed.
    """
    known = _known(cells)
    checked_path(path)
    ranks = max(cell.rank for cell in known) + 1
    per_rank = max(sum(cell.rank == rank for cell in known) for rank in range(ranks))
    figure = new_figure(width=min(24.0, max(7.0, 1.5 + 0.26 * per_rank)), height=1.3 + 0.42 * ranks)
    axes = figure.subplots()
    begin, end = min(cell.start for cell in known), max(cell.end for cell in known)
    for rank in range(ranks):
        axes.broken_barh([(0, end - begin)], (rank - 0.4, 0.8), facecolors=GREY)
    shades = _shades(known)
    for cell in known:
        _draw_cell(axes, cell, begin, shades[cell.rank, cell.stage], (end - begin) / 90)
    _finish(figure, axes, known, ranks, end - begin)
    head = f"{title}: " if title else ""
    axes.set_title(f"{head}{efficiency(known):.1%} efficiency ({1 - efficiency(known):.1%} bubble)", color=INK)
    save(figure, path)


def schedule_text(cells: Iterable[Cell], width: int = 100) -> str:
    """Return the chart as text: one line per rank, a letter per kind (F, B, I, W), ``.`` for a bubble.

    Args:
        cells: as for `draw_schedule`.
        width: characters for the whole time.

    >>> print(schedule_text([Cell(0, 0, 1, "forward", 0), Cell(1, 1, 3, "backward", 0)], width=6))
    rank 0  FF....
    rank 1  ..BBBB
    50.0% efficiency; F forward, B backward, . bubble
    """
    known = _known(cells)
    begin, end = min(cell.start for cell in known), max(cell.end for cell in known)
    scale = width / ((end - begin) or 1)
    rows = [["."] * width for _ in range(max(cell.rank for cell in known) + 1)]
    for cell in known:
        first, last = round((cell.start - begin) * scale), round((cell.end - begin) * scale)
        rows[cell.rank][first:last] = _LETTERS[cell.kind] * (last - first)
    digits = len(str(len(rows) - 1))
    lines = [f"rank {rank:{digits}}  {''.join(row)}" for rank, row in enumerate(rows)]
    kinds = {cell.kind for cell in known}
    legend = ", ".join(f"{letter} {kind.replace('_', ' ')}" for kind, letter in _LETTERS.items() if kind in kinds)
    return "\n".join([*lines, f"{efficiency(known):.1%} efficiency; {legend}, . bubble"])


def _known(cells: Iterable[Cell]) -> list[Cell]:
    known = sorted(cells, key=lambda cell: (cell.rank, cell.start))
    if not known:
        raise LayoutError(explain("no cell", "a schedule is drawn from its cells", "give at least one Cell"))
    return known


def _shades(cells: Sequence[Cell]) -> dict[tuple[int, int], float]:
    """How pale each (rank, stage) is drawn, from 0 for the first stage of a rank to 0.55 for its last."""
    shades: dict[tuple[int, int], float] = {}
    for rank in {cell.rank for cell in cells}:
        stages = sorted({cell.stage for cell in cells if cell.rank == rank})
        for index, stage in enumerate(stages):
            shades[rank, stage] = 0.55 * index / max(1, len(stages) - 1)
    return shades


def _draw_cell(axes: Any, cell: Cell, begin: float, pale: float, narrowest: float) -> None:
    start, length = cell.start - begin, cell.end - cell.start
    colour = _mixed(_COLOURS[cell.kind], pale)
    axes.broken_barh([(start, length)], (cell.rank - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.6)
    if length >= narrowest:
        axes.text(start + length / 2, cell.rank, str(cell.microbatch), ha="center", va="center", fontsize=7, color=INK)


def _mixed(colour: str, pale: float) -> tuple[float, ...]:
    """Mix a colour "#rrggbb" with white."""
    return tuple(1 - (1 - int(colour[i : i + 2], 16) / 255) * (1 - pale) for i in (1, 3, 5))


def _finish(figure: Figure, axes: Any, cells: Sequence[Cell], ranks: int, span: float) -> None:
    from matplotlib.patches import Patch

    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, span or 1)
    axes.set_xlabel("time")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    kinds = [kind for kind in _COLOURS if any(cell.kind == kind for cell in cells)]
    handles = [Patch(color=_COLOURS[kind], label=kind.replace("_", " ")) for kind in kinds]
    handles.append(Patch(color=GREY, label="bubble"))
    several = max(len({cell.stage for cell in cells if cell.rank == rank}) for rank in range(ranks)) > 1
    note = "number: microbatch; paler: later stage of the rank" if several else "number: microbatch"
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, title=note)
