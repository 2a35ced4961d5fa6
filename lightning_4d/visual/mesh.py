"""Where the ranks of a layout sit: which share a node, which communicate along which axis, and over which links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_4d.errors import LayoutError, explain
from lightning_4d.layout import ParallelLayout
from lightning_4d.visual.canvas import GREY, INK, PALETTE, checked_path, new_figure, save

__all__ = ["draw_mesh", "mesh_text"]

_MOST_DRAWN = 128  # ranks drawn one by one; of larger layouts the nodes are, and the ranks of the first
_MOST_NODES = 4096  # drawn; of still larger layouts the first
_MOST_LISTED = 64
_WIDE = 8  # ranks side by side in a node
_GAP = 0.8  # between nodes, in squares
_HEAD = 0.55  # for a node's name
# The frame of a rank that rank 0 meets along an axis; told apart from the colours of stages by being dark.
_EDGES = {"tp": "#B00020", "cp": "#00634A", "dp_shard": "#5B2A86", "dp_replicate": "#8A3B00", "pp": "#003A6B"}
_NAMES = {
    "tp": "tensor parallel (tp)",
    "cp": "context parallel (cp)",
    "dp_shard": "data parallel, shards (dp_shard)",
    "dp_replicate": "data parallel, replicas (dp_replicate)",
    "pp": "pipeline stages (pp)",
}
_SHORT = {"dp_replicate": "r", "dp_shard": "s"}


def mesh_text(layout: ParallelLayout, per_node: int) -> str:
    """Return a layout as text: the axes with the ranks that rank 0 meets along each, and a line for each node.

    Args:
        layout: sizes of the axes.
        per_node: ranks of a node.

    Raises:
        LayoutError: the node's ranks are not a positive number.

    >>> print(mesh_text(ParallelLayout.parse("pp2.tp2"), 2))
    pp2.dp1x1.cp1.tp2: 4 ranks on 2 nodes of 2
      pp 2: rank 0 meets 2; all 2 groups cross nodes
      tp 2: rank 0 meets 1; inside nodes
    node 0: 0 [pp0 tp0]  1 [pp0 tp1]
    node 1: 2 [pp1 tp0]  3 [pp1 tp1]
    """
    nodes = _nodes(layout, per_node)
    lines = [f"{layout}: {layout.world_size:,} ranks on {nodes:,} nodes of {min(per_node, layout.world_size)}"]
    lines += [f"  {axis} {size}: {_meets(layout, axis, per_node)}" for axis, size in _axes(layout)]
    listed = min(nodes, max(1, _MOST_LISTED // per_node))
    for node in range(listed):
        ranks = list(_ranks(layout, per_node, node))
        shown = "  ".join(f"{rank} [{' '.join(_place(layout, rank))}]" for rank in ranks[:_MOST_LISTED])
        lines.append(f"node {node}: {shown}" + ("  ..." if len(ranks) > _MOST_LISTED else ""))
    if nodes > listed:
        lines.append(f"... and {nodes - listed:,} nodes more")
    return "\n".join(lines)


def draw_mesh(layout: ParallelLayout, per_node: int, path: str | Path, title: str = "") -> None:
    """Draw the nodes of a layout with their ranks, and for rank 0 whom it meets along each axis.

    A grey box is a node, a square a rank with its place on the axes; squares of one colour are of one pipeline stage.
    Frames show whom rank 0 meets along which axis. Of more than 128 ranks those of the first node are drawn, and a
    small square for each node.

    Args:
        layout: sizes of the axes.
        per_node: ranks of a node.
        path: PNG or SVG.
        title: of the picture; by default the layout.

    Raises:
        LayoutError: the node's ranks are not a positive number.
        UnsupportedError: another suffix than .png and .svg, or matplotlib is not installed.
    """
    checked_path(path)
    nodes = _nodes(layout, per_node)
    whole = layout.world_size <= _MOST_DRAWN
    detail = _Detail.of(layout, per_node, nodes if whole else 1)
    overview = None if whole else _Overview.of(layout, per_node, nodes)
    parts = [part for part in (detail, overview) if part is not None]
    width = max(8.0, *(part.width for part in parts))
    figure = new_figure(width, sum(part.height for part in parts) + 0.9 + 0.24 * len(_axes(layout)))
    axes = figure.subplots(len(parts), squeeze=False, height_ratios=[part.height for part in parts])
    for part, (on,) in zip(parts, axes, strict=True):
        part.draw(on)
    heading = title or f"{layout}: {layout.world_size:,} ranks on {nodes:,} nodes of {per_node}"
    figure.suptitle(heading, x=0.02, ha="left", color=INK)
    if handles := _legend(layout, per_node):
        figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=9)
    save(figure, path)


@dataclass(frozen=True)
class _Detail:
    """Nodes with their ranks: `columns` nodes side by side, `wide` ranks side by side in each."""

    layout: ParallelLayout
    per_node: int
    nodes: int
    columns: int
    wide: int
    scale: float = 0.66  # inches of a square

    @classmethod
    def of(cls, layout: ParallelLayout, per_node: int, nodes: int) -> _Detail:
        """Choose how many nodes stand side by side, for a picture half again as wide as high."""
        held = min(per_node, layout.world_size, _MOST_DRAWN)
        wide = min(held, _WIDE if held <= 4 * _WIDE else 2 * _WIDE)
        options = [cls(layout, held, nodes, columns, wide) for columns in range(1, nodes + 1)]
        return min(options, key=lambda one: (abs(one.width / one.height - 1.5), one.columns))

    @property
    def tall(self) -> int:
        """Rows of ranks in a node."""
        return -(-min(self.per_node, self.layout.world_size) // self.wide)

    @property
    def step(self) -> tuple[float, float]:
        """From node to node, in squares."""
        return self.wide + _GAP, self.tall + _GAP + _HEAD

    @property
    def width(self) -> float:
        """Inches."""
        return self.scale * (self.columns * self.step[0] + 0.4)

    @property
    def height(self) -> float:
        """Inches."""
        return self.scale * (-(-self.nodes // self.columns) * self.step[1] + 0.2)

    def draw(self, axes: Any) -> None:
        """Draw onto empty axes."""
        met = _met_by_rank_0(self.layout)
        for node in range(self.nodes):
            row, column = divmod(node, self.columns)
            self._draw_node(axes, node, column * self.step[0], row * self.step[1], met)
        rows = -(-self.nodes // self.columns)
        _frame(axes, self.columns * self.step[0] - _GAP, rows * self.step[1] - _GAP)

    def _draw_node(self, axes: Any, node: int, left: float, top: float, met: dict[int, str]) -> None:
        from matplotlib.patches import FancyBboxPatch, Rectangle

        ranks = _ranks(self.layout, self.per_node, node)
        size = (self.wide + 0.06, self.tall + _HEAD)
        style: dict[str, Any] = {"boxstyle": "round,pad=0.12", "facecolor": GREY, "edgecolor": "#AAAAAA"}
        axes.add_patch(FancyBboxPatch((left - 0.03, top), *size, **style))
        axes.text(left + 0.05, top + 0.5 * _HEAD, f"node {node}", fontsize=8.5, va="center", color=INK)
        for place, rank in enumerate(ranks):
            x, y = left + place % self.wide, top + _HEAD + place // self.wide
            colour = _stage_colour(self.layout, rank)
            edge = INK if rank == 0 else _EDGES[met[rank]] if rank in met else "white"
            width = 2.6 if edge != "white" else 0.8
            square = Rectangle((x + 0.06, y + 0.05), 0.88, 0.88, facecolor=colour, edgecolor=edge, linewidth=width)
            axes.add_patch(square)
            lines = _pairs(_place(self.layout, rank))
            middle = y + 0.49 - 0.1 * len(lines)
            axes.text(x + 0.5, middle, str(rank), fontsize=8.5, weight="bold", ha="center", va="center", color=INK)
            for line, text in enumerate(lines):
                axes.text(x + 0.5, middle + 0.24 + 0.18 * line, text, fontsize=6, ha="center", va="center", color=INK)


@dataclass(frozen=True)
class _Overview:
    """A small square for each node, in the colour of its first rank's stage."""

    layout: ParallelLayout
    per_node: int
    nodes: int
    columns: int

    @classmethod
    def of(cls, layout: ParallelLayout, per_node: int, nodes: int) -> _Overview:
        """Put the nodes of a stage into rows of their own where that gives a picture of a sensible shape."""
        shown = min(nodes, _MOST_NODES)
        of_a_stage = max(1, layout.stride("pp") // per_node)
        fits = [columns for columns in range(1, of_a_stage + 1) if of_a_stage % columns == 0 and columns <= 128]
        wanted = max(8.0, (2.2 * shown) ** 0.5)
        return cls(layout, per_node, shown, min(fits, key=lambda columns: abs(columns - wanted)))

    @property
    def scale(self) -> float:
        """Inches of a square."""
        return min(0.3, 14.0 / (self.columns + 4))

    @property
    def width(self) -> float:
        """Inches."""
        return self.scale * (self.columns + 6)

    @property
    def height(self) -> float:
        """Inches."""
        return self.scale * (-(-self.nodes // self.columns) + 3) + 0.3

    def draw(self, axes: Any) -> None:
        """Draw onto empty axes."""
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import Rectangle

        squares = [Rectangle((node % self.columns, node // self.columns), 0.9, 0.9) for node in range(self.nodes)]
        colours = [_stage_colour(self.layout, node * self.per_node) for node in range(self.nodes)]
        axes.add_collection(PatchCollection(squares, facecolors=colours, edgecolors="none"))
        marks = {rank // self.per_node: _EDGES[axis] for rank, axis in _met_by_rank_0(self.layout).items()}
        marks[0] = INK
        framed = [node for node in marks if node < self.nodes]
        outlines = [Rectangle((node % self.columns + 0.02, node // self.columns + 0.02), 0.86, 0.86) for node in framed]
        edges = [marks[node] for node in framed]
        axes.add_collection(PatchCollection(outlines, facecolors="none", edgecolors=edges, linewidths=1.3))
        rows = -(-self.nodes // self.columns)
        for row in self._named_rows(rows):
            axes.text(-0.4, row + 0.45, f"{row * self.columns}", fontsize=7, ha="right", va="center", color=INK)
        more = "" if self.nodes == _nodes(self.layout, self.per_node) else f" (the first {self.nodes:,})"
        axes.text(0, -0.7, f"all nodes, by number{more}; colour: pipeline stage", fontsize=9, va="bottom", color=INK)
        _frame(axes, self.columns, rows, left=-3.0, top=-2.6)

    def _named_rows(self, rows: int) -> Iterable[int]:
        """Rows that get their first node's number: not so many that numbers touch."""
        return range(0, rows, max(1, round(0.17 / self.scale)))


def _frame(axes: Any, width: float, height: float, *, left: float = 0.0, top: float = 0.0) -> None:
    axes.set_xlim(left - 0.3, width + 0.3)
    axes.set_ylim(height + 0.2, top - 0.3)
    axes.set_aspect("equal", anchor="W")
    axes.axis("off")


def _legend(layout: ParallelLayout, per_node: int) -> list[Any]:
    from matplotlib.patches import Patch

    return [
        Patch(
            facecolor="white",
            edgecolor=_EDGES[axis],
            linewidth=2.4,
            label=f"{_NAMES[axis]} {size}: {_meets(layout, axis, per_node)}",
        )
        for axis, size in _axes(layout)
    ]


def _meets(layout: ParallelLayout, axis: str, per_node: int) -> str:
    """Whom rank 0 meets along an axis, and which groups along it cross nodes."""
    others = layout.group_ranks(axis, 0)[1:]
    shown = ", ".join(map(str, others[:7])) + (f", ... {others[-1]}" if len(others) > 7 else "")
    link = layout.axis_link(axis, per_node)
    if not link.crosses:
        return f"rank 0 meets {shown}; inside nodes"
    if link.crossing == link.groups:
        return f"rank 0 meets {shown}; all {link.groups:,} groups cross nodes"
    return f"rank 0 meets {shown}; {link.crossing:,} of {link.groups:,} groups cross nodes"


def _axes(layout: ParallelLayout) -> list[tuple[str, int]]:
    return [(axis, size) for axis, size in layout.axis_sizes.items() if size > 1]


def _met_by_rank_0(layout: ParallelLayout) -> dict[int, str]:
    return {rank: axis for axis, _ in _axes(layout) for rank in layout.group_ranks(axis, 0) if rank}


def _ranks(layout: ParallelLayout, per_node: int, node: int) -> range:
    return range(node * per_node, min((node + 1) * per_node, layout.world_size))


def _stage_colour(layout: ParallelLayout, rank: int) -> tuple[float, ...]:
    """The stage's colour, pale enough to be written on."""
    colour = PALETTE[rank // layout.stride("pp") % len(PALETTE)]
    return tuple(1 - 0.62 * (1 - int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))


def _place(layout: ParallelLayout, rank: int) -> list[str]:
    place = layout.coordinate(rank)
    return [f"{_SHORT.get(axis, axis)}{place[axis]}" for axis, _ in _axes(layout)]


def _pairs(words: Sequence[str]) -> list[str]:
    return [" ".join(words[i : i + 2]) for i in range(0, len(words), 2)]


def _nodes(layout: ParallelLayout, per_node: int) -> int:
    if per_node < 1:
        raise LayoutError(explain(f"per_node={per_node}", "a node has at least one rank", "use 8"))
    return -(-layout.world_size // per_node)
