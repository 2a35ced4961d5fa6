"""A plan's YAML file, for whatever the search can propose: a LightningCLI reads it, and NDStrategy takes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lightning_4d import NDStrategy
from lightning_4d.callbacks import ActivationCheckpointing
from lightning_4d.layout import ParallelLayout
from lightning_4d.parallel.pipeline.schedule import check_microbatches, find_schedule
from lightning_4d.parallel.pipeline.split import check_count
from lightning_4d.planner import Limits, cluster_facts, model_facts, search, trainer_yaml
from lightning_4d.planner.facts import SCHEDULES
from lightning_4d.planner.ours import POLICIES, PRECISIONS
from lightning_4d.strategies.pipeline_split import split_by_name

SEARCHES = [
    ("gpt2", "local-cpu", 8, 32, "32-true"),
    ("gpt2", "dgx-h100", 8, 512, "bf16-mixed"),
    ("vit-l16", "dgx-a100", 16, 1024, "16-mixed"),
    ("llama3-8b", "dgx-h100", 64, 512, "bf16-true"),
    ("llama3-70b", "dgx-a100", 256, 1024, "bf16-mixed"),
    ("llama3-405b", "meta-llama3", 2048, 1024, "bf16-mixed"),
]


@pytest.fixture(scope="module")
def parser() -> LightningArgumentParser:
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_argument("--data.batch_size", type=int)
    return parser


def chosen(found, count: int = 8) -> list[int]:
    """Rows of the search: the best, and some of every schedule and policy."""
    plan, rng = found.space.plan, np.random.default_rng(0)
    rows = {int(found.order[0])}
    for index in range(len(SCHEDULES)):
        for virtual in (1, 2, 4, 8):
            mask = (np.asarray(plan.schedule) == index) & (np.asarray(plan.virtual) == virtual)
            mask &= np.asarray(plan.pp) > 1
            rows |= {int(row) for row in rng.permutation(np.flatnonzero(mask))[:1]}
    rows |= {int(row) for row in rng.choice(len(found.space), min(count, len(found.space)), replace=False)}
    return sorted(rows)


@pytest.mark.parametrize(("model", "cluster", "devices", "batch", "precision"), SEARCHES)
def test_the_strategy_takes_every_plan(tmp_path, parser, model, cluster, devices, batch, precision):
    facts, machines = model_facts(model), cluster_facts(cluster, devices)
    limits = Limits(schedules=tuple(schedule.name for schedule in SCHEDULES))
    found = search(facts, machines, batch, precision=precision, limits=limits)
    for row in chosen(found):
        plan = found.candidate(row)
        check(plan, facts, trainer_yaml(plan, machines, precision, "cpu", "data.batch_size"), parser, tmp_path)


def check(plan, facts, text: str, parser, folder: Path) -> None:
    given = parser.parse_object(yaml.safe_load(text.replace("callbacks+:", "callbacks:")), defaults=False)
    trainer = given.trainer
    assert trainer.strategy.class_path == "lightning_4d.NDStrategy"
    arguments = trainer.strategy.init_args.as_dict()
    strategy = NDStrategy(**arguments)
    world = trainer.devices * trainer.num_nodes
    assert ParallelLayout.resolve(world, **strategy._sizes) == plan.layout
    samples = given.data.batch_size
    accumulated = trainer.accumulate_grad_batches
    assert samples * accumulated == plan.micro_batch * plan.microbatches
    if plan.schedule:
        check_pipeline(plan, facts, arguments, samples)
    policies = [each for each in trainer.callbacks if each.class_path.endswith("ActivationCheckpointing")]
    assert len(policies) == (plan.policy != "none")
    for each in policies:
        assert ActivationCheckpointing(**each.init_args.as_dict()).policy.kind == plan.policy


def check_pipeline(plan, facts, arguments, samples: int) -> None:
    """What NDStrategy checks when it knows the module and the batch."""
    ranks, kind = plan.layout.pipeline_parallel_size, find_schedule(arguments["pipeline_schedule"])
    assert kind.name == plan.schedule
    check_microbatches(kind, arguments["num_microbatches"], ranks)
    assert samples == arguments["num_microbatches"] * plan.micro_batch
    split = arguments.get("pipeline_split", "auto")
    if split == "auto":
        assert plan.virtual == kind.default_stages_per_rank
        check_count(int(facts.layers), ranks * kind.default_stages_per_rank)
    else:
        names = [f"blocks.{number}" for number in range(int(facts.layers))]
        assert len(split_by_name(split, names, kind, ranks)) == ranks * plan.virtual


@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
def test_every_precision_and_policy_is_the_trainers():
    for precision in PRECISIONS:
        taken = Trainer(accelerator="cpu", devices=1, precision=precision, logger=False).precision
        assert taken == {"16-mixed": "bf16-mixed"}.get(precision, precision), "a CPU has no fp16 autocast"
    for policy in POLICIES:
        ActivationCheckpointing(policy=policy)


def test_compiled_blocks_are_written():
    cluster = cluster_facts("dgx-h100", 64)
    found = search(model_facts("llama3-8b"), cluster, 512, compiled=True)
    content = yaml.safe_load(trainer_yaml(found.best, cluster, "bf16-mixed", compiled=True))
    assert content["trainer"]["strategy"]["init_args"]["compile_blocks"] is True
