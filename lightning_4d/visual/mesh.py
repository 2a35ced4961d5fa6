"""Where the ranks of a layout sit: which share a node, and which of them communicate along which axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_4d.errors import LayoutError, explain
from lightning_4d.layout import ParallelLayout
from lightning_4d.visual.canvas import GREY, INK, PALETTE, checked_path, new_figure, save

__all__ = ["draw_mesh", "mesh_text"]

_MOST_DRAWN = 512  # ranks; of larger layouts the first nodes are shown
_MOST_LISTED = 64
_NAMES = {
    "tp": "tensor parallel (tp)",
    "cp": "context parallel (cp)",
    "dp_shard": "data parallel, shards (dp_shard)",
    "dp_replicate": "data parallel, replicas (dp_replicate)",
    "pp": "pipeline stages (pp)",
}


def mesh_text(layout: ParallelLayout, per_node: int) -> str:
    """Return a layout as text: the axes with the ranks that rank 0 meets along each, and a line for each rank.

    Args:
        layout: sizes of the axes.
        per_node: ranks of a node.

    Raises:
        LayoutError: the node's ranks are not a positive number.

    >>> print(mesh_text(ParallelLayout.parse("pp2.tp2"), 2))
    pp2.dp1x1.cp1.tp2: 4 ranks on 2 nodes of 2
      pp 2: ranks 0 2, across nodes
      tp 2: ranks 0 1, inside a node
    node 0: [pp0 tp0] [pp0 tp1]
    node 1: [pp1 tp0] [pp1 tp1]
    """
    nodes = _nodes(layout, per_node)
    lines = [f"{layout}: {layout.world_size} ranks on {nodes} nodes of {min(per_node, layout.world_size)}"]
    for axis, size in layout.axis_sizes.items():
        if size > 1:
            ranks = layout.group_ranks(axis, 0)
            shown = " ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")
            lines.append(f"  {axis} {size}: ranks {shown}, {_where(ranks, per_node)}")
    for node in range(min(nodes, max(1, _MOST_LISTED // per_node))):
        ranks = range(node * per_node, min((node + 1) * per_node, layout.world_size))
        lines.append(f"node {node}: " + " ".join(f"[{_place(layout, rank) or 'rank ' + str(rank)}]" for rank in ranks))
    if nodes > max(1, _MOST_LISTED // per_node):
        lines.append("...")
    return "\n".join(lines)


def draw_mesh(layout: ParallelLayout, per_node: int, path: str | Path, title: str = "") -> None:
    """Draw the nodes of a layout with their ranks, and for rank 0 whom it meets along each axis.

    A box is a node, a square a rank with its place on the axes; squares of one colour are of one pipeline stage. Of more
    than 512 ranks the first are drawn.

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
    nodes = min(_nodes(layout, per_node), max(1, _MOST_DRAWN // per_node))
    columns = 1 if nodes == 1 else 2 if nodes <= 16 else 4
    rows = -(-nodes // columns)
    width = per_node + 0.8
    figure = new_figure(min(24.0, 2 + 0.82 * columns * width), 2.2 + 1.25 * rows)
    axes = figure.subplots()
    for node in range(nodes):
        _draw_node(axes, layout, per_node, node, (node % columns) * width, (node // columns) * 1.7)
    axes.set_xlim(-0.4, columns * width)
    axes.set_ylim(rows * 1.7, -0.5)
    axes.set_aspect("equal")
    axes.axis("off")
    more = "" if nodes == _nodes(layout, per_node) else f" (the first {nodes} of {_nodes(layout, per_node)} nodes)"
    axes.set_title(title or f"{layout} on nodes of {per_node}{more}", color=INK)
    figure.legend(handles=_legend(layout, per_node), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save(figure, path)


def _draw_node(axes: Any, layout: ParallelLayout, per_node: int, node: int, left: float, top: float) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    ranks = range(node * per_node, min((node + 1) * per_node, layout.world_size))
    box = FancyBboxPatch(
        (left - 0.1, top - 0.12), len(ranks) + 0.1, 1.24, boxstyle="round,pad=0.05", facecolor=GREY, edgecolor="#AAAAAA"
    )
    axes.add_patch(box)
    axes.text(left, top - 0.2, f"node {node}", fontsize=8, va="bottom", color=INK)
    met = {rank: axis for axis in layout.axis_sizes for rank in layout.group_ranks(axis, 0) if rank}
    for place, rank in enumerate(ranks):
        colour = PALETTE[layout.coordinate(rank)["pp"] % len(PALETTE)]
        edge = INK if rank == 0 or rank in met else "white"
        square = Rectangle((left + place, top), 0.9, 1, facecolor=colour, alpha=0.75, edgecolor=edge, linewidth=1.6)
        axes.add_patch(square)
        label = _place(layout, rank).replace(" ", "\n")
        axes.text(left + place + 0.45, top + 0.5, f"{rank}\n{label}", fontsize=6.5, ha="center", va="center", color=INK)


def _legend(layout: ParallelLayout, per_node: int) -> list[Any]:
    from matplotlib.patches import Patch

    handles = []
    for axis, size in layout.axis_sizes.items():
        if size > 1:
            ranks = layout.group_ranks(axis, 0)
            shown = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
            text = f"{_NAMES[axis]} {size}: rank 0 meets {shown}; {_where(ranks, per_node)}"
            handles.append(Patch(facecolor="white", edgecolor=INK, label=text))
    return handles


def _place(layout: ParallelLayout, rank: int) -> str:
    short = {"dp_replicate": "r", "dp_shard": "s"}
    place = layout.coordinate(rank)
    return " ".join(f"{short.get(axis, axis)}{place[axis]}" for axis, size in layout.axis_sizes.items() if size > 1)


def _where(ranks: list[int], per_node: int) -> str:
    return "inside a node" if len({rank // per_node for rank in ranks}) == 1 else "across nodes"


def _nodes(layout: ParallelLayout, per_node: int) -> int:
    if per_node < 1:
        raise LayoutError(explain(f"per_node={per_node}", "a node has at least one rank", "use 8"))
    return -(-layout.world_size // per_node)
