"""Stacked bars: memory by component against the device's capacity, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.visual.canvas import INK, PALETTE, checked_path, new_figure, save

__all__ = ["draw_memory", "draw_time"]

_MORE = ("#004166", "#8F6200", "#00634A", "#80436A", "#2E7FAF", "#8A3B00")  # darker, when there are many components


def draw_memory(
    names: Sequence[str], parts: Sequence[Mapping[str, float]], capacity: float, path: str | Path, title: str = ""
) -> None:
    """Draw a bar of memory for each plan, stacked by component, with a line at the device's capacity.

    Args:
        names: of the plans.
        parts: bytes by component, of each plan.
        capacity: bytes of a device.
        path: PNG or SVG.
        title: of the picture.

    Raises:
        UnsupportedError: no plan, another suffix than .png and .svg, or matplotlib is not installed.
    """
    scaled = [{name: size / 2**30 for name, size in each.items()} for each in parts]
    figure, axes = _stacked(names, scaled, path, "GiB on the fullest device")
    limit = capacity / 2**30
    axes.axvline(limit, color="#B00020", linewidth=1.5, linestyle="--")
    axes.set_xlim(0, max(limit, *(sum(each.values()) for each in scaled)) * 1.12)
    where = axes.get_xaxis_transform()
    axes.text(limit, 1.01, f"device: {limit:.0f} GiB", color="#B00020", ha="center", va="bottom", transform=where)
    axes.set_title(title or "Memory", color=INK, pad=18)
    save(figure, path)


def draw_time(names: Sequence[str], parts: Sequence[Mapping[str, float]], path: str | Path, title: str = "") -> None:
    """Draw a bar of a step's seconds for each plan, stacked by component.

    Args:
        names: of the plans.
        parts: seconds by component, of each plan.
        path: PNG or SVG.
        title: of the picture.

    Raises:
        UnsupportedError: as `draw_memory`.
    """
    figure, axes = _stacked(names, parts, path, "seconds of a step")
    axes.set_title(title or "Where the time of a step goes", color=INK)
    save(figure, path)


def _stacked(names: Sequence[str], parts: Sequence[Mapping[str, float]], path: str | Path, label: str) -> Any:
    checked_path(path)
    if not names or len(names) != len(parts):
        given = f"{len(names)} names and {len(parts)} plans"
        raise UnsupportedError(explain(given, "each bar has a name", "give as many names as plans, at least one"))
    figure = new_figure(10.5, 1.9 + 0.62 * len(names))
    axes = figure.subplots()
    totals = [sum(each.values()) for each in parts]
    components = [name for name in parts[0] if any(each[name] > 0.004 * max(totals) for each in parts)]
    colours = (*PALETTE, *_MORE)
    left = [0.0] * len(names)
    for index, component in enumerate(components):
        sizes = [each[component] for each in parts]
        colour = colours[index % len(colours)]
        axes.barh(range(len(names)), sizes, left=left, color=colour, label=component, height=0.68, edgecolor="white")
        left = [start + size for start, size in zip(left, sizes)]
    for row, total in enumerate(totals):
        axes.text(total, row, f" {total:.3g}", va="center", ha="left", color=INK, fontsize=9)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(totals) * 1.12)
    axes.set_xlabel(label)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=min(7, len(components)), frameon=False, fontsize=9)
    return figure, axes
