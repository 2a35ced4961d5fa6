"""The example's model, data and command line, on one process. What it does on several is tested with the strategies."""

from __future__ import annotations

import csv
import itertools
import math
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer, seed_everything

from examples import train_gpt
from examples.train_gpt import GPT, ByteWindows, SampleText, TextFolder

CONFIGS = Path(train_gpt.__file__).parent / "configs"
TINY_MODEL = {"dim": 16, "n_layers": 2, "n_heads": 2, "block_size": 16}


@pytest.fixture
def tiny_gpt() -> GPT:
    seed_everything(0)
    return GPT(**TINY_MODEL)


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """24 files of two suffixes in nested folders, 800 bytes each."""
    root = tmp_path / "text"
    for i in range(24):
        file = root / f"part{i % 3}" / f"file{i}{'.txt' if i % 2 else '.py'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"line {i:3} of a text\n" * 40)
    return root


# ---------------------------------------------------------------------------------------------------------------- model


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape)


def test_a_later_byte_changes_no_earlier_logits(tiny_gpt: GPT) -> None:
    tokens = random_bytes(3, 16)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = tiny_gpt(tokens), tiny_gpt(changed)
    assert before.shape == (3, 16, 256)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert ((before - after)[:, 9:].abs().amax(dim=-1) > 1e-4).all(), "all later positions look back on the byte"


def test_attention_knows_the_order_of_earlier_bytes() -> None:
    seed_everything(0)
    gpt = GPT(**{**TINY_MODEL, "n_layers": 1})  # without positions, its last byte would see the earlier ones as a set
    tokens = torch.arange(16)[None]
    swapped = tokens.clone()
    swapped[:, [2, 5]] = swapped[:, [5, 2]]
    assert (gpt(tokens) - gpt(swapped))[:, -1].abs().max() > 1e-4


def test_rope_makes_scores_depend_on_the_distance_only() -> None:
    q, k = (torch.randn(8, dtype=torch.float64).expand(1, 1, 12, 8) for _ in range(2))
    scores = (train_gpt.apply_rope(q) @ train_gpt.apply_rope(k).mT)[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=0, atol=1e-12)
    assert scores[0].std() > 0.1, "and it does depend on it"


def test_rope_rotates_and_keeps_dtype() -> None:
    x = torch.randn(2, 3, 12, 8)
    rotated = train_gpt.apply_rope(x)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotated[:, :, 0], x[:, :, 0])
    assert train_gpt.apply_rope(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(train_gpt.apply_rope(x.double()).float(), rotated)


def test_weights_are_drawn_as_gpt2_does() -> None:
    seed_everything(0)
    gpt = GPT(dim=192, n_layers=8, n_heads=4)  # a quarter of GPT-2's channels: twice its 0.02
    for name, parameter in gpt.named_parameters():
        if "norm" in name:
            assert parameter.unique().tolist() == [0.0 if name.endswith("bias") else 1.0], name
        else:
            expected = 0.04 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.04
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
    tokens = random_bytes(4, 32)
    assert train_gpt.cross_entropy(gpt(tokens), random_bytes(4, 32)).item() == pytest.approx(math.log(256), rel=0.05)


def test_every_parameter_is_in_one_group_and_norms_do_not_decay(tiny_gpt: GPT) -> None:
    tiny_gpt.blocks[0].attention.q_proj.weight.requires_grad_(False)
    decayed, undecayed = tiny_gpt.parameter_groups()
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in tiny_gpt.named_parameters()}
    decayed_names, undecayed_names = ([names.pop(id(p)) for p in group["params"]] for group in (decayed, undecayed))
    assert list(names.values()) == ["blocks.0.attention.q_proj.weight"], "only the frozen parameter is left out"
    assert all("norm" in name for name in undecayed_names)
    assert not any("norm" in name for name in decayed_names)


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    gpt = GPT(**TINY_MODEL, warmup_steps=10)
    factors = [gpt.lr_factor(step, 110) for step in range(120)]
    assert factors[:11] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])
    assert factors[60] == pytest.approx(0.55)
    assert factors[110:] == pytest.approx([0.1] * 10)
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))


def test_a_training_without_an_end_is_refused(tiny_gpt: GPT, text_folder: Path) -> None:
    trainer = Trainer(accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="max_steps"):
        trainer.fit(tiny_gpt, TextFolder(str(text_folder), block_size=16))


def test_a_head_of_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.dim=20 with model\.n_heads=4.*dim=16"):
        GPT(dim=20, n_heads=4)


def test_generate_continues_the_prompt_and_leaves_no_trace(tiny_gpt: GPT) -> None:
    state = torch.get_rng_state()
    prompt = b"longer than the sixteen bytes of a block"
    text = tiny_gpt.generate(prompt, 5)
    assert text[: len(prompt)] == prompt
    assert len(text) == len(prompt) + 5
    assert tiny_gpt.generate(prompt, 5) == text
    assert tiny_gpt.generate(prompt, 5, seed=1) != text
    assert len(tiny_gpt.generate("", 3)) == 4, "an empty prompt stands for the start of a file"
    assert tiny_gpt.training
    assert torch.equal(torch.get_rng_state(), state)


def test_generate_samples_the_likely_bytes(tiny_gpt: GPT) -> None:
    with torch.no_grad():  # a constant feature and a head that reads it: always "x"
        tiny_gpt.norm.weight.zero_()
        tiny_gpt.norm.bias.fill_(1.0)
        tiny_gpt.head.weight.zero_()
        tiny_gpt.head.weight[ord("x")] = 10.0
    assert tiny_gpt.generate("a", 4) == b"axxxx"


# ----------------------------------------------------------------------------------------------------------------- data


def names(files: list[Path], root: Path) -> list[str]:
    return [file.relative_to(root).as_posix() for file in files]


def split(root: Path, val_fraction: float = 0.25) -> tuple[list[str], list[str]]:
    files = train_gpt.find_files(root, [".py", ".txt"])
    train, val = train_gpt.split_files(files, root, val_fraction)
    return names(train, root), names(val, root)


def test_split_is_by_file_and_complete(text_folder: Path) -> None:
    train, val = split(text_folder)
    assert sorted(train + val) == names(train_gpt.find_files(text_folder, [".py", ".txt"]), text_folder)
    assert len(train + val) == 24
    assert not set(train) & set(val)
    assert len(train) > len(val) > 0


def test_split_depends_on_names_below_the_folder_only(text_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(text_folder, copy)
    assert split(copy) == split(text_folder)


def test_a_file_keeps_its_side_when_others_are_added(text_folder: Path) -> None:
    train, val = split(text_folder)
    for i in range(30):
        (text_folder / f"new{i}.txt").write_text("new")
    more_train, more_val = split(text_folder)
    assert set(train) < set(more_train)
    assert set(val) < set(more_val)


def test_two_files_make_one_of_each_side(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    train, val = split(tmp_path, val_fraction=1e-6)
    assert sorted(train + val) == ["a.txt", "b.txt"]
    assert len(train) == 1


def test_files_are_read_as_the_bytes_they_are(tmp_path: Path) -> None:
    contents = [b"caf\xe9 \xff\xfe", b"", b"two\nlines"]
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for file, content in zip(files, contents):
        file.write_bytes(content)
    text = train_gpt.read_files(files)
    assert text.dtype == torch.uint8
    assert bytes(text.tolist()) == b"caf\xe9 \xff\xfe\0\0two\nlines\0"


def test_windows_predict_every_byte_once() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    windows = ByteWindows(text, block_size=9)
    inputs, targets = (torch.cat(parts) for parts in zip(*(windows[i] for i in range(len(windows)))))
    assert inputs.dtype == torch.int64
    assert targets.tolist() == list(range(1, 100))
    assert inputs.tolist() == list(range(99))


def test_few_windows_are_spread_over_the_text() -> None:
    windows = ByteWindows(torch.arange(101, dtype=torch.uint8), block_size=10, max_windows=3)
    assert [int(windows[i][0][0]) for i in range(len(windows))] == [0, 30, 60]


def test_the_default_text_is_the_standard_library_without_tests_and_third_parties() -> None:
    data = TextFolder()
    found = names(
        train_gpt.find_files(data.root, data.suffixes, data.skip_folders), Path(sysconfig.get_paths()["stdlib"])
    )
    assert {"argparse.py", "json/decoder.py"} <= set(found)
    assert not [name for name in found if "site-packages" in name or name.startswith("test/")]
    assert all(name.endswith(".py") for name in found)


def test_setup_reads_what_the_stage_needs_once(text_folder: Path) -> None:
    data = TextFolder(str(text_folder), block_size=16, val_fraction=0.25)
    data.setup("validate")
    assert data.train_windows is None
    val_windows = data.val_windows
    data.setup("fit")
    assert data.val_windows is val_windows
    assert data.train_windows is not None
    bytes_per_file = 40 * len("line   0 of a text\n") + 1
    assert len(data.train_windows.text) + len(data.val_windows.text) == 24 * bytes_per_file


def test_hidden_folders_are_skipped_and_suffixes_filter(text_folder: Path) -> None:
    hidden = text_folder / ".git" / "config.txt"
    hidden.parent.mkdir()
    hidden.write_text("hidden")
    found = names(train_gpt.find_files(text_folder, [".txt"]), text_folder)
    assert len(found) == 12
    assert all(name.endswith(".txt") and name.startswith("part") for name in found)


def test_bad_folders_are_named(text_folder: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match=str(missing)):
        TextFolder(str(missing)).setup("fit")
    with pytest.raises(NotADirectoryError, match="a folder is needed"):
        TextFolder(str(text_folder / "part0" / "file0.py")).setup("fit")
    with pytest.raises(ValueError, match=r"no file ends in \.md.*\.py.*\.txt|no file ends in \.md.*\.txt.*\.py"):
        TextFolder(str(text_folder), suffixes=[".md"]).setup("fit")


def test_too_little_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    with pytest.raises(ValueError, match="two files or more"):
        TextFolder(str(tmp_path)).setup("fit")
    (tmp_path / "b.txt").write_text("0123456789")
    with pytest.raises(ValueError, match=r"data\.block_size=11: the training text has 11 bytes.*block_size=10 or less"):
        TextFolder(str(tmp_path), block_size=11).setup("fit")
    TextFolder(str(tmp_path), block_size=10).setup("fit")


@pytest.mark.parametrize("argument", [{"block_size": 0}, {"batch_size": -1}, {"val_fraction": 1.0}])
def test_impossible_numbers_are_named(argument: dict[str, float]) -> None:
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=f"data.{name}={value}"):
        TextFolder(**argument)


# --------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs write into the test's folder, and pytest's own arguments are none of LightningCLI's business."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train_gpt.py"])
    return tmp_path


def tiny_run(text_folder: Path) -> list[str]:
    options = {
        "config": CONFIGS / "single.yaml",
        "model.dim": 16,
        "model.n_layers": 2,
        "model.n_heads": 2,
        "model.warmup_steps": 2,
        "model.learning_rate": 0.01,
        "data.path": text_folder,
        "data.block_size": 16,
        "data.batch_size": 8,
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.log_every_n_steps": 1,
        "sample_text.n_bytes": 3,
    }
    return [f"--{key}={value}" for key, value in options.items()]


def logged(run: Path, name: str) -> list[float]:
    with (run / "logs/csv/version_0/metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_fit_logs_learns_saves_and_samples(in_tmp: Path, text_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = [*tiny_run(text_folder), "--trainer.max_steps=20", "--trainer.val_check_interval=10"]
    cli = train_gpt.main(["fit", *fit])
    assert cli.trainer.global_step == 20
    assert "--- sampled text ---\ndef " in capsys.readouterr().out

    assert len(logged(in_tmp, "train_loss")) == 20
    val_losses = logged(in_tmp, "val_loss")
    assert val_losses[1] < val_losses[0] < math.log(256), "the model learns"
    assert 0 < logged(in_tmp, "val_accuracy")[-1] < 1
    assert max(logged(in_tmp, "lr-AdamW/pg1")) == pytest.approx(0.01)
    assert list((in_tmp / "logs/tensorboard/version_0").glob("events.out.tfevents.*"))

    (last,) = in_tmp.rglob("last.ckpt")
    restored = GPT.load_from_checkpoint(last)
    tokens = random_bytes(2, 16)
    torch.testing.assert_close(restored(tokens), cli.model(tokens), rtol=0, atol=0)

    train_gpt.main(["validate", *tiny_run(text_folder), f"--ckpt_path={last}"])
    with (in_tmp / "logs/csv/version_1/metrics.csv").open() as file:
        assert float(next(csv.DictReader(file))["val_loss"]) == pytest.approx(val_losses[-1], rel=1e-5)


def test_two_steps_without_loggers(in_tmp: Path, text_folder: Path) -> None:
    cli = train_gpt.main(
        ["fit", *tiny_run(text_folder), "--trainer.max_steps=2", "--trainer.logger=false", "--trainer.callbacks=[]"]
    )
    assert cli.trainer.global_step == 2
    assert cli.model.block_size == 16, "taken from the data"
    assert any(isinstance(callback, SampleText) for callback in cli.trainer.callbacks)


def print_config(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        train_gpt.main(["fit", *arguments, "--print_config"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["single", "ddp", "hsdp", "tp", "pp", "cp", "long_context", "two_nodes"])
def test_configurations_round_trip(name: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = print_config([f"--config={CONFIGS / name}.yaml", "--data.batch_size=3"], capsys)
    Path("printed.yaml").write_text(printed)
    assert print_config(["--config=printed.yaml"], capsys) == printed
    config = yaml.safe_load(printed)
    assert config["data"]["batch_size"] == 3, "the command line overrides"
    common, own = (yaml.safe_load((CONFIGS / f"{n}.yaml").read_text())["trainer"] for n in ("common", name))
    assert config["trainer"]["max_steps"] == (common | own)["max_steps"]
    assert config["trainer"]["devices"] == own["devices"]


def test_runs_differ_in_processes_and_strategy_only(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hsdp, ddp, single = (
        yaml.safe_load(print_config([f"--config={CONFIGS / name}.yaml"], capsys)) for name in ("hsdp", "ddp", "single")
    )
    strategy = hsdp["trainer"].pop("strategy")
    assert strategy["class_path"] == "lightning_4d.HSDPStrategy"
    assert (strategy["init_args"]["replicate_size"], strategy["init_args"]["shard_size"]) == (2, 2)
    assert ddp["trainer"].pop("strategy") == "ddp"
    assert hsdp == ddp
    assert single["data"].pop("batch_size") == ddp["data"].pop("batch_size") * ddp["trainer"].pop("devices")
    single["trainer"].pop("strategy")
    single["trainer"].pop("devices")
    assert single == ddp


@pytest.mark.parametrize(
    ("name", "strategy", "shared"),
    [("tp", "TPStrategy", "size"), ("pp", "PPStrategy", "size"), ("cp", "CPStrategy", "size"),
     ("two_nodes", "NDStrategy", "tensor_parallel_size")],
)  # fmt: skip
def test_every_run_reads_as_many_windows_per_step(
    name: str, strategy: str, shared: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, ddp = (yaml.safe_load(print_config([f"--config={CONFIGS / each}.yaml"], capsys)) for each in (name, "ddp"))
    chosen = own["trainer"].pop("strategy")
    assert chosen["class_path"] == f"lightning_4d.{strategy}"
    ddp["trainer"].pop("strategy")
    processes = own["trainer"].pop("devices") * own["trainer"].pop("num_nodes")
    assert processes == ddp["trainer"].pop("devices") * ddp["trainer"].pop("num_nodes")
    readers = processes // chosen["init_args"][shared]
    assert own["data"].pop("batch_size") * readers == ddp["data"].pop("batch_size") * processes
    assert own == ddp


@pytest.mark.parametrize("key", ["model.n_layer", "data.pth", "trainer.max_step", "sample_text.bytes"])
def test_an_unknown_key_in_a_file_is_named(
    key: str, in_tmp: Path, text_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section, name = key.split(".")
    Path("typo.yaml").write_text(yaml.safe_dump({section: {name: 3}}))
    with pytest.raises(SystemExit) as exit_:
        train_gpt.main(["fit", *tiny_run(text_folder), "--config=typo.yaml"])
    assert exit_.value.code != 0
    assert key in capsys.readouterr().err


def test_an_unknown_strategy_argument_is_named(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_gpt.main(["fit", f"--config={CONFIGS / 'hsdp.yaml'}", "--trainer.strategy.init_args.shards=2"])
    assert "shards" in capsys.readouterr().err


def test_help_explains_the_options(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        train_gpt.main(["fit", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "--data.path" in out
    assert "Channels of the residual stream" in out
