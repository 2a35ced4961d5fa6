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


@pytest.mark.parametrize("text", ["pp2.dp2x2.cp2.tp2", "tp8", "dp64", "pp4.dp256x8.tp8"])
def test_mesh(tmp_path, text):
    layout = ParallelLayout.parse(text)
    draw_mesh(layout, 8, tmp_path / "mesh.svg")
    shown = texts(tmp_path / "mesh.svg")
    assert "node 0" in shown
    assert any(str(layout) in each for each in shown if each)
    draw_mesh(layout, 8, tmp_path / "mesh.png")


def test_mesh_text_says_which_axes_cross_nodes():
    text = mesh_text(ParallelLayout.parse("pp2.dp2x2.cp2.tp2"), 8)
    assert "tp 2: ranks 0 1, inside a node" in text
    assert "pp 2: ranks 0 16, across nodes" in text
    assert mesh_text(ParallelLayout.parse("tp16"), 8).splitlines()[1].endswith("across nodes")
    assert mesh_text(ParallelLayout.parse("dp1024"), 8).endswith("...")


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
