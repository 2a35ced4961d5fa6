"""Sequence parallelism, activation checkpointing and MFUMonitor under tensor parallelism: same numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor

from lightning_4d import NDStrategy
from lightning_4d.callbacks import ActivationCheckpointing, MFUMonitor
from tests.callbacks.test_mfu_monitor import PEAK, fit, monitor, per_step
from tests.harness import compare, reference, train
from tests.modules import EncoderStack
from tests.parallel.tensor.modules import Llama, NanoGPT
from tests.strategies.test_tensor_parity import check, slow

SEQUENCE = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("module", "shard"),
    [slow(NanoGPT, 1), (NanoGPT, 2), slow(Llama, 2), slow(partial(EncoderStack, layers=2), 1)],
    ids=["nano", "nano sharded", "llama", "encoder"],
)
def test_sequence_parallelism(pool, module, shard):
    check(pool, module, 2, shard, options=SEQUENCE, limit_val_batches=2)


def full() -> list[Callback]:
    return [ActivationCheckpointing("full")]


def sqrt() -> list[Callback]:
    return [ActivationCheckpointing("sqrt", nested=True)]


def selective() -> list[Callback]:
    return [ActivationCheckpointing("selective")]


@pytest.mark.parametrize("callbacks", [slow(full), slow(sqrt), selective])
@pytest.mark.parametrize("options", [{}, slow(SEQUENCE)], ids=["plain", "sequence"])
def test_E7_activation_checkpointing(pool, callbacks, options):
    # With dropout: a recompute has to draw the same masks, on parts too.
    module = partial(NanoGPT, layers=4, dropout=0.2)
    layout = partial(NDStrategy, data_parallel_shard_size=2, tensor_parallel_size=2, **options)
    expected = reference(pool, 2, module, steps=2)
    actual = pool.run(4, train, module, layout, steps=2, callbacks=callbacks)
    for rank, mine in enumerate(actual):
        compare(mine, expected[rank // 2], rtol=1e-10)


class Watching(Callback):
    """The monitor runs the step on fake tensors; afterwards the module must hold its own parameters."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert all(isinstance(p, DTensor) and type(p.to_local()).__name__ == "Tensor" for p in pl_module.parameters())


def monitored() -> list[Callback]:
    return [MFUMonitor(peak_tflops=PEAK, log_every_n_steps=1), Watching()]


def test_the_monitor_changes_no_number(pool):
    expected = reference(pool, 1, NanoGPT)
    metrics = ("losses", "gradients", "clipped", "parameters")
    for mine in pool.run(2, train, NanoGPT, partial(NDStrategy, tensor_parallel_size=2), callbacks=monitored):
        compare(mine, expected[0], rtol=1e-10, what=metrics)


def measured(tp: int, shard: int) -> tuple[float, float, float]:
    """Model FLOPs of a step over all devices, executed FLOPs likewise, and tokens of a step."""
    watching = monitor(attention_flops="causal")
    strategy = NDStrategy(data_parallel_shard_size=shard, tensor_parallel_size=tp)
    settings: dict[str, Any] = {"strategy": strategy, "devices": tp * shard, "max_steps": 4}
    fit(NanoGPT(), watching, ActivationCheckpointing("full"), **settings)
    model = per_step(watching.metrics) * tp * shard
    hardware = model * watching.metrics["perf/hfu"] / watching.metrics["perf/mfu"]
    return model, hardware, per_step(watching.metrics, "tokens_per_second")


@pytest.mark.slow
def test_flops_and_tokens_are_those_of_the_model(pool):
    model, hardware, tokens = pool.run(1, measured, 1, 1)[0]
    for tp, shard in ((2, 1), (2, 2)):
        here = pool.run(tp * shard, measured, tp, shard)[0]
        assert here[0] == pytest.approx(model * shard)
        # The optimizer updates whole parameters (norms) on every rank: a thousandth more.
        assert here[1] == pytest.approx(hardware * shard, rel=0.01)
        assert here[2] == pytest.approx(tokens * shard)
