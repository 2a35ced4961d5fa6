"""A rehearsal as tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lightning_4d.layout import AXES
from lightning_4d.rehearsal.result import Collectives, Rehearsal

__all__ = ["print_rehearsal", "size_text"]


def print_rehearsal(found: Rehearsal, console: Console) -> None:
    """Print what a rank holds and what it communicates in a step, by axis."""
    place = ", ".join(f"{axis} {index}" for axis, index in found.coordinate.items())
    blocks = "; ".join(f"{first} to {last}" for first, last in found.blocks) or "none"
    console.print(f"rank {found.rank} of {found.layout} ({place})", highlight=False)
    console.print(f"blocks {blocks}; {found.microbatches} microbatches a step", highlight=False)
    console.print(_memory(found))
    console.print(_collectives(found))
    console.print(f"set up and rehearsed in {found.seconds:.1f} s", highlight=False)


def _memory(found: Rehearsal) -> Table:
    table = Table(title="memory of the rank", title_justify="left")
    table.add_column("what")
    table.add_column("size", justify="right")
    table.add_column("bytes", justify="right")
    rows = (
        (f"parameters ({found.parameters:,})", found.parameter_bytes),
        ("gradients", found.gradient_bytes),
        ("optimizer states", found.optimizer_bytes),
        ("gathered parameters", found.gathered_bytes),
        ("whole gradients", found.whole_gradient_bytes),
        ("activations", found.activation_bytes),
        ("together", found.total_bytes),
        ("at once, at most", found.peak_bytes or 0),
    )
    for name, size in rows:
        if size or name in ("gradients", "activations"):
            table.add_row(name, size_text(size), f"{size:,}", end_section=name == "activations")
    return table


def _collectives(found: Rehearsal) -> Table:
    table = Table(title="collectives of a step", title_justify="left")
    table.add_column("axis")
    table.add_column("collective")
    for name in ("ranks", "count", "size", "bytes"):
        table.add_column(name, justify="right")
    if not found.collectives:
        table.add_row("none", "", "", "", "", "")
    rows = sorted(found.collectives, key=_innermost_first)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is None or following.axis != row.axis
        cells = (row.axis, row.kind, str(row.ranks), f"{row.count:,}", size_text(row.bytes), f"{row.bytes:,}")
        table.add_row(*cells, end_section=last)
    return table


def _innermost_first(row: Collectives) -> tuple[int, str, str]:
    return -max(AXES.index(axis) for axis in row.axis.split("+")), row.axis, row.kind


def size_text(size: float) -> str:
    """Bytes in the largest unit of which there is at least one.

    >>> size_text(3 * 2**30), size_text(1536), size_text(7)
    ('3.00 GiB', '1.50 KiB', '7 B')
    """
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"
