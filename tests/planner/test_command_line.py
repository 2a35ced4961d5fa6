"""``lightning-4d plan`` and ``draw``; and that a plan's YAML file trains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from lightning_4d.cli import main

ROOT = Path(__file__).parents[2]
GPT = ["--class-path", "examples.train_gpt.GPT", "--init-args", "{dim: 16, n_layers: 2, n_heads: 2}"]
SHAPE = ["--batch-shape", "int64:4x16,int64:4x16"]


def test_plan_prints_the_ranking_the_reasons_and_the_recipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "64", "--batch", "512"]) == 0
    printed = capsys.readouterr().out
    for expected in ("Best layouts", "Memory of", "Where the step goes", "Why not", "The usual recipe", "pp1.dp1x64"):
        assert expected in printed
    assert "plain data parallelism" in printed
    assert "GiB of 75" in printed


def test_plan_of_one_layout(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    given = ["--model", "llama3-405b", "--cluster", "meta-llama3", "--devices", "16384", "--batch", "2048"]
    assert main(["plan", *given, "--layout", "pp16.dp1x128.cp1.tp8", "--recompute", "full", "--top", "1"]) == 0
    assert "pp16.dp1x128.cp1.tp8" in capsys.readouterr().out


def test_plan_explains_what_cannot_work(capsys):
    base = ["plan", "--model", "llama3-405b", "--cluster", "dgx-h100", "--devices", "16", "--batch", "64"]
    assert main(base) == 1
    assert "use at least" in capsys.readouterr().err
    assert main(["plan", "--cluster", "dgx-h100", "--batch", "8"]) == 1
    assert "give either --model or --class-path" in capsys.readouterr().err
    assert main(["plan", *GPT, "--cluster", "dgx-h100", "--batch", "8"]) == 1
    assert "add --batch-shape" in capsys.readouterr().err


def test_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    given = ["--model", "llama3-70b", "--cluster", "dgx-h100", "--devices", "64", "--batch", "256"]
    assert main(["plan", *given, "--layout", "pp4.dp1x16", "--pictures", str(tmp_path), "--format", "svg"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.svg", "mesh.svg", "schedule.svg", "time.svg"]


def test_draw(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    layout = ["draw", "--layout", "pp2.dp2x2.cp2.tp2", "--gpus-per-node", "8"]
    assert main(layout) == 0
    assert "tp 2: rank 0 meets 1; inside nodes" in capsys.readouterr().out
    for suffix in ("png", "svg"):
        assert main([*layout, "--output", str(tmp_path / f"mesh.{suffix}")]) == 0
    assert main([*layout, "--schedule", "1f1b"]) == 0
    assert "88.9% efficiency" in capsys.readouterr().out
    assert main([*layout, "--schedule", "zbv", "--output", str(tmp_path / "zbv.png")]) == 0
    assert main(["draw", "--layout", "xx2"]) == 1
    assert "unknown part 'xx2'" in capsys.readouterr().err


def write_plan(path: Path, processes: int, *options: str) -> dict:
    command = ["plan", *GPT, *SHAPE, "--cluster", "local-cpu", "--devices", str(processes), "--batch", "32"]
    assert main([*command, "--batch-key", "data.batch_size", "--output", str(path), *options]) == 0
    return yaml.safe_load(path.read_text())


def train(config: str, folder: str) -> tuple[int, str, list[str], float]:
    """On each rank: the example's own command line with the plan's file."""
    os.chdir(folder)
    from examples import train_gpt

    cli = train_gpt.main(
        [
            "fit",
            f"--config={config}",
            "--model.dim=16",
            "--model.n_layers=2",
            "--model.n_heads=2",
            "--data.block_size=16",
            "--data.max_val_windows=32",
            "--trainer.max_steps=2",
            "--trainer.val_check_interval=2",
            "--sample_text.n_bytes=2",
        ]
    )
    trainer = cli.trainer
    names = [type(callback).__name__ for callback in trainer.callbacks]
    return trainer.global_step, str(trainer.strategy.layout), names, float(trainer.callback_metrics["val_loss"])


def check(pool, tmp_path: Path, processes: int, *options: str) -> None:
    content = write_plan(tmp_path / "trainer.yaml", processes, *options)
    strategy = content["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_4d.NDStrategy"
    results = pool.run(processes, train, str(tmp_path / "trainer.yaml"), str(tmp_path))
    steps, layout, names, loss = results[0]
    sizes = strategy["init_args"]
    expected = f"dp{sizes['data_parallel_replicate_size']}x{sizes['data_parallel_shard_size']}"
    assert steps == 2
    assert expected in layout
    assert {"MFUMonitor", "ModelCheckpoint"} <= set(names), "the plan's callbacks are added to the others"
    assert loss > 0
    assert all(each[1] == layout and each[3] == loss for each in results)


def test_the_plan_for_4_processes_trains(pool, tmp_path):
    check(pool, tmp_path, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (8, ()),
        (4, ("--layout", "dp2x2", "--recompute", "full")),
        (4, ("--layout", "pp2.dp1x2", "--schedule", "1f1b", "--micro-batch", "4")),
    ],
    ids=["8", "hsdp", "pipeline"],
)
def test_other_plans_train(pool, tmp_path, processes, options):
    check(pool, tmp_path, processes, *options)
