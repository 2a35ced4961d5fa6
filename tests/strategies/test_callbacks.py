"""What Lightning users log, watch and steer training by works as under DDP: metrics, callbacks, loggers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_4d.parallel.gradients import gradient_norms
from tests.modules import MLP, TinyGPT
from tests.strategies.scenarios import (
    MakeTrainer,
    check_same,
    error_of,
    numbers,
    quiet,
    sharded,
    trainer_with,
    whole_parameters,
)


class Logging(TinyGPT):
    """Logs in every way Lightning offers."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.mean = MeanMetric()
        self.sum = SumMetric()
        self.collection = MetricCollection(
            {"micro": MulticlassAccuracy(31, average="micro"), "macro": MulticlassAccuracy(31, average="macro")}
        )
        self.by_name = nn.ModuleDict({"tokens": SumMetric()})
        self.values: list[float] = []
        self.gathered: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, "train")
        rank = float(self.global_rank)
        for reduce in ("mean", "sum", "max", "min"):
            value = loss.detach() * (1 + rank)
            self.log(f"{reduce}_reduced", value, reduce_fx=reduce, sync_dist=True, on_step=True, on_epoch=True)
        self.mean.update(loss.detach())
        self.sum(float(batch[0].numel()))
        self.by_name["tokens"](float(batch[0].numel()))
        self.log("mean_metric", self.mean)
        self.log("sum_metric", self.sum, on_step=True, on_epoch=True)
        self.log("named", self.by_name["tokens"], metric_attribute="tokens", on_epoch=True, on_step=False)
        self.gathered.append(self.all_gather(loss.detach()))
        self.gathered.append(self.all_gather({"rank": torch.tensor([rank])})["rank"])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens_BT = batch[0]
        logits_BTV = self(tokens_BT[:, :-1])
        self.collection.update(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
        self.log("val_loss", float(logits_BTV.double().square().mean()), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        metrics = self.collection.compute()
        self.log_dict(metrics)
        self.values += [float(value) for value in metrics.values()]
        self.collection.reset()


def logging(make: MakeTrainer) -> dict[str, Any]:
    module = Logging()
    trainer = make(max_epochs=2, num_sanity_val_steps=2, log_every_n_steps=1)
    trainer.fit(module)
    assert module.sum.sum_value.device == module.device
    return {
        "metrics": numbers(trainer.callback_metrics),
        "logged": numbers(trainer.logged_metrics),
        "values": module.values,
        "gathered": module.gathered,
        "state": len(module.state_dict()),
    }


@pytest.mark.parametrize("replicate", [1, 2])
def test_C7_metrics_and_every_way_to_log(pool, replicate):
    ranks = check_same(pool, 2, logging, replicate=replicate)
    assert ranks[0]["metrics"]["sum_metric_epoch"] == 48 * 13
    assert ranks[0]["gathered"][1].flatten().tolist() == [0.0, 1.0]


class Steered(MLP):
    """A validation loss that each rank sees differently, and a schedule that follows it."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.2)
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Steps(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def steering(make: MakeTrainer) -> dict[str, Any]:
    module = Steered()
    steps = Steps()
    checkpoint = ModelCheckpoint("kept", "{epoch}-{val_loss:.6f}", monitor="val_loss", save_top_k=2)
    stopping = EarlyStopping("val_loss", patience=3, min_delta=0.02)
    callbacks = [steps, checkpoint, stopping, LearningRateMonitor("epoch"), GradientAccumulationScheduler({0: 2, 2: 3})]
    trainer = make(
        max_epochs=12,
        callbacks=[*callbacks, Timer("00:01:00:00"), TQDMProgressBar()],
        enable_checkpointing=True,
        enable_progress_bar=True,
        logger=[CSVLogger("csv", flush_logs_every_n_steps=1), TensorBoardLogger("tensorboard")],
        log_every_n_steps=1,
        gradient_clip_val=0.5,
        num_sanity_val_steps=1,
    )
    trainer.fit(module)
    trainer.strategy.barrier("logged")
    with Path("csv/lightning_logs/version_0/metrics.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    assert list(Path("tensorboard").rglob("events.out*"))
    return {
        "rates": steps.rates,
        "epochs": trainer.current_epoch,
        "stopped": stopping.stopped_epoch,
        "kept": len(checkpoint.best_k_models),
        "scores": sorted(float(score) for score in checkpoint.best_k_models.values()),
        "best": float(checkpoint.best_model_score),
        "best epoch": int(Path(checkpoint.best_model_path).name.split("-")[0].removeprefix("epoch=")),
        "rows": rows,
        "shown": {k: float(v) for k, v in trainer.progress_bar_metrics.items() if k != "v_num"},
        "metrics": numbers(trainer.callback_metrics),
        "parameters": whole_parameters(module),
    }


def test_callbacks_that_steer_training_see_the_same_values(pool):
    ranks = check_same(pool, 2, steering)
    assert ranks[0]["stopped"] > 0
    assert len(set(ranks[0]["rates"])) > 1
    assert ranks[0]["best epoch"] == ranks[1]["best epoch"]


class GradientNorms(Callback):
    """B5: the norms by name before each step."""

    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        for norm_type in (2, 1, float("inf")):
            self.norms.append(gradient_norms(pl_module, norm_type))
            if trainer.strategy.__class__.__name__ == "DDPStrategy":
                lightning = {name: float(norm) for name, norm in grad_norm(pl_module, norm_type).items()}
                torch.testing.assert_close(self.norms[-1], lightning, rtol=1e-6, atol=0)
        pl_module.log_dict(self.norms[0])


def logging_gradient_norms(make: MakeTrainer) -> dict[str, Any]:
    callback = GradientNorms()
    make(max_steps=3, callbacks=[callback], limit_val_batches=0, max_epochs=1).fit(TinyGPT(layers=2))
    return {"norms": callback.norms}


class LightningGradNorm(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        grad_norm(pl_module, 2)


def lightning_grad_norm() -> str:
    quiet()
    trainer = sharded()(max_steps=1, callbacks=[LightningGradNorm()])
    return error_of(lambda: trainer.fit(MLP()), RuntimeError)


def test_B5_gradient_norms(pool):
    check_same(pool, 2, logging_gradient_norms)


def test_B5_lightnings_own_grad_norm_raises_instead_of_giving_the_norm_of_a_shard(pool):
    assert all(pool.run(2, lightning_grad_norm))


def summaries() -> dict[str, Any]:
    quiet()
    seen = {}
    module = TinyGPT(layers=2, tied=True)
    seen["before"] = summarize(module, max_depth=3)
    for name, make in (("ddp", trainer_with("ddp")), ("sharded", sharded())):
        module = TinyGPT(layers=2, tied=True)
        trainer = make(max_steps=1, limit_val_batches=0, enable_model_summary=True, callbacks=[ModelSummary(3)])
        trainer.fit(module)
        seen[name] = summarize(module, max_depth=3)
    assert type(module).__name__ == "TinyGPT"
    assert "Block" in repr(module)
    assert "FSDP" not in repr(module)
    return {
        k: (s.layer_names, s.layer_types, s.param_nums, s.total_parameters, s.trainable_parameters)
        for k, s in seen.items()
    }


def test_model_summary_counts_the_whole_model_and_names_the_users_classes(pool):
    for seen in pool.run(2, summaries):
        assert seen["sharded"] == seen["ddp"] == seen["before"]


def refused_callbacks() -> list[str]:
    quiet()
    callbacks = [StochasticWeightAveraging(1e-2), EMAWeightAveraging(), WeightAveraging()]
    return [error_of(lambda c=c: sharded()(max_epochs=2, callbacks=[c]).fit(MLP())) for c in callbacks]


def test_C14_callbacks_that_copy_the_whole_module_are_refused_by_name(pool):
    for messages in pool.run(2, refused_callbacks):
        for name, message in zip(
            ("StochasticWeightAveraging", "EMAWeightAveraging", "WeightAveraging"), messages, strict=True
        ):
            assert message.startswith("UnsupportedError")
            assert f"the callback {name} with layout" in message


def tuning(make: MakeTrainer) -> dict[str, Any]:
    module = TinyGPT(layers=2)
    trainer = make(max_epochs=1, limit_val_batches=0)
    finder = Tuner(trainer).lr_find(module, num_training=8, update_attr=False)
    assert finder is not None
    message = error_of(lambda: Tuner(trainer).scale_batch_size(module))
    assert "distributed" in message, message
    trainer.fit(module)
    return {"loss": finder.results["loss"], "lr": finder.results["lr"], "parameters": whole_parameters(module)}


def test_lr_finder_works_and_batch_size_finder_says_why_not(pool):
    check_same(pool, 2, tuning, timeout=60)
