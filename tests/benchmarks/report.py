"""Where benchmark results go: a table in README.md between two markers, with the machine and the date."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path

import torch

README = Path(__file__).parents[2] / "README.md"


def machine() -> str:
    """One line on the machine, the versions and the day."""
    return f"{os.cpu_count()} cores {processor()}, torch {torch.__version__}, {date.today().isoformat()}"


def processor() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_section(name: str, rows: list[dict[str, str]]) -> None:
    """Put a table of ``rows`` between ``<!-- bench:NAME -->`` and ``<!-- /bench -->`` in README.md."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row.values()) + " |" for row in rows]
    write_lines(name, [f"{machine()}:", "", *lines])


def write_lines(name: str, lines: list[str]) -> None:
    """Put ``lines`` between ``<!-- bench:NAME -->`` and ``<!-- /bench -->`` in README.md."""
    start, end = f"<!-- bench:{name} -->", "<!-- /bench -->"
    text = README.read_text()
    if start not in text:
        raise SystemExit(f"README.md has no {start}")
    head, rest = text.split(start, 1)
    tail = rest.split(end, 1)[1]
    README.write_text(f"{head}{start}\n" + "\n".join(lines) + f"\n{end}{tail}")
