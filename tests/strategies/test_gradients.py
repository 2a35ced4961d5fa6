"""Accumulation and clipping: the numbers of DDP, and one communication per optimizer step."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from lightning_4d import NDStrategy
from lightning_4d.parallel.gradients import clip_gradients_by_norm
from tests.harness import compare, reference, train
from tests.modules import MLP, TinyGPT, WithScalar, WithUnused

HSDP = partial(NDStrategy, data_parallel_replicate_size=2, data_parallel_shard_size=2)


def both(pool, world, module, strategy, reference_strategy="ddp", **kwargs):
    expected = reference(pool, world, module, strategy=reference_strategy, **kwargs)
    actual = pool.run(world, train, module, strategy, **kwargs)
    compare(actual, expected, rtol=1e-10)
    return actual


@pytest.mark.parametrize("module", [TinyGPT, WithScalar, partial(TinyGPT, tied=True)], ids=["gpt", "scalar", "tied"])
def test_accumulation_with_a_short_last_window(pool, module):
    # 5 batches per epoch in windows of 3: the last window holds 2.
    both(pool, 4, partial(module, samples=80), HSDP, accumulate_grad_batches=3, steps=4, max_epochs=2)


def test_gradients_are_communicated_once_per_optimizer_step(pool):
    module = partial(TinyGPT, layers=2, samples=80)
    kwargs = {"accumulate_grad_batches": 4, "steps": 4, "max_epochs": 2, "count_communication": True}
    records = pool.run(4, train, module, HSDP, **kwargs)[0].communication
    groups = 3  # two blocks and the root
    for record in records[1:]:  # the first step also compares which parameters are used
        assert record.get("reduce_scatter", 0) == groups, records
        assert record.get("all_reduce", 0) == groups, records


@pytest.mark.parametrize(
    "clip", [{"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}]
)
@pytest.mark.parametrize("module", [TinyGPT, WithScalar], ids=["gpt", "scalar"])
def test_clipping(pool, module, clip):
    (record, *_) = both(pool, 4, module, HSDP, **clip)
    assert any(not torch.equal(record.gradients[0][n], record.clipped[0][n]) for n in record.gradients[0])


class OtherNorm(WithScalar):
    """Clips by another norm, as users do: by overriding Lightning's hook."""

    norm_type = math.inf

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01, norm_type=self.norm_type)


class OneNorm(OtherNorm):
    norm_type = 1.0


class ThreeNorm(OtherNorm):
    norm_type = 3.0


@pytest.mark.parametrize("module", [OtherNorm, OneNorm, ThreeNorm])
def test_torch_clipping_in_the_users_hook(pool, module):
    # On 2 ranks: torch's own infinity norm fails where a rank's shard is empty, as here of the last bias on 4.
    both(pool, 2, module, partial(NDStrategy, data_parallel_replicate_size=2, data_parallel_shard_size=1))


def norms(norm_type):
    """The norm that our function and torch's find, on sharded gradients and on the gathered ones."""
    found = {}

    class Probe(WithUnused):
        def on_before_optimizer_step(self, optimizer):
            whole = [p.grad.full_tensor() for p in self.parameters() if p.grad is not None]
            expected = torch.nn.utils.get_total_norm(whole, norm_type)
            before = [g.clone() for g in whole]
            found["norm"] = (float(clip_gradients_by_norm(self.parameters(), 0.1, norm_type)), float(expected))
            after = [p.grad.full_tensor() for p in self.parameters() if p.grad is not None]
            scale = min(1.0, 0.1 / (float(expected) + 1e-6))
            found["error"] = max(float((a - b * scale).abs().max()) for a, b in zip(after, before, strict=True))

    train(Probe, HSDP, steps=1)
    return found


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, math.inf])
def test_norm_over_shards_counts_each_element_once(pool, norm_type):
    for found in pool.run(4, norms, norm_type):
        mine, expected = found["norm"]
        assert mine == pytest.approx(expected, rel=1e-12)
        assert found["error"] < 1e-14


def broken_accumulation():
    from lightning_4d.parallel.data import DataParallel

    def never(self, synchronise):
        for unit in self.units:
            unit.set_requires_gradient_sync(False, recurse=False)

    original = DataParallel._set_synchronise
    DataParallel._set_synchronise = never
    try:
        return train(MLP, NDStrategy, accumulate_grad_batches=2)
    finally:
        DataParallel._set_synchronise = original


def test_fault_gradients_that_are_never_reduced_are_noticed(pool):
    expected = reference(pool, 2, MLP, accumulate_grad_batches=2)
    actual = pool.run(2, broken_accumulation)
    with pytest.raises(AssertionError, match="gradients"):
        compare(actual, expected, rtol=1e-3)


def scaled_reduction(factor):
    from torch.distributed.fsdp import FSDPModule

    from lightning_4d.parallel.data import DataParallel

    original = DataParallel.wrap

    def wrap(self, blocks, options):
        original(self, blocks, options)
        for unit in self.units[:1]:
            assert isinstance(unit, FSDPModule)
            unit.set_gradient_divide_factor(factor)

    DataParallel.wrap = wrap
    try:
        return train(TinyGPT, NDStrategy)
    finally:
        DataParallel.wrap = original


def test_fault_a_wrong_scale_in_one_block_is_noticed(pool):
    expected = reference(pool, 2, TinyGPT)
    compare(pool.run(2, scaled_reduction, 2.0), expected, rtol=1e-10)  # the right factor
    with pytest.raises(AssertionError, match=r"blocks\.0"):
        compare(pool.run(2, scaled_reduction, 1.0), expected, rtol=1e-10)
