"""MFUMonitor: what it logs is what was trained, whatever the strategy; and it changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_4d import NDStrategy
from lightning_4d.callbacks import MFUMonitor
from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.recompute import RecomputePolicy, install
from lightning_4d.utilization import stopwatch
from tests.modules import GAN, MLP, EncoderStack, SyntheticModule, TinyGPT, ViT, WithBuffers
from tests.strategies.scenarios import quiet, trainer_with

aten = torch.ops.aten
PEAK = 1e-3  # TFLOP/s
ALL = {"mfu", "hfu", "tflops_per_device", "tokens_per_second", "samples_per_second", "step_seconds"} | {
    "data_wait_fraction",
    "peak_memory_gib",
}


class MemoryLogger(Logger):
    """Keeps what is logged."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def fit(module: LightningModule, monitor: MFUMonitor | None, *callbacks: Callback, **settings: Any) -> Trainer:
    """Train for 8 batches on one process."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 8,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.")
        own = [] if monitor is None else [monitor]
        trainer = Trainer(**(defaults | settings), callbacks=[*own, *callbacks])
        trainer.fit(module)
    return trainer


def monitor(**settings: Any) -> MFUMonitor:
    return MFUMonitor(**({"peak_tflops": PEAK, "log_every_n_steps": 2, "attention_flops": "full"} | settings))


def per_step(metrics: dict[str, float], name: str = "tflops_per_device") -> float:
    """A rate times the time of a step: FLOPs, tokens or samples of an optimizer step (per device for FLOPs)."""
    return metrics[f"perf/{name}"] * metrics["perf/step_seconds"] * (1e12 if name == "tflops_per_device" else 1)


# ----------------------------------------------------------------------------------------------- what a step computes


class CountsRealSteps(Callback):
    """Counts real training steps with torch's own counter."""

    def __init__(self) -> None:
        self.flops: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        def flash(q: Any, k: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
            return 4 * q[0] * q[1] * q[2] * k[2] * q[3]

        def flash_backward(_: Any, q: Any, k: Any, *__: Any, out_shape: Any = None, **___: Any) -> int:
            return 8 * q[0] * q[1] * q[2] * k[2] * q[3]  # without the product that the kernel repeats

        mapping = {
            aten._scaled_dot_product_flash_attention_for_cpu: flash,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: flash_backward,
        }
        self.counter = FlopCounterMode(display=False, custom_mapping=mapping)
        self.counter.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counter.__exit__(None, None, None)
        self.flops.append(self.counter.get_total_flops())


@pytest.mark.parametrize("cls", [TinyGPT, ViT, EncoderStack, GAN, WithBuffers])
def test_model_flops_are_what_torch_counts_in_the_real_step(cls):
    torch.manual_seed(0)
    counting, watching = CountsRealSteps(), monitor()
    fit(cls(), watching, counting, max_steps=8 if cls is not GAN else 16)
    assert len(set(counting.flops)) == 1
    assert per_step(watching.metrics) == pytest.approx(counting.flops[0], rel=1e-9)
    assert watching.metrics["perf/hfu"] > watching.metrics["perf/mfu"]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_counts_each_batch_once(accumulate):
    module = TinyGPT(batch_size=4, length=12)
    watching = monitor()
    fit(module, watching, max_steps=4, accumulate_grad_batches=accumulate)
    metrics = watching.metrics
    assert set(metrics) == {f"perf/{name}" for name in ALL}
    matrices = sum(
        p.numel() for n, p in module.named_parameters() if p.dim() == 2 and "embed" not in n and n != "positions"
    )
    batch = 6 * matrices * 4 * 12 + 12 * 3 * 16 * 12 * 4 * 12
    assert per_step(metrics) == pytest.approx(accumulate * batch, rel=1e-9)
    assert per_step(metrics, "samples_per_second") == pytest.approx(accumulate * 4, rel=1e-9)
    assert per_step(metrics, "tokens_per_second") == pytest.approx(accumulate * 4 * 13, rel=1e-9)
    assert metrics["perf/mfu"] == pytest.approx(metrics["perf/tflops_per_device"] / PEAK, rel=1e-9)


def test_causal_attention_counts_half_and_recomputation_only_in_hardware_flops():
    def run(attention: str = "full", policy: str = "none") -> tuple[float, float]:
        module = TinyGPT()
        if policy != "none":
            install(module, RecomputePolicy(policy))
        watching = monitor(attention_flops=attention)
        fit(module, watching)
        flops = per_step(watching.metrics)
        return flops, flops * watching.metrics["perf/hfu"] / watching.metrics["perf/mfu"]

    full, executed = run()
    causal, _ = run("causal")
    same, more = run(policy="full")
    attention = 12 * 3 * 16 * 12 * 4 * 12
    blocks = 3 * (2 * 4 * 12 * 8 * 16 * 16) + attention / 3  # forward of all blocks
    assert full - causal == pytest.approx(attention / 2, rel=1e-6)
    assert same == pytest.approx(full, rel=1e-9)
    assert more - executed == pytest.approx(blocks, rel=1e-6)


class Lengths(SyntheticModule):
    """Batches of different lengths, the last of them short, with padding that a mask tells of."""

    shapes = ((4, 6), (4, 9), (2, 6), (4, 6), (4, 9), (1, 3))

    def __init__(self, padded: bool = False) -> None:
        super().__init__()
        self.padded = padded
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def train_dataloader(self) -> Any:
        return DataLoader([self.batch(*shape) for shape in self.shapes], batch_size=None)  # type: ignore[arg-type]

    def batch(self, samples: int, length: int) -> dict[str, Tensor]:
        ids, mask = torch.zeros(samples, length, dtype=torch.long), torch.ones(samples, length, dtype=torch.long)
        if self.padded:
            mask[0, length // 3 :] = 0
        return {"input_ids": ids, "attention_mask": mask}

    def loss(self, batch: Any, stage: str) -> Tensor:
        return F.cross_entropy(
            self.head(self.embedding(batch["input_ids"])).flatten(0, 1), batch["input_ids"].flatten()
        )


@pytest.mark.parametrize("padded", [False, True])
def test_short_and_variable_batches_and_padding(padded):
    watching = monitor(log_every_n_steps=6, warmup_steps=0)
    fit(Lengths(padded), watching, max_steps=6)
    tokens = sum(b * t - (t - t // 3 if padded else 0) for b, t in Lengths.shapes)
    assert per_step(watching.metrics, "tokens_per_second") * 6 == pytest.approx(tokens)
    assert per_step(watching.metrics, "samples_per_second") * 6 == pytest.approx(sum(b for b, _ in Lengths.shapes))
    assert per_step(watching.metrics) * 6 == pytest.approx(6 * 8 * 10 * tokens)


def test_own_counts_of_tokens_samples_and_flops():
    watching = monitor(tokens=lambda batch: 7, samples=lambda batch: 5, flops_per_token=100.0)
    fit(MLP(), watching)
    assert per_step(watching.metrics, "tokens_per_second") == pytest.approx(7)
    assert per_step(watching.metrics, "samples_per_second") == pytest.approx(5)
    assert per_step(watching.metrics) == pytest.approx(700)
    assert "perf/hfu" not in watching.metrics


# ---------------------------------------------------------------------------------------------------------------- time


class Clock:
    """A clock that moves only when it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class SlowLoader:
    """Takes a quarter of a second for each batch."""

    def __init__(self, loader: DataLoader, clock: Clock) -> None:
        self.loader, self.clock = loader, clock

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.clock.now += 0.25
            yield batch

    def __len__(self) -> int:
        return len(self.loader)


class Slow(MLP):
    """Steps take 1 s, the first 50 s; validation takes 100 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def train_dataloader(self) -> Any:
        return SlowLoader(super().train_dataloader(), self.clock)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.now += 1 if self.trainer.global_step else 50
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 100
        super().validation_step(batch, batch_idx)


def test_time_is_that_of_training_without_first_steps_validation_and_checkpoints(monkeypatch, tmp_path):
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    logger = MemoryLogger()
    watching = monitor(log_every_n_steps=4)
    module = Slow(clock)
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1)
    module.on_save_checkpoint = lambda checkpoint: setattr(clock, "now", clock.now + 20)
    fit(
        module,
        watching,
        saving,
        logger=logger,
        max_steps=12,
        val_check_interval=2,
        limit_val_batches=1,
        enable_checkpointing=True,
    )
    assert len(list(tmp_path.iterdir())) == 4
    rows = [(step, row) for step, row in logger.rows if "perf/mfu" in row]
    assert [step for step, _ in rows] == [3, 7, 11]
    for _, row in rows:
        assert row["perf/step_seconds"] == pytest.approx(1.25)
        assert row["perf/data_wait_fraction"] == pytest.approx(0.2)


def test_metrics_reach_loggers_progress_bar_and_callbacks():
    logger = MemoryLogger()
    watching = monitor(log_every_n_steps=None)
    trainer = fit(TinyGPT(), watching, logger=logger, log_every_n_steps=3, max_steps=7)
    rows = [(step, row) for step, row in logger.rows if "perf/mfu" in row]
    assert [step for step, _ in rows] == [2, 5]
    assert rows[-1][1] == watching.metrics
    assert float(trainer.callback_metrics["perf/hfu"]) == watching.metrics["perf/hfu"]
    assert [name for name in trainer.progress_bar_metrics if name.startswith("perf/")] == ["perf/mfu"]


# ------------------------------------------------------------------------------------------------- nothing is changed


def test_training_is_the_same_to_the_last_bit():
    def run(*callbacks: Callback) -> tuple[dict[str, Tensor], list[Any]]:
        seed_everything(0, verbose=False)
        module, logger = TinyGPT(dropout=0.5), MemoryLogger()
        fit(
            module,
            None,
            *callbacks,
            logger=logger,
            log_every_n_steps=1,
            max_epochs=1,
            max_steps=-1,
            limit_val_batches=2,
        )
        logged = [{k: v for k, v in row.items() if not k.startswith("perf/")} for _, row in logger.rows]
        return module.state_dict(), [row for row in logged if row]

    expected, actual = run(), run(monitor(log_every_n_steps=1))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert any("train_accuracy" in row for row in expected[1])


# --------------------------------------------------------------------------------------------------- what is not known


class NeedsData(MLP):
    def loss(self, batch: Any, stage: str) -> Tensor:
        loss = super().loss(batch, stage)
        return loss if loss > 0 else -loss


def test_a_step_that_cannot_be_counted_trains_on_without_mfu(recwarn):
    watching = monitor()
    fit(NeedsData(), watching)
    assert "perf/samples_per_second" in watching.metrics
    assert not {"perf/mfu", "perf/hfu", "perf/tflops_per_device"} & set(watching.metrics)
    said = [str(w.message) for w in recwarn if "MFUMonitor" in str(w.message)]
    assert len(said) == 1
    assert "flops_per_token" in said[0]


def test_an_unknown_device_has_no_mfu_and_one_message(recwarn):
    watching = monitor(peak_tflops=None)
    fit(TinyGPT(), watching)
    assert set(watching.metrics) == {f"perf/{name}" for name in ALL - {"mfu", "hfu"}}
    said = [str(w.message) for w in recwarn if "MFUMonitor" in str(w.message)]
    assert len(said) == 1
    assert "'cpu'" in said[0]
    measured = monitor(peak_tflops=None, measure_peak=True)
    fit(TinyGPT(), measured)
    assert measured.metrics["perf/mfu"] > 0


@pytest.mark.parametrize(
    "wrong", [{"attention_flops": "half"}, {"peak_tflops": -1.0}, {"log_every_n_steps": 0}, {"warmup_steps": -1}]
)
def test_wrong_settings_are_refused_by_name(wrong):
    with pytest.raises(UnsupportedError, match=next(iter(wrong))):
        monitor(**wrong)


def test_the_formula_the_peak_and_the_flops_per_token_are_said_once(caplog):
    caplog.set_level("INFO", logger="lightning.pytorch.utilities.rank_zero")
    fit(TinyGPT(), monitor())
    said = [r.getMessage() for r in caplog.records if "model FLOPs counted" in r.getMessage()]
    assert len(said) == 1
    for part in ("attention in full", "3 causal", "per token", "peak 0.001 TFLOP/s"):
        assert part in said[0]


# ------------------------------------------------------------------------------------------------------ all strategies


class Pair(SyntheticModule):
    """Two layers that are split over tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def dataset(self, split: str) -> Any:
        return MLP().dataset(split)

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and mesh["tensor_parallel"].size() > 1:
            parallelize_module(self, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def loss(self, batch: Any, stage: str) -> Tensor:
        return self.down(self.up(batch[0]).relu()).square().mean()

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)


STRATEGIES = {
    "ddp": lambda: "ddp",
    "hsdp 1x2": NDStrategy,
    "hsdp 2x1": lambda: NDStrategy(data_parallel_replicate_size=2),
    "lightning fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "lightning tp": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
}


def under_each_strategy() -> dict[str, dict[str, float]]:
    quiet()
    seen = {}
    for name, strategy in STRATEGIES.items():
        watching = monitor()
        settings = {"max_steps": 6, "limit_val_batches": 0, "precision": "32-true", "callbacks": [watching]}
        trainer_with(strategy if name != "ddp" else "ddp", **settings)().fit(Pair())
        seen[name] = watching.metrics
    return seen


def test_every_strategy_counts_what_was_trained_once_with_values_equal_on_all_ranks(pool):
    ranks = pool.run(2, under_each_strategy)
    assert ranks[0] == ranks[1]
    batch = 2 * 4 * 8 * 16 * (2 + 3)  # the first layer's input needs no gradient
    for name, metrics in ranks[0].items():
        readers = 1 if name == "lightning tp" else 2
        assert per_step(metrics, "samples_per_second") == pytest.approx(4 * readers), name
        assert per_step(metrics) == pytest.approx(batch * readers / 2), name
        assert metrics["perf/mfu"] == pytest.approx(metrics["perf/tflops_per_device"] / PEAK), name
