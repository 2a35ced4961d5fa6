"""What Lightning offers around steps works in pipeline stages as in one process: callbacks, metrics, loops, data."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, ModelSummary
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_4d import NDStrategy
from lightning_4d.parallel.gradients import gradient_norms
from tests.checkpoint.runs import differences
from tests.harness import staged_tensors
from tests.modules import TinyGPT
from tests.staged_modules import Staged
from tests.strategies.scenarios import error_of, numbers, quiet, trainer_with

Make = Callable[..., Trainer]


class Watched(Staged):
    """Logs a validation loss that goes down and up again; the plateau lowers the learning rate."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, "train")
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append([trainer.optimizers[0].param_groups[0]["lr"], numbers(trainer.callback_metrics)])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.append([numbers(trainer.progress_bar_metrics), numbers(trainer.logged_metrics)])


def monitored(make: Make) -> Any:
    best = ModelCheckpoint("kept", "{epoch}-{val_loss:.6f}", monitor="val_loss", save_top_k=2)
    stop, rates = EarlyStopping("val_loss", patience=2, min_delta=0.002), Rates()
    callbacks = [best, stop, rates, LearningRateMonitor("step"), ModelSummary()]
    logger = CSVLogger("logs", version="one", flush_logs_every_n_steps=1)
    trainer = make(
        max_epochs=8,
        callbacks=callbacks,
        enable_checkpointing=True,
        logger=logger,
        num_sanity_val_steps=2,
        log_every_n_steps=1,
    )
    fit(trainer, Watched())
    trainer.strategy.barrier()  # global rank 0 may still remove what is not among the best
    kept = sorted(path.name for path in Path("kept").iterdir())
    rows = Path("logs/lightning_logs/one/metrics.csv").read_text() if trainer.is_global_zero else ""
    assert not trainer.is_global_zero or "lr-SGD" in rows.splitlines()[0]
    score = float(best.best_model_score)
    return [kept, Path(best.best_model_path).name, score, stop.stopped_epoch, trainer.current_epoch, rates.seen]


class Predicting(Staged):
    """Two validation loaders, appended outputs read at the end, dicts of predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[list[Tensor]] = [[], []]
        self.kept: list[Tensor] = []
        self.by_index: dict[int, Tensor] = {}

    def val_dataloader(self) -> Any:
        return [DataLoader(self.dataset("val"), batch_size=4), DataLoader(self.dataset("train"), batch_size=5)]

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset("val"), batch_size=4)

    predict_dataloader = test_dataloader

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch, "val")
        self.log("val_loss", loss)
        self.log("same", loss, add_dataloader_idx=False) if dataloader_idx == 0 else None
        self.kept.append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("kept_mean", torch.stack(self.kept).mean())
        self.log("kept_count", float(len(self.kept)))
        self.kept.clear()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.by_index[batch_idx] = out.mean()
        self.log_dict({"test_mean": out.mean(), "test_max": out.max()}, on_step=False, on_epoch=True)
        self.log("test_sum", out.sum(), reduce_fx="sum")

    def on_test_epoch_end(self) -> None:
        self.log("by_index", torch.stack(list(self.by_index.values())).sum())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        return {"out": out, "index": batch_idx, "best": [out.argmax(-1)], "name": f"batch {batch_idx}"}


class Outputs(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs))


def loops(make: Make) -> Any:
    module, outputs = Predicting(), Outputs()
    before = make().validate(module, verbose=False)
    trainer = make(max_epochs=1, callbacks=[outputs])
    fit(trainer, module)
    tested = make().test(module, verbose=False)
    predicted = make().predict(module)
    again = make(max_epochs=2)
    fit(again, module)
    return [before, outputs.seen, tested, predicted, numbers(again.callback_metrics), trainer.validate(module)]


class Measured(TinyGPT):
    """Many metrics, in both loops: collections, list states, called, updated, logged as values and as objects."""

    def __init__(self) -> None:
        super().__init__(layers=4, vocab=7, length=5)
        make = partial(MulticlassAccuracy, 7, average="micro")
        self.both = MetricCollection({"acc": make(), "f1": MulticlassF1Score(7)}, prefix="train_")
        self.area = MulticlassAUROC(7, thresholds=None)
        self.mean, self.all = MeanMetric(), CatMetric()
        self.in_list = nn.ModuleList([make(top_k=2), make(top_k=3)])

    def loss(self, batch: Any, stage: str) -> Tensor:
        (tokens_BT,) = batch
        targets = tokens_BT[:, 1:].flatten()
        logits = self(tokens_BT[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, targets)
        if stage == "train":
            self.log_dict(self.both(logits.detach(), targets), on_step=True, on_epoch=False)
        else:
            self.area.update(logits.softmax(-1), targets)
            self.log("area", self.area)
        self.log(f"{stage}_std", logits.detach().mean(1).std())
        self.mean.update(loss.detach())
        self.all.update(logits.detach().amax(-1))
        for k, metric in enumerate(self.in_list):
            metric(logits.detach(), targets)
            self.log(f"{stage}_top{k + 2}", metric, on_step=stage == "train", on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"epoch_{k}": v for k, v in self.both.compute().items()})
        self.both.reset()
        self.log("mean", self.mean)
        self.log("all", self.all.compute().sum())
        self.all.reset()


def metrics(make: Make) -> Any:
    trainer = make(max_epochs=2, limit_train_batches=4, limit_val_batches=2, callbacks=[rates := Rates()])
    fit(trainer, Measured())
    return [numbers(trainer.callback_metrics), rates.seen]


class Normed(TinyGPT):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(gradient_norms(self))
        self.log_dict(gradient_norms(self, float("inf")))


def norms(make: Make) -> Any:
    seen = []
    for tied in (False, True):
        trainer = make(max_steps=2, limit_val_batches=0, gradient_clip_val=0.1, callbacks=[rates := Rates()])
        fit(trainer, Normed(layers=4, tied=tied))
        seen += rates.seen
    assert "grad_2.0_norm_total" in seen[0][1]
    return seen


class Switching(Staged):
    """Blocks that do something else in eval mode, switched within an epoch; parameters frozen half-way."""

    class Moody(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x).tanh() * (1.0 if self.training else 0.5)

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(self.Moody(self.dim, self.dim) for _ in range(self.blocks_count))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[batch_idx % 4].train(batch_idx % 3 > 0)
        self.head.train(batch_idx % 2 > 0)


def switches(make: Make) -> Any:
    trainer = make(
        max_epochs=2, limit_train_batches=5, limit_val_batches=2, val_check_interval=2, callbacks=[rates := Rates()]
    )
    fit(trainer, module := Switching())
    return [rates.seen, staged_tensors(dict(module.named_parameters()))]


class Augmented(Dataset):
    """Sample i with noise from all generators, and i itself."""

    def __init__(self, module: Staged) -> None:
        self.x, self.y = module.dataset("train").tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        import random

        import numpy as np

        return self.x[index] + torch.rand(()) + float(np.random.rand()) + random.random(), self.y[index]


class Augmenting(Staged):
    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers
        self.seen: list[float] = []

    def train_dataloader(self) -> DataLoader:
        context = "fork" if self.workers else None
        return DataLoader(
            Augmented(self), batch_size=4, shuffle=True, num_workers=self.workers, multiprocessing_context=context
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.rand(()), batch[1]]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch[0].sum()))


def augmentation(make: Make) -> Any:
    seen = []
    for workers in (0, 2):
        seed_everything(5, workers=True, verbose=False)
        trainer = make(max_epochs=2, limit_train_batches=4, limit_val_batches=2, callbacks=[rates := Rates()])
        fit(trainer, module := Augmenting(workers))
        seen.append([module.seen, rates.seen])
    return seen


SCENARIOS = [monitored, loops, metrics, norms, switches, augmentation]


def fit(trainer: Trainer, module: LightningModule) -> None:
    """From random states as at the start, as strategies for several processes set them."""
    reset_seed()
    trainer.fit(module)


def run_each(names: list[str], strategy: Any) -> dict[str, Any]:
    quiet()
    found = {}
    for name in names:
        Path(name).mkdir(exist_ok=True)
        os.chdir(name)
        seed_everything(0, workers=True, verbose=False)
        found[name] = globals()[name](trainer_with(strategy))
        os.chdir("..")
    return found


def check_scenarios(pool: Any, names: list[str], pipeline: int, **options: Any) -> None:
    (expected,) = pool.run(1, run_each, names, "auto", timeout=300)
    strategy = partial(NDStrategy, pipeline_parallel_size=pipeline, **options)
    for rank, actual in enumerate(pool.run(pipeline, run_each, names, strategy, timeout=300)):
        for name in names:
            found = differences(actual[name], expected[name], 1e-9, f"rank {rank} {name}")
            assert not found, "\n".join(found[:20])


def test_scenarios_equal_one_process(pool):
    check_scenarios(pool, [scenario.__name__ for scenario in SCENARIOS], 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zbv", "interleaved_1f1b"])
def test_scenarios_under_other_schedules(pool, schedule):
    check_scenarios(pool, [scenario.__name__ for scenario in SCENARIOS], 2, pipeline_schedule=schedule)


# ------------------------------------------------------------------------------------------------------ data of ranks


def unseeded() -> Any:
    """Ranks start with random states of their own; what they read must be the same nevertheless."""
    quiet()
    torch.manual_seed(100 + dist.get_rank())
    trainer = trainer_with(partial(NDStrategy, pipeline_parallel_size=2))(max_epochs=2, limit_train_batches=3)
    trainer.fit(module := Augmenting())
    return [module.seen, numbers(trainer.callback_metrics)]


class OwnData(Staged):
    """Data that depends on the rank, from the third batch on or from the first; or in validation."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.where == ("train" if self.trainer.training else "val"):
            return [batch[0] + self.global_rank, batch[1]]
        return batch


def reads_own_data(where: str) -> str:
    quiet()
    trainer = trainer_with(partial(NDStrategy, pipeline_parallel_size=2))(
        max_epochs=1, limit_train_batches=2, limit_val_batches=1
    )
    return error_of(lambda: trainer.fit(OwnData(where)))


def test_ranks_of_a_pipeline_read_the_same(pool):
    first, second = pool.run(2, unseeded)
    assert first == second
    for where in ("train", "val"):
        for error in pool.run(2, reads_own_data, where):
            assert error.startswith("UnsupportedError: pipeline ranks 0 and 1 read different batches"), error


# --------------------------------------------------------------------------------------------------- outside of steps


class Outside(Callback):
    def __init__(self, call: str) -> None:
        self.call = call

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        x = torch.ones(4, pl_module.length, pl_module.dim, dtype=torch.float64)
        {"forward": pl_module, "head": pl_module.head, "input": pl_module.input, "block": pl_module.blocks[3]}[
            self.call
        ](x)


def calls_outside(call: str) -> str:
    quiet()
    strategy = partial(NDStrategy, pipeline_parallel_size=2)
    trainer = trainer_with(strategy)(max_steps=2, callbacks=[Outside(call)], limit_val_batches=0)
    return error_of(lambda: trainer.fit(Staged()))


@pytest.mark.parametrize("call", ["forward", "head", "input", "block"])
def test_modules_called_outside_a_step(pool, call):
    for error in pool.run(2, calls_outside, call):
        assert error.startswith("UnsupportedError"), error
        assert "was called outside training_step" in error
