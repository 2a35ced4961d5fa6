"""What context parallelism costs: activations per rank, FLOPs of each rank, and what MFUMonitor says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from examples import train_gpt
from lightning_4d import NDStrategy
from lightning_4d.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_4d.callbacks.mfu_monitor import MFUMonitor
from lightning_4d.parallel.blocks import find_blocks
from lightning_4d.parallel.context import ContextParallel, make_groups
from lightning_4d.parallel.context.layout import SequenceLayout
from lightning_4d.parallel.context.ring import visible_parts
from tests.modules import TinyGPT
from tests.saved_bytes import SavedBytes
from tests.strategies.scenarios import quiet, trainer_with

# ------------------------------------------------------------------------------------------------------------- memory


def saved_bytes(length: int, ulysses: int) -> tuple[int, int, int]:
    """What autograd holds of the example GPT at the end of forward: on one process, and here; and whole logits."""
    torch.manual_seed(0)
    model = train_gpt.GPT(n_layers=2)
    tokens = torch.randint(256, (1, length))
    whole = _saved(model, tokens)
    groups = make_groups([list(range(dist.get_world_size()))], ulysses)
    context = ContextParallel(model, find_blocks(model), groups)
    context.install_inside()
    context.install_outside()
    return whole, _saved(model, tokens), 4 * length * 256


def _saved(model: Any, tokens: Tensor) -> int:
    saved = SavedBytes(model)
    with saved.watch():
        loss = train_gpt.cross_entropy(model(tokens), tokens)
        count = saved.now()
    loss.backward()
    return count


@pytest.mark.parametrize(
    ("world", "ulysses"),
    [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_activations_fall_with_the_ranks(pool, world, ulysses):
    for whole, mine, logits in pool.run(world, saved_bytes, 4096, ulysses):
        assert whole > logits
        assert mine <= 1.1 * whole / world


# -------------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [4096, 4099])
def test_causal_work_is_equal_on_all_ranks(ranks, length):
    layout = SequenceLayout.zigzag(length, ranks)

    def work(rank: int) -> float:
        total = 0.0
        for keys in layout.runs:
            for part in visible_parts(layout.runs[rank], keys, True):
                size = (part.queries[1] - part.queries[0]) * (part.keys[1] - part.keys[0])
                assert part.rule in ("all", "diagonal")
                total += size / 2 if part.rule == "diagonal" else size
        return total

    amounts = [work(rank) for rank in range(ranks)]
    assert max(amounts) / min(amounts) < 1.05
    assert sum(amounts) == pytest.approx(length**2 / 2, rel=0.01)


# ---------------------------------------------------------------------------------------------------------------- MFU

PEAK = 1e-3


def monitored(strategy: Any, policy: str | None) -> dict[str, float]:
    quiet()
    watching = MFUMonitor(peak_tflops=PEAK, log_every_n_steps=2)
    callbacks: list[Callback] = [watching]
    if policy is not None:
        callbacks.append(ActivationCheckpointing(policy=policy))
    settings = {"max_steps": 6, "limit_val_batches": 0, "precision": "32-true", "callbacks": callbacks}
    trainer_with(strategy, **settings)().fit(TinyGPT())
    return watching.metrics


def per_step(metrics: dict[str, float], name: str) -> float:
    return metrics[f"perf/{name}"] * metrics["perf/step_seconds"]


@pytest.mark.parametrize("policy", ["full", pytest.param(None, marks=pytest.mark.slow)])
def test_mfu_monitor_counts_a_sequence_once(pool, policy):
    alone = pool.run(1, monitored, NDStrategy, policy)[0]
    together = pool.run(2, monitored, partial(NDStrategy, context_parallel_size=2), policy)
    assert together[0] == together[1]
    for name in ("tokens_per_second", "samples_per_second"):
        assert per_step(together[0], name) == pytest.approx(per_step(alone, name))
    assert 2 * per_step(together[0], "tflops_per_device") == pytest.approx(per_step(alone, "tflops_per_device"))
    assert together[0]["perf/hfu"] / together[0]["perf/mfu"] == pytest.approx(
        alone["perf/hfu"] / alone["perf/mfu"], rel=1e-3
    )
