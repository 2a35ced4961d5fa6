"""Bars, mesh maps and scatter plots from plain data."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from lightning_4d.errors import LayoutError, UnsupportedError
from lightning_4d.layout import ParallelLayout
from lightning_4d.visual import draw_memory, draw_mesh, draw_scatter, draw_time, mesh_text


def texts(path):
    return [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib")


def test_memory_shows_components_and_the_devices_capacity(tmp_path):
    parts = [{"parameters": 20 * 2**30, "activations": 30 * 2**30}, {"parameters": 90 * 2**30, "activations": 0}]
    draw_memory(["a", "b"], parts, 80 * 2**30, tmp_path / "m.svg")
    shown = texts(tmp_path / "m.svg")
    assert {"a", "b", "parameters", "activations", "device: 80 GiB"} <= set(shown)
    assert " 50" in shown
    assert " 90" in shown


def test_time_leaves_out_what_takes_none(tmp_path):
    draw_time(["x"], [{"matmul": 1.0, "bubble": 0.5, "context": 0.0}], tmp_path / "t.svg")
    assert "bubble" in texts(tmp_path / "t.svg")
    assert "context" not in texts(tmp_path / "t.svg")


MESHES = [("pp2.dp2x2.cp2.tp2", 8), ("tp8", 8), ("pp2.dp2x2.cp2.tp4", 8), ("dp64", 1), ("dp128", 64), ("dp6.tp2", 8)]


@pytest.mark.parametrize(("text", "node"), MESHES)
def test_mesh_shows_every_rank_with_its_place(tmp_path, text, node):
    layout = ParallelLayout.parse(text)
    draw_mesh(layout, node, tmp_path / "mesh.svg")
    shown = texts(tmp_path / "mesh.svg")
    assert {str(rank) for rank in range(layout.world_size)} <= set(shown)
    assert {f"node {number}" for number in range(-(-layout.world_size // node))} <= set(shown)
    assert any(str(layout) in each for each in shown if each)


@pytest.mark.parametrize(("text", "node"), [*MESHES[:3], ("pp16.dp1x128.cp1.tp8", 8), ("dp4x8", 72)])
def test_texts_of_a_mesh_do_not_overlap(monkeypatch, tmp_path, text, node):
    from lightning_4d.visual import mesh

    figures = []
    monkeypatch.setattr(mesh, "save", lambda figure, path: figures.append(figure))
    draw_mesh(ParallelLayout.parse(text), node, tmp_path / "mesh.png")
    figure = figures[0]
    figure.canvas.draw()
    written = [each for axes in figure.axes for each in axes.texts]
    written += [*figure.legends[0].get_texts(), figure._suptitle]
    boxes = [each.get_window_extent() for each in written if each.get_text()]
    whole = figure.bbox
    assert len(boxes) > 8
    for index, box in enumerate(boxes):
        assert whole.x0 <= box.x0
        assert box.x1 <= whole.x1
        assert not any(box.overlaps(other) for other in boxes[:index])


def test_a_large_mesh_is_summed_up(tmp_path):
    layout = ParallelLayout.parse("pp16.dp1x128.cp1.tp8")
    draw_mesh(layout, 8, tmp_path / "mesh.svg")
    shown = texts(tmp_path / "mesh.svg")
    assert "node 0" in shown
    assert "node 1" not in shown
    assert any("all nodes" in each for each in shown if each)
    assert any("all 1,024 groups cross nodes" in each for each in shown if each)
    assert (tmp_path / "mesh.svg").stat().st_size < 3_000_000
    text = mesh_text(layout, 8)
    assert text.endswith("... and 2,040 nodes more")
    assert len(text) < 5000


def test_mesh_text_says_which_groups_cross_nodes():
    text = mesh_text(ParallelLayout.parse("pp2.dp2x2.cp2.tp2"), 8)
    assert "tp 2: rank 0 meets 1; inside nodes" in text
    assert "pp 2: rank 0 meets 16; all 16 groups cross nodes" in text
    assert "node 3: 24 [pp1 r1 s0 cp0 tp0]" in text
    assert "1 of 3 groups cross nodes" in mesh_text(ParallelLayout.parse("dp3.tp2"), 3)
    assert mesh_text(ParallelLayout.parse("tp16"), 8).splitlines()[1].endswith("all 1 groups cross nodes")


def test_scatter(tmp_path):
    draw_scatter([40, 50], [41, 48], ["one", "two"], tmp_path / "s.svg")
    assert {"one (1)", "two (1)", "published MFU, %", "predicted MFU, %"} <= set(texts(tmp_path / "s.svg"))


def test_refusals(tmp_path):
    with pytest.raises(UnsupportedError, match="as many names as plans"):
        draw_time(["a"], [], tmp_path / "t.png")
    with pytest.raises(UnsupportedError, match="equally many"):
        draw_scatter([], [], [], tmp_path / "s.png")
    with pytest.raises(LayoutError, match="at least one rank"):
        mesh_text(ParallelLayout(), 0)
    with pytest.raises(UnsupportedError, match="PNG or SVG"):
        draw_mesh(ParallelLayout(), 8, tmp_path / "mesh.gif")
