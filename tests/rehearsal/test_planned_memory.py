"""The planner's memory against rehearsed steps, in which every tensor that exists is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_4d.layout import ParallelLayout
from lightning_4d.parallel.recompute import RecomputePolicy
from lightning_4d.planner.constants import DEFAULT
from lightning_4d.planner.memory import memory_bytes
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.ours import software_for
from lightning_4d.planner.space import Limits, enumerate_plans
from lightning_4d.rehearsal import Llama, LlamaSizes, RehearsalOptions, rehearse
from lightning_4d.rehearsal.rehearse import _Run

slow = pytest.mark.slow
LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, VOCABULARY, LENGTH = 4, 1024, 8, 4, 2816, 8192, 2048
FACTS = ModelFacts(LAYERS, HIDDEN, HEADS, KV_HEADS, HIDDEN // HEADS, INNER, 3, VOCABULARY, LENGTH)
SIZES = LlamaSizes(LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, VOCABULARY)

CASES = [
    ("dp1x4", "bf16-mixed", "none"),
    ("dp1x4", "bf16-mixed", "full"),
    ("tp2", "bf16-mixed", "none"),
    ("pp2.dp1x2", "bf16-mixed", "none"),
    pytest.param("dp1x4", "bf16-true", "none", marks=slow),
    pytest.param("dp1x1", "32-true", "none", marks=slow),
    pytest.param("dp1x1", "bf16-mixed", "none", marks=slow),
    pytest.param("dp4x1", "bf16-mixed", "none", marks=slow),
    pytest.param("dp1x4", "bf16-mixed", "selective", marks=slow),
    pytest.param("tp2", "bf16-mixed", "full", marks=slow),
    pytest.param("dp1x2.tp2", "bf16-mixed", "none", marks=slow),
    pytest.param("dp1x2.cp2", "bf16-mixed", "none", marks=slow),
    pytest.param("pp2", "bf16-mixed", "none", marks=slow),
    pytest.param("pp2.dp1x2", "bf16-mixed", "full", marks=slow),
    pytest.param("pp2.dp1x1.tp2", "bf16-mixed", "none", marks=slow),
]


@pytest.mark.parametrize(("text", "precision", "policy"), CASES)
def test_planned_memory_is_what_a_step_takes(monkeypatch, text, precision, policy):
    monkeypatch.setattr(_Run, "_is_short", False)  # run all microbatches
    layout = ParallelLayout.parse(text)
    pp, replicate, shard, cp, tp = layout.sizes
    count = 4 if pp > 1 else 1
    options = {"precision": precision, "recompute": RecomputePolicy(policy), "sequence_parallel": tp > 1}
    options |= {"num_microbatches": count} if pp > 1 else {}
    ranks = (0, layout.world_size - 1) if pp > 1 else (0,)
    peak = max(
        rehearse(lambda: Llama(SIZES, LENGTH, count), layout, rank, RehearsalOptions(**options)).peak_bytes
        for rank in ranks
    )
    limits = Limits(pp, replicate, shard, cp, tp, micro_batch=1, schedules=("1f1b",), policies=(policy,))
    plan = enumerate_plans(FACTS, layout.world_size, count * layout.data_parallel_size, limits).plan
    # Without the runtime's memory, and without the optimizer's temporaries: they come after what is rehearsed.
    software = replace(software_for(plan, precision), step_bytes=0.0)
    planned = memory_bytes(FACTS, software, plan, replace(DEFAULT, runtime_memory=0.0)).total
    assert len(planned) == 1
    found = float(planned[0])
    assert 0.9 * peak <= found <= 1.2 * peak, f"planned {found / 2**20:.0f} MiB, rehearsed {peak / 2**20:.0f}"
