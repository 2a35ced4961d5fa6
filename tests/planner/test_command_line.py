"""``lightning-4d plan`` and ``draw``; and that a plan's YAML file trains."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from torch import nn

from lightning_4d.cli import main
from lightning_4d.layout import ParallelLayout

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
    assert main(["plan", *given, "--layout", "pp4.dp1x2.tp8", "--pictures", str(tmp_path), "--format", "svg"]) == 0
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
    sizes = {name: size for name, size in strategy["init_args"].items() if name.endswith("parallel_size")}
    assert strategy["init_args"].get("sequence_parallel", False) is (sizes.get("tensor_parallel_size", 1) > 1)
    sizes |= {name: size for name, size in strategy["init_args"].items() if name.startswith("data_parallel")}
    assert steps == 2
    assert layout == str(ParallelLayout(**sizes)), "all sizes that the file gives are what the strategy runs"
    if options and options[0] == "--layout":
        assert layout == str(ParallelLayout.parse(options[1]))
    assert {"MFUMonitor", "ModelCheckpoint"} <= set(names), "the plan's callbacks are added to the others"
    assert loss > 0
    assert all(each[1] == layout and each[3] == loss for each in results)


@pytest.mark.parametrize("processes", [4, 8])
def test_the_plan_for_local_processes_trains(pool, tmp_path, processes):
    check(pool, tmp_path, processes)


LAYOUTS = [
    ("dp1x2.cp2", "--recompute", "full"),
    ("pp2.dp1x1.tp2", "--schedule", "1f1b", "--micro-batch", "4"),
    pytest.param(("dp2x2", "--recompute", "full"), marks=pytest.mark.slow),
    pytest.param(("dp1x2.tp2", "--recompute", "selective"), marks=pytest.mark.slow),
    pytest.param(("pp2.dp1x2", "--schedule", "1f1b", "--micro-batch", "4"), marks=pytest.mark.slow),
    pytest.param(("pp2.dp1x1.cp2", "--schedule", "gpipe", "--micro-batch", "4"), marks=pytest.mark.slow),
    pytest.param(("pp2.dp1x1.cp2.tp2", "--schedule", "1f1b", "--micro-batch", "4"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("given", LAYOUTS, ids=lambda given: given[0])
def test_plans_of_other_layouts_train(pool, tmp_path, given):
    check(pool, tmp_path, ParallelLayout.parse(given[0]).world_size, "--layout", *given)


USUAL = {"--model": "gpt2", "--cluster": "dgx-h100", "--devices": "8", "--batch": "64"}
TYPO = "layers: 4\nhidden: 256\nheds: 4\nvocab: 1000\nseq_len: 128\n"
WORDS = "layers: four\nhidden: 256\nvocab: 1000\nseq_len: 128\n"
MISTAKES = [
    ({"--devices": "0"}, "", "devices=0: a plan is for at least one device; use devices=1"),
    ({"--devices": "-8"}, "", "devices=-8: a plan is for at least one device; use devices=1"),
    ({"--batch": "-4"}, "", "batch=-4: it is a whole number of at least 1; use batch=1"),
    ({"--micro-batch": "3"}, "", "microbatches make up the batch; use micro_batch=2"),
    ({"--layout": "dp4"}, "", "layout pp1.dp1x4.cp1.tp1 on 8 devices: its sizes make 4 processes; use devices=4"),
    ({"--layout": "dp8", "--batch": "7"}, "", "the data-parallel size divides the batch"),
    ({"--schedule": "1f2b"}, "", "use '1f1b'"),
    ({"--recompute": "some"}, "", "recompute 'some': known are none, selective, full; use 'none'"),
    ({"--precision": "fp8"}, "", "precision='fp8': plans are made for"),
    ({"--seq-len": "0"}, "", "--seq-len 0: a sample has tokens; use --seq-len 1024"),
    ({"--link-gbs": "0"}, "", "--link-gbs 0: a measured rate is above 0; leave --link-gbs out"),
    ({"--model": "FILE"}, TYPO, "'heds': facts of a model are .*; use 'heads'"),
    ({"--model": "FILE"}, WORDS, "layers: 'four': layers is a number; write a line like 'layers: 8'"),
    ({"--model": "FILE"}, "layers: 0\nhidden: 1\nvocab: 1\nseq_len: 1\n", "layers: 0: layers is above 0"),
    ({"--model": "FILE"}, "a: [1,\n", "it must be readable"),
    ({"--cluster": "FILE"}, "nodes: 2\n", "without device: .*; add a line like 'device: H100-SXM-80GB'"),
    ({"--cluster": "FILE"}, "device: H100\nnodes: 0\n", "nodes: 0: nodes is above 0"),
    ({"--cluster": "FILE"}, "device: H100\nnodes: two\n", "nodes: 'two': nodes is a number"),
    ({"--cluster": "FILE"}, "device: {name: x, peak: 1.0e14}\n", "device without memory_gb, bandwidth_gbs, link_gbs"),
    ({"--cluster": "FILE"}, "device: {name: x, peke: 1.0e14}\n", "'peke': facts of a device are .*; use 'peak'"),
]


@pytest.mark.parametrize(("given", "text", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_line_with_its_remedy(tmp_path, capsys, given, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    options = {name: str(path) if value == "FILE" else value for name, value in (USUAL | given).items()}
    assert main(["plan", *(word for pair in options.items() for word in pair)]) == 1
    error = capsys.readouterr().err.strip()
    assert re.search(message, error), error
    assert len(error.splitlines()) == 1


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            block(batch[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.Module", "must be importable"),
        (f"{__name__}.NoSuch", "must be importable"),
        (f"{__name__}.NoBlocks", "NoBlocks .* repeated"),
        (f"{__name__}.NoLoss", "NoLoss"),
    ],
)
def test_a_class_that_cannot_be_planned(capsys, name, message):
    shape = ["--batch-shape", "float32:8x16,int64:8"]
    assert main(["plan", "--class-path", name, *shape, "--cluster", "local-cpu", "--devices", "2", "--batch", "8"]) == 1
    error = capsys.readouterr().err.strip()
    assert re.search(message, error), error
    assert len(error.splitlines()) == 1
