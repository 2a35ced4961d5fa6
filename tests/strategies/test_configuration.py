"""Strategies chosen by name, in code and in YAML files, and options of the Trainer that strategies must honour."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_4d
from lightning_4d import HSDPStrategy, NDStrategy
from lightning_4d.strategies.registry import register_strategies
from tests.modules import MLP, WithBuffers
from tests.strategies.scenarios import SETTINGS, MakeTrainer, check_same

QUIET = {**SETTINGS, "devices": 1}


@pytest.mark.parametrize(("name", "cls"), [("nd", NDStrategy), ("hsdp", HSDPStrategy), ("HSDP", HSDPStrategy)])
def test_I2_strategies_by_name(name, cls):
    trainer = Trainer(strategy=name, **QUIET)
    assert type(trainer.strategy) is cls
    assert trainer.strategy.layout.world_size == 1


def test_I2_a_name_that_someone_else_registered_is_kept():
    ours = StrategyRegistry["hsdp"]
    StrategyRegistry.register("hsdp", DDPStrategy, description="of someone else", override=True)
    try:
        register_strategies()
        assert StrategyRegistry["hsdp"]["strategy"] is DDPStrategy
    finally:
        StrategyRegistry["hsdp"] = ours


CONFIG = """
model: {class_path: tests.modules.MLP}
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  limit_val_batches: 0
  max_steps: 2
  strategy:
    class_path: lightning_4d.NDStrategy
    init_args:
      data_parallel_replicate_size: 1
      data_parallel_shard_size: auto
      timeout: "0:05:00"
      blocks: [blocks]
      reshard_after_forward: auto
"""


def cli(tmp_path: Path, *arguments: str, config: str = CONFIG, run: bool = False) -> LightningCLI:
    path = tmp_path / "config.yaml"
    path.write_text(config)
    return LightningCLI(
        MLP, subclass_mode_model=True, run=run, save_config_callback=None, args=["--config", str(path), *arguments]
    )


def test_I1_a_strategy_from_yaml_with_an_override_on_the_command_line(tmp_path, capsys):
    made = cli(tmp_path, "--trainer.strategy.init_args.compile_blocks=true").trainer.strategy
    assert isinstance(made, NDStrategy)
    assert made._timeout == timedelta(minutes=5)
    assert made._blocks == ["blocks"]
    assert made._options.compile_blocks


def test_I1_the_printed_configuration_makes_the_same_trainer(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli(tmp_path, "--print_config")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "class_path: lightning_4d.NDStrategy" in printed
    again = cli(tmp_path, config=printed).trainer.strategy
    assert isinstance(again, NDStrategy)
    assert again._timeout == timedelta(minutes=5)
    assert again._sizes == cli(tmp_path).trainer.strategy._sizes
    by_name = cli(tmp_path, config="model: tests.modules.MLP\ntrainer: {strategy: hsdp, devices: 1, accelerator: cpu}")
    assert isinstance(by_name.trainer.strategy, HSDPStrategy)


@pytest.mark.parametrize("name", ["HSDPStrategy", "NDStrategy"])
def test_an_unknown_key_is_named(tmp_path, capsys, name):
    config = CONFIG.replace("NDStrategy", name).replace("data_parallel_replicate_size", "data_paralel_replicate_size")
    with pytest.raises(SystemExit) as ended:
        cli(tmp_path, config=config)
    assert ended.value.code != 0
    assert "data_paralel_replicate_size" in capsys.readouterr().err


def test_a_value_of_the_wrong_type_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli(tmp_path, config=CONFIG.replace("data_parallel_shard_size: auto", "data_parallel_shard_size: most"))
    assert "data_parallel_shard_size" in capsys.readouterr().err


def test_fewer_devices_than_the_layout_says_what_to_change(tmp_path, capsys):
    config = CONFIG.replace("replicate_size: 1", "replicate_size: 2").replace("shard_size: auto", "shard_size: 2")
    with pytest.raises((SystemExit, lightning_4d.errors.LayoutError)) as refused:
        cli(tmp_path, config=config)
    message = str(refused.value) + capsys.readouterr().err
    assert "data_parallel_replicate_size=2" in message
    assert "data_parallel_shard_size=2" in message
    assert "1" in message.split("world")[-1]


def synchronised_batch_norm(make: MakeTrainer) -> dict[str, Any]:
    """I4: torch has no SyncBatchNorm on CPU and says so, instead of using each rank's own statistics."""
    try:
        make(max_steps=2, limit_val_batches=0, sync_batchnorm=True).fit(WithBuffers())
    except ValueError as error:
        return {"refused": "SyncBatchNorm" in str(error) and "GPU" in str(error)}
    return {"refused": False}


def test_I4_synchronised_batch_normalisation_is_applied(pool):
    assert all(seen["refused"] for seen in check_same(pool, 2, synchronised_batch_norm))


def test_the_layout_and_the_mesh_say_when_they_exist():
    strategy = NDStrategy()
    with pytest.raises(lightning_4d.errors.UnsupportedError, match="make the Trainer"):
        _ = strategy.layout
    trainer = Trainer(strategy=strategy, **QUIET)
    assert str(trainer.strategy.layout) == "pp1.dp1x1.cp1.tp1"
    with pytest.raises(lightning_4d.errors.UnsupportedError, match=r"setup\(\)"):
        _ = strategy.mesh
