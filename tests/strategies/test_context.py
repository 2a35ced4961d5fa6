"""Training with context parallelism gives the numbers of Lightning's own DDP with as many data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_4d import CPStrategy, NDStrategy
from lightning_4d.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_4d.parallel.context import SequenceTensor
from tests.harness import compare, reference, train
from tests.modules import Block, EncoderStack, SyntheticModule, TinyGPT, ViT
from tests.pool import WorkerError

SLOW = pytest.mark.slow


def check(
    pool,
    module,
    context=2,
    *,
    replicate=1,
    shard=1,
    rtol=1e-10,
    options: dict[str, Any] | None = None,
    only: dict[str, Any] | None = None,
    **kwargs: Any,
):
    """Compare every rank with the DDP rank, or the one process, that reads the same samples.

    `options` are the strategy's; `only` are arguments of `train` for the context-parallel run alone.
    """
    data = replicate * shard
    strategy = partial(
        NDStrategy,
        context_parallel_size=context,
        data_parallel_replicate_size=replicate,
        data_parallel_shard_size=shard,
        **(options or {}),
    )
    expected = reference(pool, data, module, **kwargs)
    actual = pool.run(data * context, train, module, strategy, **kwargs, **(only or {}))
    for rank, mine in enumerate(actual):
        compare(mine, expected[rank // context], rtol=rtol)


class Shifted(SyntheticModule):
    """Shifts labels in the step, ignores some (all of the first positions of the first sample), logs an accuracy."""

    def __init__(self, length: int = 13, layers: int = 2, chunks: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.length, self.chunks = length, chunks
        self.embedding = nn.Embedding(17, 16)
        self.layers = nn.ModuleList(Block(16, 4, rope=True, dropout=0.0) for _ in range(layers))
        self.head = nn.Linear(16, 17)
        self.accuracy = MulticlassAccuracy(17, average="micro", ignore_index=-100)

    def dataset(self, split: str) -> TensorDataset:
        count, generator = self._draw(split)
        tokens = torch.randint(17, (count, self.length), generator=generator)
        lengths = torch.randint(1, self.length, (count, 1), generator=generator)
        return TensorDataset(tokens, tokens.masked_fill(torch.arange(self.length) >= lengths, -100))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch: Any, stage: str) -> Tensor:
        tokens, labels = batch
        logits = self(tokens)
        assert isinstance(logits, SequenceTensor) == (type(self.trainer.strategy) is NDStrategy)
        self.accuracy(logits[:, :-1].argmax(-1), labels[:, 1:])
        self.log(f"{stage}_accuracy", self.accuracy)
        if self.chunks == 1:
            return F.cross_entropy(logits[:, :-1].reshape(-1, 17), labels[:, 1:].reshape(-1))
        pieces = zip(logits[:, :-1].chunk(self.chunks, 1), labels[:, 1:].chunk(self.chunks, 1), strict=True)
        total = sum(F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") for x, y in pieces)
        return total / (labels[:, 1:] != -100).sum()


class Mixed(TinyGPT):
    """Mixes positions between its blocks by a convolution; after them pools by attention that is written out."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.query = nn.Parameter(torch.randn(16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
            x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        weights = (x @ self.query).softmax(dim=1)
        return self.head(self.norm(x) + (weights[..., None] * x).sum(1, keepdim=True))


MODULES = {
    "learned positions": TinyGPT,
    "rope": partial(TinyGPT, rope=True, fused_qkv=False),
    "tied, odd length": partial(TinyGPT, tied=True, length=11),
    "vit": ViT,
    "encoder": EncoderStack,
    "ignored labels": Shifted,
    "chunked loss": partial(Shifted, chunks=3),
    "mixed positions": Mixed,
}


def some_slow(names: Iterable[str], *slow: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


@pytest.mark.parametrize("name", some_slow(MODULES, "tied, odd length", "chunked loss", "learned positions"))
def test_every_kind_of_module(pool, name):
    check(pool, MODULES[name], limit_val_batches=2)


@pytest.mark.parametrize(("replicate", "shard", "context"), [(1, 2, 2), pytest.param(2, 1, 2, marks=SLOW), (1, 1, 4)])
def test_with_data_axes(pool, replicate, shard, context):
    check(pool, Shifted, context, replicate=replicate, shard=shard, limit_val_batches=2)


@pytest.mark.parametrize(
    ("context", "method", "ulysses"), [(2, "ulysses", "auto"), pytest.param(4, "hybrid", 2, marks=SLOW)]
)
def test_ulysses_and_hybrid(pool, context, method, ulysses):
    options = {"context_parallel_attention": method, "ulysses_size": ulysses}
    check(pool, partial(TinyGPT, rope=True), context, options=options, limit_val_batches=2)


@pytest.mark.parametrize("module", [TinyGPT, pytest.param(EncoderStack, marks=SLOW)])
def test_dropout_is_that_of_ddp(pool, module):
    # With two data-parallel ranks: without a process group Lightning does not seed anew before it makes one.
    check(pool, partial(module, dropout=0.3), shard=2)


def test_accumulation_and_clipping(pool):
    check(pool, Shifted, shard=2, accumulate_grad_batches=3, gradient_clip_val=0.05, steps=2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_precision(pool, precision):
    check(pool, TinyGPT, precision=precision, rtol=1e-5 if precision == "32-true" else 3e-2)


CHECKPOINTING: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "segments": {"policy": "sqrt", "segments": 2},
    "sqrt": {"policy": "sqrt"},
    "nested": {"policy": "sqrt", "segments": 1, "nested": True},
    "selective": {"policy": "selective"},
}


def checkpointing(**options: Any) -> list[Callback]:
    return [ActivationCheckpointing(**options)]


@pytest.mark.parametrize("policy", some_slow(CHECKPOINTING, "full", "sqrt", "selective"))
def test_activation_checkpointing(pool, policy):
    dropout = policy == "segments"
    module = partial(TinyGPT, layers=4, dropout=0.2 if dropout else 0.0)
    only = {"callbacks": partial(checkpointing, **CHECKPOINTING[policy])}
    check(pool, module, shard=2 if dropout else 1, only=only)


class Checkpointed(TinyGPT):
    """Uses torch's own checkpointing."""

    def __init__(self, use_reentrant: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))


def test_checkpointing_of_torch(pool):
    check(pool, Checkpointed)


def test_reentrant_checkpointing_is_refused(pool):
    with pytest.raises(WorkerError, match="CheckpointFunction returns a tensor whose sequence is divided"):
        pool.run(2, train, partial(Checkpointed, use_reentrant=True), CPStrategy)


def test_bf16_counts_more_than_256_labels(pool):
    module = partial(TinyGPT, length=301, layers=1, batch_size=1, samples=4)
    check(pool, module, precision="bf16-true", rtol=5e-2, steps=1)


def test_cp_strategy_divides_within_a_node_by_default(pool):
    expected = reference(pool, 1, TinyGPT)
    for mine in pool.run(2, train, TinyGPT, CPStrategy):
        compare(mine, expected[0], rtol=1e-10)
