"""The search: everything it proposes is legal and fits; what cannot work is answered with what would."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from lightning_4d.errors import PlanError
from lightning_4d.layout import ParallelLayout
from lightning_4d.planner import (
    Limits,
    cluster_facts,
    model_facts,
    recipe,
    rejections,
    search,
    smallest,
)
from lightning_4d.planner.facts import SCHEDULES
from lightning_4d.planner.legal import ModelSizes, axis_conflict, model_conflicts
from lightning_4d.planner.ours import POLICIES
from lightning_4d.planner.space import enumerate_plans, model_sizes


@pytest.fixture(scope="module")
def large():
    return search(model_facts("llama3-405b"), cluster_facts("meta-llama3", 16_384), 2048)


def test_16384_devices_in_seconds_of_processor_time():
    model, cluster = model_facts("llama3-405b"), cluster_facts("meta-llama3", 16_384)
    start = time.process_time()
    found = search(model, cluster, 2048)
    found.top(8)
    rejections(found)
    assert len(found.space) > 50_000
    assert time.process_time() - start < 60  # a second or so; only a search that enumerates in Python would fail


def test_every_candidate_is_legal(large):
    plan, model = large.space.plan, model_sizes(large.model)
    assert (np.asarray(plan.devices) == 16_384).all()
    assert (np.asarray(plan.samples) == 2048).all()
    rng = np.random.default_rng(0)
    for row in rng.choice(len(large.space), 300, replace=False):
        layout = large.space.layout(int(row))
        assert layout.world_size == 16_384
        assert model_conflicts(layout, model) == []
        schedule = SCHEDULES[int(plan.schedule[row])]
        if layout.pipeline_parallel_size > 1:
            assert layout.pipeline_parallel_size * plan.virtual[row] <= 126
            assert plan.microbatches[row] >= layout.pipeline_parallel_size
            assert schedule.chunks in (0, plan.virtual[row])


def test_the_ranking(large):
    top = large.top(8)
    assert len({each.layout for each in top}) == 8
    for each in top:
        assert each.bytes <= each.capacity
        assert each.fits
        assert sum(each.parts.values()) == pytest.approx(each.seconds)
        assert 0 < each.mfu < 1
    # Only a simpler layout may stand before a faster one, and only by the margin of the model's accuracy.
    assert all(b.seconds > 0.94 * a.seconds for a, b in itertools.pairwise(top))
    assert large.best == top[0]


def test_columns_equal_single_evaluations(large):
    for row in large.order[[0, 10, 1000]]:
        candidate = large.candidate(int(row))
        assert candidate.seconds == pytest.approx(large.seconds[row])
        assert candidate.bytes == pytest.approx(large.bytes[row])


def test_why_not(large):
    why = {each.family: each.reason for each in rejections(large)}
    assert "%" in why["no pipeline (pp=1)"]
    assert why["tp=16 and more"] == "tp=16 does not divide the 8 key/value heads"
    small = search(model_facts("llama3-8b"), cluster_facts("dgx-h100", 64), 512)
    reasons = {each.family: each.reason for each in rejections(small)}
    assert reasons["plain data parallelism"].startswith("needs 1")
    assert "GiB of 75" in reasons["plain data parallelism"]
    gpt3 = search(model_facts("gpt3-175b"), cluster_facts("dgx-a100", 1024), 1536, limits=Limits(pp=1))
    crossing = {each.family: each.reason for each in rejections(gpt3)}["tp across nodes (tp>8)"]
    assert "step time by pp1" in crossing
    assert "tensor-parallel communication" in crossing


@pytest.mark.parametrize(
    ("model", "devices", "batch", "advice"),
    [
        ("gpt2", 8, 512, "plain data parallelism"),
        ("llama3-8b", 64, 512, "shard parameters"),
        ("llama3-8b", 512, 1024, "more than 256 devices: HSDP"),
        ("llama3-405b", 16_384, 2048, "tensor, pipeline or context parallelism"),
    ],
)
def test_the_recipe(model, devices, batch, advice):
    found = search(model_facts(model), cluster_facts("dgx-h100", devices), batch)
    stages = recipe(found)
    stage = next(each for each in stages if advice in each.advice)
    assert stage.agrees or "%" in stage.finding or "times as fast" in stage.finding or "GiB" in stage.finding
    assert "tune for MFU" in stages[-1].advice


def test_small_models_get_data_parallelism_alone():
    best = search(model_facts("gpt2"), cluster_facts("dgx-a100", 8), 512).best
    assert best.layout.model_parallel_size == 1
    assert best.policy == "none"


def test_what_cannot_work_is_answered_with_what_would():
    model = model_facts("llama3-405b")
    found = search(model, cluster_facts("dgx-h100", 32), 64)
    with pytest.raises(PlanError, match=r"no layout fits: .* of 75 GiB; use at least \d+ of these devices, by pp"):
        _ = found.best
    enough = smallest(model, cluster_facts("dgx-h100"))
    assert enough is not None
    assert enough.fits
    less = enough.layout.world_size - 8
    assert not len(search(model, cluster_facts("dgx-h100", less), None).order)


def test_no_layout_at_all():
    model, cluster = model_facts("llama3-8b"), cluster_facts("dgx-h100", 16)
    with pytest.raises(PlanError, match="tp=3 does not divide the 32 attention heads"):
        search(model, cluster, 64, limits=Limits(tp=3))
    with pytest.raises(PlanError, match="the data-parallel size divides the batch"):
        search(model, cluster, 7, limits=Limits(pp=1, cp=1, tp=1))


def test_limits_hold():
    model, cluster = model_facts("llama3-8b"), cluster_facts("dgx-h100", 64)
    limits = Limits(pp=2, tp=4, micro_batch=2, schedules=("1f1b",), policies=("full",))
    for each in search(model, cluster, 256, limits=limits).top(5):
        assert (each.layout.pipeline_parallel_size, each.layout.tensor_parallel_size) == (2, 4)
        assert (each.micro_batch, each.schedule, each.policy) == (2, "1f1b", "full")


def test_users_own_measurements_override():
    model, cluster = model_facts("llama3-8b"), cluster_facts("dgx-h100", 64)
    limits = Limits(pp=1, cp=1, tp=1, dp_replicate=1, micro_batch=1)
    usual = search(model, cluster, 512, limits=limits).best
    faster = search(model, replace(cluster, matmul_tflops=800.0), 512, limits=limits).best
    slower = search(model, replace(cluster, measured_network_gbs=20.0), 512, limits=limits).best
    assert faster.parts["matmul"] < 0.8 * usual.parts["matmul"]
    assert slower.parts["sharding"] > 2 * usual.parts["sharding"]
    link = search(model, replace(cluster, measured_link_gbs=50.0), 512, limits=replace(limits, tp=8)).best
    fast = search(model, cluster, 512, limits=replace(limits, tp=8)).best
    assert link.parts["tensor"] > 2 * fast.parts["tensor"]


def test_monotone_in_what_costs():
    """More recomputation never costs memory; a longer sequence never less; larger shards never more memory."""
    model, cluster = model_facts("llama3-8b"), cluster_facts("dgx-h100", 64)
    fixed = Limits(pp=1, cp=1, tp=1, dp_replicate=1, micro_batch=1)
    by_policy = {name: _least(model, cluster, replace(fixed, policies=(name,))) for name in POLICIES}
    assert by_policy["none"] > by_policy["selective"] > by_policy["full"]
    assert _least(replace(model, seq_len=16_384), cluster, fixed) > _least(model, cluster, fixed)
    assert _least(model, cluster, replace(fixed, dp_replicate=8)) > _least(model, cluster, fixed)


def _least(model, cluster, limits):
    return float(search(model, cluster, 512, limits=limits).bytes.min())


def test_the_axes_are_judged_by_the_layouts_own_rules():
    sizes = ModelSizes(layers=32, heads=32, kv_heads=8, ffn_hidden=14336, seq_len=8192)
    assert axis_conflict("tp", 8, sizes) is None
    assert axis_conflict("tp", 16, sizes) == "tp=16 does not divide the 8 key/value heads"
    assert axis_conflict("cp", 3, sizes) == "cp=3 does not divide the 4096 token pairs of a sample"
    assert axis_conflict("pp", 33, sizes) == "pp=33 leaves stages without any of the 32 blocks"
    assert axis_conflict("dp_shard", 7, sizes) is None
    assert len(model_conflicts(ParallelLayout.parse("pp33.cp3.tp16"), sizes)) == 3
    space = enumerate_plans(model_facts("llama3-8b"), 64, 512)
    assert {int(size) for size in np.unique(space.plan.tp)} == {1, 2, 4, 8}


def test_compiled_blocks_are_planned_where_the_strategy_compiles_them():
    found = search(model_facts("llama3-8b"), cluster_facts("dgx-h100", 64), 512, compiled=True)
    assert {int(size) for size in np.unique(np.asarray(found.space.plan.tp))} == {1}
    assert {int(size) for size in np.unique(np.asarray(found.space.plan.cp))} == {1}
    with pytest.raises(PlanError, match="compiled blocks allow neither tensor nor context parallelism"):
        search(model_facts("llama3-8b"), cluster_facts("dgx-h100", 64), 512, compiled=True, limits=Limits(tp=2))


@pytest.mark.parametrize(
    ("limits", "devices", "batch", "message"),
    [
        (Limits(), 0, 8, "devices=0: it is a whole number of at least 1; use devices=1"),
        (Limits(), 8, 0, "batch=0: it is a whole number of at least 1; use batch=1"),
        (Limits(micro_batch=0), 8, 8, "micro_batch=0: it is a whole number"),
        (Limits(tp=-1), 8, 8, "tp=-1: it is a whole number"),
        (Limits(micro_batch=3), 8, 64, "micro_batch=3 with batch=64: .*; use micro_batch=2"),
        (Limits(schedules=("1f2b",)), 8, 8, "schedule '1f2b': known are .*; use '1f1b'"),
        (Limits(policies=("some",)), 8, 8, "recompute 'some': known are .*; use 'none'"),
        (Limits(1, 1, 4, 1, 1), 8, 8, "on 8 devices: its sizes make 4 processes; use devices=4"),
    ],
)
def test_limits_that_are_none(limits, devices, batch, message):
    with pytest.raises(PlanError, match=message):
        enumerate_plans(model_facts("gpt2"), devices, batch, limits)


def test_an_uneven_vocabulary_is_whole_on_every_tensor_parallel_rank():
    """GPT-2's 50,257 entries divide by nothing: NDStrategy leaves the tables whole."""
    model, cluster = model_facts("gpt2"), cluster_facts("dgx-h100", 2)
    fixed = Limits(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=2, micro_batch=1)
    even = search(replace(model, vocab=50_258), cluster, 8, limits=fixed).best
    uneven = search(model, cluster, 8, limits=fixed).best
    tables = 4 * (50_257 + 1024) * 768
    assert uneven.memory["parameters"] - even.memory["parameters"] == pytest.approx(tables / 2, rel=0.01)
    assert uneven.memory["logits"] > 1.5 * even.memory["logits"]
