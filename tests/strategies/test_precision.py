"""Every precision gives the numbers of DDP in that precision."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lightning_4d import NDStrategy
from lightning_4d import _torch_private as private
from lightning_4d.callbacks import ActivationCheckpointing
from tests.harness import compare, reference, train
from tests.modules import EncoderStack, TinyGPT
from tests.strategies.scenarios import quiet, trainer_with

HSDP = partial(NDStrategy, data_parallel_replicate_size=2, data_parallel_shard_size=2)


@pytest.mark.parametrize(
    ("precision", "rtol"),
    [
        ("32-true", 1e-5),
        # Sums of 4 ranks in bfloat16 (8 bits) are rounded in another order than DDP's.
        ("bf16-true", 2e-2),
        # The same kernels on the same numbers: only the order of the fp32 sums over ranks differs.
        ("bf16-mixed", 1e-6),
    ],
)
def test_precision_equals_ddp(pool, precision, rtol):
    module = partial(TinyGPT, dropout=0.1)
    expected = reference(pool, 4, module, precision=precision, limit_val_batches=2)
    actual = pool.run(4, train, module, HSDP, precision=precision, limit_val_batches=2)
    compare(actual, expected, rtol=rtol)


@pytest.mark.parametrize("module", [partial(TinyGPT, tied=True), EncoderStack], ids=["tied", "encoder"])
def test_bf16_mixed_of_other_modules(pool, module):
    expected = reference(pool, 2, module, precision="bf16-mixed", accumulate_grad_batches=2)
    actual = pool.run(2, train, module, NDStrategy, precision="bf16-mixed", accumulate_grad_batches=2)
    compare(actual, expected, rtol=1e-6)


class Overflowing(TinyGPT):
    """Overflows in the second step on rank 1 only, and in the head's last row only."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 1:
            loss = loss + self.head.weight[-1].float().sum() * float("inf")
        return loss


def scaled() -> MixedPrecision:
    # Trainer(precision="16-mixed") becomes bf16-mixed on a CPU; the plugin itself does not.
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))


def train_scaled(module, strategy):
    plugin = scaled()
    recording = train(module, strategy, precision=None, plugins=plugin, steps=4, gradient_clip_val=0.5)
    return recording, plugin.scaler.get_scale()


def test_fp16_scaler_decides_the_same_on_all_ranks(pool):
    expected = pool.run(2, train_scaled, Overflowing, "ddp")
    actual = pool.run(2, train_scaled, Overflowing, NDStrategy)
    for (mine, my_scale), (theirs, their_scale) in zip(actual, expected, strict=True):
        assert my_scale == their_scale
        assert my_scale < 64.0 * 2  # it did shrink once
        compare(mine, theirs, rtol=1e-3, what=("parameters", "clipped"))


class Records(nn.Module):
    """Notes the dtype it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(3))
        self.seen = []

    def forward(self, x):
        self.seen.append((str(x.dtype), str(self.table.dtype)))
        return x


class WithTable(TinyGPT):
    def __init__(self):
        super().__init__()
        self.records = Records()

    def forward(self, tokens):
        self.records(self.embedding(tokens))
        return super().forward(tokens)


def dtypes(strategy, precision):
    seen = {}

    def make():
        seen["module"] = WithTable()
        return seen["module"]

    train(make, strategy, precision=precision, steps=1)
    module = seen["module"]
    parameters = {str(p.dtype) for p in module.parameters()}
    return module.records.seen, parameters


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_dtypes_of_buffers_activations_and_parameters_are_those_of_ddp(pool, precision):
    assert pool.run(2, dtypes, NDStrategy, precision) == pool.run(2, dtypes, "ddp", precision)


class Mixture(TinyGPT):
    """A GPT with weights that must not be gathered in bf16, for one reason each."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.twice = nn.Linear(self.head.in_features, self.head.in_features)
        self.cast_by_hand = nn.Linear(self.head.in_features, self.head.in_features)

    def loss(self, batch, stage):
        tokens = batch[0] if isinstance(batch, (tuple, list)) else batch
        x = self.embedding(tokens)
        x = self.twice(torch.tanh(self.twice(x)))
        with torch.autocast("cpu", enabled=False):
            x = nn.functional.linear(x.float(), self.cast_by_hand.weight.float(), self.cast_by_hand.bias)
        return super().loss(batch, stage) + x.square().mean() + 0.1 * self.head.weight.float().norm()


def chosen(module, **kwargs):
    from lightning_4d.parallel.data import sharded

    made = {}

    def make():
        made["module"] = module()
        return made["module"]

    recording = train(make, NDStrategy, precision="bf16-mixed", limit_val_batches=2, **kwargs)
    return recording, sharded(made["module"])._low_precision.chosen_names


def test_weights_are_gathered_in_bf16_only_where_autocast_would_cast_them(pool):
    module = partial(Mixture, layers=2)
    expected = reference(pool, 2, module, precision="bf16-mixed", limit_val_batches=2)
    for rank, (recording, names) in enumerate(pool.run(2, chosen, module)):
        compare(recording, expected[rank], rtol=1e-6)
        matrices = {n for n in names if n.endswith("weight")}
        assert {n.split(".")[1] for n in matrices if n.startswith("blocks")} == {"0", "1"}
        assert not any("norm" in name or "embedding" in name for name in names)
        assert not {n.split(".")[0] for n in names} & {"twice", "cast_by_hand"}
        assert "head.weight" not in names  # its norm is taken as well


class Samples(TinyGPT):
    """Calls itself outside a step, without autocast, as a sampling callback does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.sampled = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            tokens = batch[0] if isinstance(batch, (tuple, list)) else batch
            self.sampled.append(float(self(tokens[:, :-1]).float().square().mean()))


def sampled(strategy):
    made = {}

    def make():
        made["module"] = Samples(layers=2)
        return made["module"]

    recording = train(make, strategy, precision="bf16-mixed", steps=4, accumulate_grad_batches=2)
    return recording, made["module"].sampled


def test_calls_from_outside_a_step_see_full_precision(pool):
    expected = pool.run(2, sampled, "ddp")
    for (mine, my_samples), (theirs, their_samples) in zip(pool.run(2, sampled, NDStrategy), expected, strict=True):
        compare(mine, theirs, rtol=1e-6)
        assert my_samples == pytest.approx(their_samples, rel=1e-6)


class Gathers(Callback):
    """Notes, in each step, which parameters are gathered in another dtype than their own."""

    def __init__(self):
        self.seen = []

    def on_before_backward(self, trainer, module, loss):
        parameters = private.fsdp_parameters(trainer.strategy.data.units)
        self.seen.append(sorted(p._param_fqn for p in parameters if p.param_dtype == torch.bfloat16))


def gathers():
    quiet()
    gathered = Gathers()
    settings = {"precision": "bf16-mixed", "max_steps": 3, "limit_val_batches": 0, "callbacks": [gathered]}
    trainer = trainer_with(NDStrategy, **settings)()
    trainer.fit(TinyGPT(layers=2))
    return gathered.seen, sorted(trainer.strategy.data._low_precision.chosen_names)


def test_chosen_weights_are_gathered_in_bf16_from_the_next_step_on(pool):
    for seen, names in pool.run(2, gathers):
        assert names
        assert seen == [[], names, names]


def checkpointing():
    return [ActivationCheckpointing("full")]


def test_checkpointed_weights_are_gathered_in_bf16_with_the_same_numbers(pool):
    module = partial(TinyGPT, layers=2)
    plain = pool.run(2, chosen, module)
    for (recording, names), (expected, usual) in zip(pool.run(2, chosen, module, callbacks=checkpointing), plain):
        assert names == usual
        assert any(name.startswith("blocks.0") for name in names)
        compare(recording, expected, rtol=1e-6)
