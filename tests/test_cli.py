"""`lightning-4d consolidate`, and that its result needs nothing of ours."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_4d.checkpoint.save import save_folder
from lightning_4d.cli import main
from tests.checkpoint.modules import Portable
from tests.checkpoint.runs import fit, layout
from tests.checkpoint.test_trainer import saved

# In an interpreter that refuses to import lightning_4d: load, and resume one step.
WITHOUT_US = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lightning_4d":
            raise ImportError("lightning_4d cannot be imported here")
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
from lightning.pytorch import Trainer
from tests.checkpoint.modules import Portable
module = Portable.load_from_checkpoint(sys.argv[2], weights_only=True)
trainer = Trainer(accelerator="cpu", max_steps=3, max_epochs=-1, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, ckpt_path=sys.argv[2], weights_only=True)
assert trainer.global_step == 3, trainer.global_step
assert not [name for name in sys.modules if name.startswith("lightning_4d")]
print("loss", module.trace[0][2])
"""


def save_and_continue(folder: Path) -> float:
    path = saved(folder, precision="32-true")
    _, module = fit(Portable, layout(1, 2), 3, ckpt_path=path, precision="32-true")
    return module.trace[0][2]


def test_consolidate_makes_an_ordinary_checkpoint(pool, tmp_path, capsys):
    expected, _ = pool.run(2, save_and_continue, tmp_path)
    target = tmp_path / "new" / "model.ckpt"
    assert main(["consolidate", str(tmp_path / "a.ckpt"), str(target)]) == 0
    assert f"wrote {target}" in capsys.readouterr().err.replace("\n", "")
    root = Path(__file__).parents[1]
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_US, str(root), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[-1]) == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_folder(tmp_path / "a.ckpt", {"state_dict": {"w": torch.ones(2)}}, {"epoch": 1}, is_writer=True)
    return tmp_path / "a.ckpt"


def test_a_folder_with_weights_only(folder, tmp_path):
    assert main(["consolidate", "--weights-only", str(folder), str(tmp_path / "w.ckpt")]) == 0
    content = torch.load(tmp_path / "w.ckpt", weights_only=True)
    assert content["state_dict"]["w"].tolist() == [1.0, 1.0]
    assert set(content) == {"state_dict", "epoch"}


def test_errors_are_explained_on_standard_error(folder, tmp_path, capsys):
    (tmp_path / "file.ckpt").write_bytes(b"")
    folder.with_name("b.ckpt.partial").mkdir()
    cases = {
        ("missing.ckpt", "out.ckpt"): "missing.ckpt': no such checkpoint exists",
        ("file.ckpt", "out.ckpt"): "only a distributed checkpoint, a folder, is consolidated",
        ("b.ckpt.partial", "out.ckpt"): "a checkpoint whose writing was interrupted",
        ("a.ckpt", "a.ckpt"): "is a folder: the result is one file",
        ("a.ckpt", "file.ckpt/x.ckpt"): "cannot be written",
    }
    for (source, target), message in cases.items():
        assert main(["consolidate", str(tmp_path / source), str(tmp_path / target)]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_python_m_runs_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-4d", "consolidate", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("lightning_4d.cli", run_name="__main__")
    assert "--weights-only" in capsys.readouterr().out


def test_explain_shows_the_stages(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    arguments = ["explain", "tests.modules.TinyGPT", "--init-args", '{"layers": 4}', "--pipeline-parallel-size", "2"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "blocks.0 to blocks.1" in printed
    assert "blocks.2 to blocks.3" in printed
    assert main([*arguments, "--pipeline-split", "blocks.9"]) == 1
    assert "blocks.3" in capsys.readouterr().err


def test_draw_writes_the_mesh_in_all_forms(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("mesh.png", "mesh.svg", "mesh.txt")]
    layout = ["--layout", "pp2.dp2x2.cp2.tp2", "--gpus-per-node", "8"]
    assert main(["draw", *layout, "--output", *map(str, files)]) == 0
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files[1].read_text()
    capsys.readouterr()
    assert main(["draw", *layout]) == 0
    assert capsys.readouterr().out == files[2].read_text()
    assert "pp 2: rank 0 meets 16; all 16 groups cross nodes" in files[2].read_text()
