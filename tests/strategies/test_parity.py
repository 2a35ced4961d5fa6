"""Training on any data layout gives the numbers of Lightning's own DDP with as many data-parallel ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lightning_4d import HSDPStrategy, NDStrategy
from tests.harness import compare, reference, train
from tests.modules import GAN, MLP, EncoderStack, TinyGPT, ViT, WithBuffers, WithScalar, WithUnused

LAYOUTS = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]
UNUSED = "ddp_find_unused_parameters_true"


def layout(replicate: int, shard: int, **kwargs: Any) -> partial[NDStrategy]:
    return partial(NDStrategy, data_parallel_replicate_size=replicate, data_parallel_shard_size=shard, **kwargs)


def check(
    pool, module, replicate, shard, *, strategy="ddp", rtol=1e-10, options: dict[str, Any] | None = None, **kwargs
):
    world = replicate * shard
    expected = reference(pool, world, module, strategy=strategy, **kwargs)
    actual = pool.run(world, train, module, layout(replicate, shard, **(options or {})), **kwargs)
    for mine, theirs in zip(actual, expected, strict=True):
        compare(mine, theirs, rtol=rtol)


@pytest.mark.parametrize(("replicate", "shard"), LAYOUTS)
def test_gpt_on_every_layout(pool, replicate, shard):
    check(pool, TinyGPT, replicate, shard, limit_val_batches=2)


@pytest.mark.parametrize(
    ("module", "strategy"),
    [
        (partial(TinyGPT, tied=True), "ddp"),
        (MLP, "ddp"),
        (ViT, "ddp"),
        (EncoderStack, "ddp"),
        (WithScalar, "ddp"),
        (WithUnused, UNUSED),
        (WithBuffers, "ddp"),
        (GAN, UNUSED),
    ],
    ids=["tied", "mlp", "vit", "encoder", "scalar", "unused", "buffers", "gan"],
)
def test_every_kind_of_module(pool, module, strategy):
    check(pool, module, 2, 2, strategy=strategy, limit_val_batches=2)


def test_buffers_changed_by_training_after_a_sanity_check(pool):
    # The sanity check compares buffers before any of them has changed.
    check(pool, partial(WithBuffers, samples=24), 2, 1, num_sanity_val_steps=1, limit_val_batches=2, steps=6)


def test_hsdp_strategy_shards_inside_a_node_by_default(pool):
    expected = reference(pool, 2, TinyGPT)
    actual = pool.run(2, train, TinyGPT, HSDPStrategy)
    compare(actual[0], expected[0], rtol=1e-10)
