"""The one place that makes figures of matplotlib: no global state, fixed colours, files that do not change by the day.

matplotlib's ``pyplot`` keeps a list of open figures and picks a window system; neither is wanted in a training process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_4d.errors import UnsupportedError, explain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["GREY", "INK", "PALETTE", "SUFFIXES", "checked_path", "new_figure", "save"]

SUFFIXES = (".png", ".svg")

# Okabe and Ito's colours, which people with colour blindness can tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F")
GREY, INK = "#E4E4E4", "#222222"


def checked_path(path: str | Path) -> Path:
    """Return the path of a picture to write.

    Raises:
        UnsupportedError: the suffix is neither .png nor .svg.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        rule = "pictures are written as PNG or SVG, by the suffix of the file"
        raise UnsupportedError(explain(f"picture file {path.name!r}", rule, f"use {path.stem + SUFFIXES[0]!r}"))
    return path


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        remedy = "pip install 'lightning-4d[visual]', or use the text form"
        raise UnsupportedError(explain("a picture without matplotlib", "matplotlib draws pictures", remedy)) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure; folders on the way are made. The same figure gives the same bytes on every day."""
    import matplotlib as mpl

    path = checked_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_svg = path.suffix.lower() == ".svg"
    metadata: dict[str, Any] = {"Date": None} if is_svg else {"Software": None}
    # Text stays text in SVG: small, searchable, and of the reader's own font.
    with mpl.rc_context({"svg.hashsalt": "lightning_4d", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata=metadata)
