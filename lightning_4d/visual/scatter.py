"""Predicted against published values, one point for each run: how good a model is, and where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.visual.canvas import INK, PALETTE, checked_path, new_figure, save

__all__ = ["draw_scatter"]

_MARKS = "osD^vP*Xhp<>"


def draw_scatter(
    published: Sequence[float],
    predicted: Sequence[float],
    groups: Sequence[str],
    path: str | Path,
    *,
    label: str = "MFU, %",
    title: str = "",
) -> None:
    """Draw predicted against published values, with the line where they are equal and a band of 10 %.

    Args:
        published: values on the horizontal axis.
        predicted: values on the vertical axis, as many.
        groups: the group of each point, which gives its colour and mark.
        path: PNG or SVG.
        label: what the values are.
        title: of the picture.

    Raises:
        UnsupportedError: no point or unequal lengths, another suffix, or matplotlib is not installed.
    """
    checked_path(path)
    if not published or not len(published) == len(predicted) == len(groups):
        given = f"{len(published)} published, {len(predicted)} predicted values and {len(groups)} groups"
        raise UnsupportedError(explain(given, "each point has both and a group", "give equally many, at least one"))
    figure = new_figure(8.2, 6.2)
    axes = figure.subplots()
    top = 1.08 * max(*published, *predicted)
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color="#EEEEEE", label="within 10 %")
    axes.plot([0, top], [0, top], color="#999999", linewidth=1)
    for index, group in enumerate(dict.fromkeys(groups)):
        rows = [i for i, each in enumerate(groups) if each == group]
        axes.scatter(
            [published[i] for i in rows],
            [predicted[i] for i in rows],
            s=26,
            marker=_MARKS[index % len(_MARKS)],
            color=PALETTE[index % len(PALETTE)],
            edgecolors="white",
            linewidths=0.4,
            label=f"{group} ({len(rows)})",
            zorder=3,
        )
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_xlabel(f"published {label}")
    axes.set_ylabel(f"predicted {label}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title or f"Predicted against published {label.split(',')[0]}", color=INK)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    save(figure, path)
