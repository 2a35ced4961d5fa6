"""Training in pipeline stages gives the numbers of one process, or of DDP with as many data-parallel ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from lightning_4d import NDStrategy
from lightning_4d.callbacks import ActivationCheckpointing
from tests import staged_modules as staged
from tests.harness import compare, reference, staged_tensors, train
from tests.modules import EncoderStack, TinyGPT, ViT
from tests.strategies.scenarios import trainer_with

FOUR = partial(TinyGPT, layers=4)


def stages(pipeline: int, shard: int = 1, **kwargs: Any) -> partial[NDStrategy]:
    return partial(NDStrategy, pipeline_parallel_size=pipeline, data_parallel_shard_size=shard, **kwargs)


def check(pool, module, pipeline, shard=1, replicate=1, *, rtol=1e-10, options: dict[str, Any] | None = None, **kwargs):
    data = shard * replicate
    expected = reference(pool, data, module, **kwargs)
    strategy = stages(pipeline, shard, data_parallel_replicate_size=replicate, **(options or {}))
    actual = pool.run(pipeline * data, train, module, strategy, gather=staged_tensors, **kwargs)
    for rank, mine in enumerate(actual):
        compare(mine, expected[rank % data], rtol=rtol)


SCHEDULES = [
    ("gpipe", 2, 1),
    ("gpipe", 4, 4),
    ("1f1b", 2, "auto"),
    ("1f1b", 4, 4),
    ("interleaved_1f1b", 2, 4),
    ("looped_bfs", 2, 2),
    ("interleaved_zero_bubble", 2, 4),
    ("zbv", 2, 4),
    ("dualpipev", 2, 4),
]


@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), SCHEDULES)
def test_every_schedule(pool, schedule, ranks, microbatches):
    options = {"pipeline_schedule": schedule, "num_microbatches": microbatches}
    check(pool, FOUR, ranks, limit_val_batches=2, options=options)


@pytest.mark.parametrize(
    "module",
    [
        partial(FOUR, tied=True),
        partial(FOUR, rope=True, fused_qkv=False),
        partial(ViT),
        partial(EncoderStack),
    ],
    ids=["tied", "rope", "vit", "encoder"],
)
def test_every_kind_of_module(pool, module):
    check(pool, module, 2, limit_val_batches=2)


@pytest.mark.parametrize(("schedule", "tied"), [("1f1b", True), ("zbv", True), ("interleaved_1f1b", False)])
def test_stages_of_sharded_blocks(pool, schedule, tied):
    check(pool, partial(FOUR, tied=tied), 2, shard=2, limit_val_batches=2, options={"pipeline_schedule": schedule})


def train_each(cases: list[dict[str, Any]], strategy: Any, **common: Any) -> list[Any]:
    """On one rank: train each case with the same strategy settings."""
    return [train(**(common | case), strategy=strategy) for case in cases]


def check_each(pool, cases: dict[str, dict[str, Any]], pipeline, shard=1, *, rtol=1e-10, options=None, **common):
    """Like `check`, many cases in one set of processes."""
    settings = list(cases.values())
    expected = pool.run(shard, train_each, settings, "ddp" if shard > 1 else "auto", timeout=300, **common)
    strategy = stages(pipeline, shard, **(options or {}))
    actual = pool.run(pipeline * shard, train_each, settings, strategy, timeout=300, gather=staged_tensors, **common)
    for rank, mine in enumerate(actual):
        for name, one, other in zip(cases, mine, expected[rank % shard], strict=True):
            try:
                compare(one, other, rtol=rtol)
            except AssertionError as error:
                raise AssertionError(f"{name}, rank {rank}: {error}") from error


TRAINERS = {
    "accumulation": {"module": FOUR, "accumulate_grad_batches": 3},
    "clipping": {"module": FOUR, "gradient_clip_val": 0.05},
    "clipping by value": {"module": FOUR, "gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "clipping of tied weights": {"module": partial(FOUR, tied=True), "gradient_clip_val": 0.05},
    "last batch of 1": {"module": partial(FOUR, samples=9), "steps": -1, "max_epochs": 2, "limit_val_batches": 1.0},
    "batch of 5": {"module": partial(FOUR, batch_size=5, samples=18), "steps": 4},
    "sanity check": {"module": FOUR, "num_sanity_val_steps": 2, "limit_val_batches": 2},
}


@pytest.mark.parametrize(("schedule", "shard"), [("1f1b", 2), pytest.param("zbv", 2, marks=pytest.mark.slow)])
def test_trainer_settings(pool, schedule, shard):
    check_each(pool, TRAINERS, 2, shard, options={"pipeline_schedule": schedule})


MODULES = [
    staged.InSequential,
    staged.WithKeywords,
    staged.WithTuples,
    staged.Conditioned,
    staged.WithSkips,
    staged.WithDeepSupervision,
    staged.Frozen,
    staged.Unfreezing,
    staged.InEvalNorm,
    staged.SumLoss,
    staged.RaggedLabels,
    staged.Collecting,
    staged.NestedBatches,
    staged.DynamicLengths,
]


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.slow)])
def test_modules_that_are_a_challenge(pool, schedule):
    cases = {module.__name__: {"module": module} for module in MODULES}
    check_each(
        pool,
        cases,
        2,
        options={"pipeline_schedule": schedule},
        limit_val_batches=2,
        max_epochs=1,
        steps=-1,
        limit_train_batches=3,
    )


def test_a_balance_loss_with_one_microbatch(pool):
    options = {"pipeline_schedule": "gpipe", "num_microbatches": 1}
    check(pool, staged.WithAuxiliaryLoss, 2, limit_val_batches=2, options=options)


def test_an_entry_without_samples_is_not_cut(pool):
    check(pool, staged.SquareMask, 2, options={"num_microbatches": 4})


def test_batch_norm_with_one_microbatch(pool):
    options = {"pipeline_schedule": "gpipe", "num_microbatches": 1}
    check(pool, staged.WithBatchNorm, 2, limit_val_batches=2, options=options)


def checkpointed(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"module": partial(FOUR, dropout=0.0), "callbacks": partial(_checkpointing, args, kwargs)}


def _checkpointing(args: Any, kwargs: Any) -> list[Any]:
    return [ActivationCheckpointing(*args, **kwargs)]


POLICIES = {
    "none": checkpointed("none"),
    "full": checkpointed("full"),
    "sqrt": checkpointed("sqrt"),
    "nested": checkpointed("sqrt", nested=True, segments=1),
    "every_k": checkpointed("every_k", every_k=2),
    "selective": checkpointed("selective"),
    "budget": checkpointed("budget", budget_bytes=300_000),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("schedule", "shard"),
    [
        ("1f1b", 2),
        pytest.param("zbv", 2, marks=SLOW),
        pytest.param("gpipe", 1, marks=SLOW),
        pytest.param("interleaved_1f1b", 1, marks=SLOW),
        pytest.param("interleaved_zero_bubble", 1, marks=SLOW),
        pytest.param("looped_bfs", 1, marks=SLOW),
        pytest.param("dualpipev", 1, marks=SLOW),
    ],
)
def test_activation_checkpointing(pool, schedule, shard):
    check_each(pool, POLICIES, 2, shard, options={"pipeline_schedule": schedule})


def trained_twice(strategy: Any) -> dict[str, Any]:
    """On one rank: fit a module, validate and fit it again, each with a Trainer of its own."""
    module = FOUR()
    for run in ("fit", "validate", "fit"):
        chosen = strategy if isinstance(strategy, str) else strategy()
        trainer = trainer_with(lambda chosen=chosen: chosen)(max_steps=2, limit_val_batches=2)
        getattr(trainer, run)(module)
    return staged_tensors(dict(module.named_parameters()))


def test_a_module_goes_from_trainer_to_trainer(pool):
    expected = pool.run(2, trained_twice, "ddp")[0]
    for actual in pool.run(4, trained_twice, stages(2, 2)):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-12)


def test_a_course_that_changes_with_the_epoch(pool):
    check(pool, staged.LaterSkip, 2, max_epochs=2, steps=-1, limit_train_batches=2)


def test_a_course_that_no_record_tells_shows(pool):
    # Not refused: what was not carried to the last stage is nan there, never a number that looks right.
    for recording in pool.run(2, train, staged.OtherSteps, stages(2), steps=2, gather=staged_tensors):
        assert not math.isnan(recording.losses[0])
        assert math.isnan(recording.losses[1])
