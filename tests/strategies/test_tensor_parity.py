"""Tensor parallelism gives the numbers of one process, or of DDP with as many data-parallel ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from lightning_4d import NDStrategy, TPStrategy
from tests.harness import compare, reference, train
from tests.modules import MLP, EncoderStack, TinyGPT, ViT, WithScalar
from tests.parallel.tensor.modules import Llama, NanoGPT, Perceptron, Running, SkipStack, Unusual

GPT = partial(TinyGPT, vocab=32, layers=2)
UNUSED = "ddp_find_unused_parameters_true"


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def check(pool, module, tp, shard=1, replicate=1, *, rtol=1e-10, options: dict[str, Any] | None = None, **kwargs):
    strategy = kwargs.pop("strategy", "ddp")
    expected = reference(pool, shard * replicate, module, strategy=strategy, **kwargs)
    layout = partial(
        NDStrategy,
        data_parallel_replicate_size=replicate,
        data_parallel_shard_size=shard,
        tensor_parallel_size=tp,
        **(options or {}),
    )
    actual = pool.run(tp * shard * replicate, train, module, layout, **kwargs)
    for rank, mine in enumerate(actual):
        compare(mine, expected[rank // tp], rtol=rtol, label=f"rank {rank} ")


@pytest.mark.parametrize(("tp", "shard", "replicate"), [(2, 1, 1), slow(4, 1, 1), (2, 2, 1), slow(2, 1, 2)])
def test_gpt_on_every_layout(pool, tp, shard, replicate):
    check(pool, GPT, tp, shard, replicate, limit_val_batches=2)


@pytest.mark.parametrize(
    "module",
    [
        partial(TinyGPT, vocab=32, layers=2, fused_qkv=False, rope=True, tied=True),
        slow(NanoGPT),
        slow(partial(NanoGPT, frozen=True)),
        slow(Llama),
        partial(Llama, kv_heads=1, qk_norm="full", fused=True),
        slow(partial(Llama, parallel=True, qk_norm="")),
        partial(EncoderStack, layers=2),
        slow(partial(ViT, layers=2)),
        slow(MLP),
        Perceptron,
        SkipStack,
        slow(WithScalar),
        slow(Running),
    ],
    ids=[
        "separate", "nano", "frozen", "llama", "llama_fused", "parallel", "encoder", "vit", "mlp", "perceptron",
        "skips", "scalar", "buffers",
    ],
)  # fmt: skip
def test_every_kind_of_module(pool, module):
    check(pool, module, 2, limit_val_batches=2)


@pytest.mark.parametrize(
    "module", [NanoGPT, slow(partial(Llama, vocab=23)), slow(EncoderStack)], ids=["nano", "llama", "encoder"]
)
def test_with_sharded_data_axes(pool, module):
    check(pool, module, 2, 2)


@pytest.mark.parametrize(
    "options",
    [
        slow({"label_smoothing": 0.1}),
        {"weighted": True, "label_smoothing": 0.2, "ignore_index": 3},
        slow({"reduction": "sum", "ignore_index": 5}),
        slow({"reduction": "none", "weighted": True}),
        slow({"by_sequence": True, "ignore_index": 0}),
        slow({"smoothed_by_hand": True}),
    ],
    ids=lambda options: "-".join(options),
)
def test_losses_on_a_divided_vocabulary(pool, options):
    check(pool, partial(Llama, layers=1, loss_options=options, lr=0.01), 2, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "heads", "vocab"), [(2, 3, 24), (4, 2, 24), (2, 4, 7)], ids=["heads", "few", "vocab"])
def test_what_does_not_divide_stays_whole(pool, tp, heads, vocab):
    check(pool, partial(TinyGPT, vocab=vocab, layers=2, dim=48, heads=heads), tp, steps=2)


@pytest.mark.slow
def test_code_without_rules_is_gathered(pool):
    check(pool, Unusual, 2, steps=2, strategy=UNUSED)


@pytest.mark.slow
def test_dropout_is_that_of_one_process(pool):
    # Masks of whole tensors are drawn whole and cut, so that they are the very same on the CPU.
    for module in (NanoGPT, partial(TinyGPT, vocab=32, rope=True), EncoderStack):
        module = partial(module, dropout=0.3)
        (expected,) = reference(pool, 1, module, alone="ddp")  # which resets the seed as ours does
        for actual in pool.run(2, train, module, TPStrategy):
            compare(actual, expected, rtol=1e-10)
        check(pool, module, 2, 2)


@pytest.mark.parametrize("clip", ["norm", slow("value")])
def test_clipping(pool, clip):
    for tp, shard in ((2, 1), (2, 2)):
        check(pool, NanoGPT, tp, shard, gradient_clip_val=0.05, gradient_clip_algorithm=clip)


@pytest.mark.slow
def test_accumulation(pool):
    check(pool, NanoGPT, 2, 2, accumulate_grad_batches=2, steps=2)


class WithAdamW(NanoGPT):
    """Rows of gradients that are zero in exact arithmetic would be noise divided by noise; eps keeps them small."""

    kind = "foreach"

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        return AdamW(parameters, lr=0.01, eps=1e-3, **{self.kind: True})


class WithFusedAdamW(WithAdamW):
    kind = "fused"


@pytest.mark.parametrize("module", [WithAdamW, slow(WithFusedAdamW)], ids=["foreach", "fused"])
def test_adamw(pool, module):
    check(pool, partial(module, frozen=True), 2, 2, gradient_clip_val=0.5)
    check(pool, module, 2)


class Momentum(NanoGPT):
    def configure_optimizers(self) -> Any:
        return SGD([{"params": [self.wte.weight]}, {"params": self.h.parameters()}], lr=0.1, momentum=0.9)


@pytest.mark.slow
def test_parameters_taken_by_attribute(pool):
    check(pool, Momentum, 2, 2)


def test_tp_strategy_takes_the_devices_of_a_node(pool):
    expected = reference(pool, 1, GPT)
    for actual in pool.run(2, train, GPT, TPStrategy):
        compare(actual, expected[0], rtol=1e-10)
    compare(pool.run(2, train, GPT, "tp")[0], expected[0], rtol=1e-10)


@pytest.mark.slow
def test_float32_and_bfloat16(pool):
    check(pool, GPT, 2, 2, precision="32-true", rtol=1e-5)
    torch.manual_seed(0)
    check(pool, GPT, 2, precision="bf16-mixed", rtol=0.05, steps=1)
