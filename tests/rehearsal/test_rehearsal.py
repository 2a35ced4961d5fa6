"""A rehearsed rank against the same rank of a real run, and against the planner's formulas."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
import torch.distributed as dist

from lightning_4d.cli import main
from lightning_4d.errors import LayoutError, UnsupportedError
from lightning_4d.layout import ParallelLayout
from lightning_4d.parallel.recompute import RecomputePolicy
from lightning_4d.planner.facts import RECOMPUTE, Plan
from lightning_4d.planner.memory import memory_bytes
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.ours import software_for
from lightning_4d.rehearsal import Llama, LlamaSizes, RehearsalOptions, rehearse
from lightning_4d.rehearsal.rehearse import _Run
from tests.rehearsal.runs import module, real

slow = pytest.mark.slow
LAYOUTS = [
    ("dp2x2", "32-true", {}),
    ("dp1x2.tp2", "32-true", {}),
    ("dp1x2.cp2", "32-true", {}),
    ("pp2.dp1x2.tp2", "32-true", {}),
    pytest.param("dp1x4", "bf16-mixed", {}, marks=slow),
    pytest.param("pp2.dp1x2", "32-true", {"tied": True}, marks=slow),
    pytest.param("dp1x2.tp2", "32-true", {"sequence_parallel": True}, marks=slow),
    pytest.param("pp2.dp1x2.cp2", "32-true", {}, marks=slow),
    pytest.param("pp2.cp2.tp2", "32-true", {}, marks=slow),
]
# A step's news from the last stage to the others (its loss), which is not the model's traffic.
NEWS = {("broadcast", "pp"), ("all_reduce", "pp")}


@pytest.mark.parametrize(("text", "precision", "options"), LAYOUTS)
def test_a_rehearsed_rank_is_that_of_a_real_run(pool, text, precision, options):
    layout = ParallelLayout.parse(text)
    ranks = pool.run(layout.world_size, real, text, precision, **options)
    tied = options.get("tied", False)
    chosen = RehearsalOptions(precision=precision, sequence_parallel=options.get("sequence_parallel", False))
    for rank in (0, layout.world_size - 1):
        found = rehearse(partial(module, tied=tied), layout, rank, chosen)
        expected = ranks[rank]
        for name in ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            assert getattr(found, name) == expected[name], (rank, name)
        rehearsed = {(one.kind, one.axis): (one.count, one.bytes) for one in found.collectives}
        news = {key: value for key, value in expected["collectives"].items() if key not in rehearsed}
        assert rehearsed == {key: value for key, value in expected["collectives"].items() if key in rehearsed}
        assert set(news) <= NEWS
        assert all(size < 1000 for _, size in news.values())
        assert found.activation_bytes == pytest.approx(expected["activation_bytes"], rel=0.1)


FACTS = ModelFacts(8, 1024, 8, 8, 128, 2816, 3, 8192, 1024, name="small llama")
PLANNED = [
    ("dp1x4.tp2", 1),
    ("pp4.dp1x2", 7),
    pytest.param("dp1x8", 0, marks=slow),
    pytest.param("pp4.dp1x2", 0, marks=slow),
    pytest.param("pp4.dp1x2.tp2", 0, marks=slow),
]


def planned(layout, micro_batches):
    pp, replicate, shard, cp, tp = layout.sizes
    plan = Plan(pp, replicate, shard, cp, tp, 3, 1, micro_batches, 1, 0, RECOMPUTE["none"])
    return memory_bytes(FACTS, software_for(plan, "32-true"), plan).parts


@pytest.mark.parametrize(("text", "rank"), PLANNED)
def test_states_are_those_of_the_planners_formulas(text, rank):
    """Within 3 %: the formulas divide norms over tp, which are whole, and know one rank, the fullest."""
    layout = ParallelLayout.parse(text)
    sizes = LlamaSizes(8, 1024, 8, 8, 2816, 8192)
    batch = layout.pipeline_parallel_size
    found = rehearse(lambda: Llama(sizes, 1024, batch), layout, rank, RehearsalOptions(precision="32-true"))
    parts = planned(layout, batch)
    assert found.parameter_bytes == pytest.approx(float(parts["parameters"]), rel=0.03)
    assert found.gradient_bytes == pytest.approx(float(parts["gradients"]), rel=0.03)
    assert found.optimizer_bytes == pytest.approx(float(parts["optimizer"]), rel=0.03)


def test_microbatches_add_up(monkeypatch):
    """What one and two microbatches tell of eight is what eight do."""
    layout = ParallelLayout.parse("pp2.dp1x2")
    build = partial(Llama, LlamaSizes(2, 16, 2, 2, 32, 32), 8, 8)
    options = RehearsalOptions(precision="32-true", num_microbatches=8)
    short = rehearse(build, layout, 0, options)
    monkeypatch.setattr(sys.modules[_Run.__module__], "_is_uniform", lambda stages: False)
    whole = rehearse(build, layout, 0, options)
    assert short.microbatches == 8
    assert short.collectives == whole.collectives
    assert short.activation_bytes == whole.activation_bytes


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_checkpointed_steps_hold_less(precision):
    layout, build = ParallelLayout.parse("dp1x4"), partial(Llama, LlamaSizes(4, 64, 4, 4, 128, 64), 64, 2)
    whole, checkpointed = (
        rehearse(build, layout, 0, RehearsalOptions(precision=precision, recompute=RecomputePolicy(policy)))
        for policy in ("none", "full")
    )
    assert checkpointed.peak_bytes < 0.8 * whole.peak_bytes
    assert checkpointed.gathered_bytes == whole.gathered_bytes, "checkpointing does not change in which dtype"
    assert whole.parameter_bytes == whole.parameters * (2 if precision == "bf16-true" else 4)


class Reads(Llama):
    """Looks at its loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 3:
            return loss * 0
        return loss


def test_refusals():
    sizes = LlamaSizes(2, 16, 2, 2, 32, 32)
    with pytest.raises(LayoutError, match="rank 4"):
        rehearse(lambda: Llama(sizes, 8), ParallelLayout.parse("dp4"), 4)
    with pytest.raises(UnsupportedError, match="reads a value"):
        rehearse(lambda: Reads(sizes, 8), ParallelLayout.parse("dp4"), 1, RehearsalOptions(precision="32-true"))
    assert not dist.is_initialized()


def test_command_line(capsys):
    model = ["--model", "tests.modules:TinyGPT", "--init-args", '{"layers": 2}']
    arguments = ["rehearse", *model, "--layout", "dp1x64.tp2", "--rank", "77", "--precision", "32-true"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["coordinate"] == {"pp": 0, "dp_replicate": 0, "dp_shard": 38, "cp": 0, "tp": 1}
    assert {one["axis"] for one in found["collectives"]} == {"dp_shard", "tp"}
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "rank 77 of pp1.dp1x64.cp1.tp2" in shown
    assert "reduce_scatter" in shown
    assert main(["rehearse", "--model", "gpt2", "--layout", "dp2"]) == 1
    assert "llama3-405b" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("text", "length"), [("pp16.dp1x128.cp1.tp8", "8192"), ("pp16.dp1x8.cp16.tp8", "131072")])
def test_llama_405b_on_16384_ranks(text, length, capsys):
    arguments = ["rehearse", "--model", "llama3-405b", "--seq-len", length, "--layout", text, "--rank", "5000"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    block = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248
    assert found["parameters"] == pytest.approx(8 * (block / 8 + 2 * 16384) / 128, rel=1e-3)
    assert found["microbatches"] == 16
    expected = {"tp", "pp", "dp_shard"} if "cp1." in text else {"tp", "pp", "cp", "dp_shard+cp"}
    assert {one["axis"] for one in found["collectives"]} == expected
