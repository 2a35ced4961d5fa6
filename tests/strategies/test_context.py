"""Training with context parallelism gives the numbers of Lightning's own DDP with as many data-parallel ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lightning_4d import CPStrategy, NDStrategy
from tests.harness import compare, reference, train
from tests.modules import EncoderStack, TinyGPT, ViT


def check(
    pool, module, context=2, *, replicate=1, shard=1, rtol=1e-10, options: dict[str, Any] | None = None, **kwargs: Any
):
    """Compare every rank with the DDP rank, or the one process, that reads the same samples."""
    data = replicate * shard
    strategy = partial(
        NDStrategy,
        context_parallel_size=context,
        data_parallel_replicate_size=replicate,
        data_parallel_shard_size=shard,
        **(options or {}),
    )
    expected = reference(pool, data, module, **kwargs)
    actual = pool.run(data * context, train, module, strategy, **kwargs)
    for rank, mine in enumerate(actual):
        compare(mine, expected[rank // context], rtol=rtol)


@pytest.mark.parametrize(
    "module",
    [
        TinyGPT,
        partial(TinyGPT, rope=True, fused_qkv=False),
        partial(TinyGPT, tied=True, length=11),
        ViT,
        EncoderStack,
    ],
    ids=["learned positions", "rope", "tied, odd length", "vit", "encoder"],
)
def test_every_kind_of_module(pool, module):
    check(pool, module, limit_val_batches=2)


@pytest.mark.parametrize(("replicate", "shard", "context"), [(1, 2, 2), (2, 1, 2), (1, 1, 4)])
def test_with_data_axes(pool, replicate, shard, context):
    check(pool, TinyGPT, context, replicate=replicate, shard=shard, limit_val_batches=2)
