"""A search as text for a terminal: rich tables and bars. The pictures are in lightning_4d.visual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightning_4d.planner.families import rejections
from lightning_4d.planner.numbers import GIB
from lightning_4d.planner.recipe import recipe
from lightning_4d.planner.search import Candidate, Search

__all__ = ["bar", "print_report"]

_COLOURS = ("blue", "green", "yellow", "magenta", "cyan", "red", "bright_blue", "bright_green", "white")


def print_report(found: Search, console: Console, top: int = 8) -> None:
    """Print what a search found: the ranking, where memory and time go, why not the others, the recipe.

    Raises:
        PlanError: nothing fits; the message says what would.
    """
    best = found.best
    console.print(_question(found))
    console.print(_ranking(found, found.top(top)))
    console.print(_bars(found, best))
    why = Table(title="Why not", show_header=False, box=None, title_justify="left", padding=(0, 2, 0, 0))
    why.add_column(style="bold", ratio=1)
    why.add_column(ratio=3)
    for rejection in rejections(found):
        why.add_row(rejection.family, rejection.reason)
    console.print(why)
    advice = Table(title="\nThe usual recipe", show_header=False, box=None, title_justify="left", padding=(0, 2, 0, 0))
    advice.add_column(ratio=1)
    advice.add_column(ratio=3)
    for stage in recipe(found):
        advice.add_row(Text(stage.advice, "bold" if stage.agrees else "bold yellow"), stage.finding)
    console.print(advice)


def _question(found: Search) -> RenderableType:
    model, cluster = found.model, found.cluster
    parameters = float(np.asarray(model.parameters)) / 1e9
    lines = [
        f"{model.name}: {parameters:.3g}B parameters, {int(np.asarray(model.layers))} blocks, sequences of "
        f"{int(np.asarray(model.seq_len))}",
        f"{cluster.devices} x {cluster.device.name} ({cluster.nodes} nodes of {cluster.devices_per_node}, "
        f"{cluster.device.link_gbs:.0f} GB/s inside, {cluster.network_gbs:.0f} GB/s between)",
        f"{found.batch or 'any number of'} samples in a step, {found.precision}; {len(found.space)} candidates, "
        f"{len(found.order)} fit",
    ]
    return Panel("\n".join(lines), title="plan", title_align="left", expand=False)


def _ranking(found: Search, candidates: Sequence[Candidate]) -> Table:
    table = Table(title="Best layouts", title_justify="left")
    for name in ("layout", "micro-batch", "schedule", "recompute", "step", "MFU", "tokens/s/device", "memory"):
        table.add_column(name, justify="left" if name in ("layout", "schedule", "recompute") else "right")
    for index, each in enumerate(candidates):
        schedule = f"{each.schedule} x{each.virtual}" if each.virtual > 1 else each.schedule or "-"
        tokens = each.samples_per_second * float(np.asarray(found.model.seq_len)) / found.cluster.devices
        table.add_row(
            str(each.layout),
            f"{each.micro_batch} x {each.microbatches}",
            schedule,
            each.policy,
            f"{each.seconds:.3g} s",
            f"{each.mfu:.1%}",
            f"{tokens:,.0f}",
            f"{each.bytes / GIB:.0f}/{each.capacity / GIB:.0f} GiB",
            style="bold green" if index == 0 else "",
        )
    return table


def _bars(found: Search, best: Candidate) -> RenderableType:
    memory = {name: size / GIB for name, size in best.memory.items()}
    memory["free"] = max(0.0, best.capacity / GIB - sum(memory.values()))
    return Group(
        Text(f"\nMemory of {best.fullest}, GiB", "bold"),
        bar(memory, unit="GiB"),
        Text("Where the step goes, seconds", "bold"),
        bar(best.parts, unit="s"),
        Text(""),
    )


def bar(parts: Mapping[str, float], unit: str, width: int = 90) -> Text:
    """Return a stacked bar with its legend; parts below half a percent are left out."""
    total = sum(parts.values()) or 1.0
    shown = {name: value for name, value in parts.items() if value / total >= 0.005}
    line, legend = Text(), Text()
    for index, (name, value) in enumerate(shown.items()):
        style = "bright_black" if name == "free" else _COLOURS[index % len(_COLOURS)]
        line.append(("░" if name == "free" else "█") * max(1, round(width * value / total)), style)
        legend.append("■ ", style).append(f"{name} {value:.3g} {unit} ({value / total:.0%})  ")
    return line.append("\n").append_text(legend)
