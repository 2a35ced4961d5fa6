"""The Gantt chart of a pipeline schedule, from plain data."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from lightning_4d.errors import LayoutError, UnsupportedError
from lightning_4d.visual import Cell, draw_schedule, efficiency
from lightning_4d.visual import canvas as canvas_module
from lightning_4d.visual.schedule import schedule_text


def gpipe(ranks: int, microbatches: int) -> list[Cell]:
    """All forwards, then all backwards, each of one unit of time."""
    forward = [Cell(r, r + i, r + i + 1, "forward", i, r) for r in range(ranks) for i in range(microbatches)]
    half = ranks + microbatches - 1
    backward = [
        Cell(r, half + ranks - 1 - r + i, half + ranks - r + i, "backward", i, r)
        for r in range(ranks)
        for i in range(microbatches)
    ]
    return forward + backward


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 8)])
def test_efficiency_is_the_textbook_one(ranks, microbatches):
    assert efficiency(gpipe(ranks, microbatches)) == pytest.approx(microbatches / (microbatches + ranks - 1))


def test_efficiency_counts_a_rank_that_does_nothing_and_does_not_care_where_time_starts():
    assert efficiency([Cell(1, 100, 102, "backward", 0)]) == 0.5
    assert efficiency([Cell(0, 7, 7, "forward", 0)]) == 1.0


def test_svg_holds_the_title_the_ranks_and_the_microbatches(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "chart.svg"
    draw_schedule(gpipe(2, 2), path, "GPipe")
    texts = [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    assert "GPipe: 66.7% efficiency (33.3% bubble)" in texts
    assert {"rank 0", "rank 1", "forward", "backward", "bubble"} <= set(texts)
    draw_schedule(gpipe(2, 2), tmp_path / "again.svg", "GPipe")
    assert (tmp_path / "again.svg").read_bytes() == path.read_bytes()


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    draw_schedule(gpipe(4, 8), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_text():
    assert schedule_text(gpipe(2, 2), 6).splitlines()[:2] == ["rank 0  FF..BB", "rank 1  .FFBB."]


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(UnsupportedError, match=r"chart\.png"):
        draw_schedule(gpipe(1, 1), tmp_path / "chart.pdf")
    with pytest.raises(LayoutError, match="at least one Cell"):
        draw_schedule([], tmp_path / "chart.png")
    with pytest.raises(LayoutError, match="one of forward, backward, input_gradient, weight_gradient"):
        Cell(0, 0, 1, "sideways", 0)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="ends when it starts or later"):
        Cell(0, 1, 0, "forward", 0)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"lightning-4d\[visual\]"):
        canvas_module.new_figure(1, 1)
