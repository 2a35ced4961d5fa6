"""fit, validate, test and predict in any order and repeatedly, and what runs outside a step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops import utilities as lightning_loops
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_4d import NDStrategy
from tests.modules import TinyGPT
from tests.strategies.scenarios import (
    MakeTrainer,
    check_same,
    error_of,
    numbers,
    quiet,
    sharded,
    whole_parameters,
)


class AllLoops(TinyGPT):
    """A TinyGPT with test and predict steps; 11 samples to predict divide neither by ranks nor by batches."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(samples=24, layers=2, **kwargs)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch, "val"), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        tokens_BT = torch.randint(self.vocab, (11, self.length), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(tokens_BT), batch_size=3)


def every_loop(make: MakeTrainer) -> dict[str, Any]:
    module = AllLoops()
    trainer = make(max_epochs=1, num_sanity_val_steps=2)
    seen: dict[str, Any] = {"before": trainer.validate(module, verbose=False)}
    seen["first prediction"] = trainer.predict(module)
    trainer.fit(module)
    seen["fitted"] = numbers(trainer.callback_metrics)
    seen["tested"] = trainer.test(module, verbose=False)
    seen["validated"] = trainer.validate(module, verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    seen["fitted again"] = numbers(trainer.callback_metrics)
    seen["prediction"] = trainer.predict(module)
    seen["tested again"] = trainer.test(module, verbose=False)
    second = make(max_epochs=1)
    second.fit(module)
    seen["second trainer"] = numbers(second.callback_metrics)
    seen["parameters"] = whole_parameters(module)
    return seen


@pytest.mark.parametrize("replicate", [1, 2])
def test_loops_in_any_order_and_a_second_trainer(pool, replicate):
    seen = check_same(pool, 2, every_loop, replicate=replicate)
    assert [sum(len(batch) for batch in rank["prediction"]) for rank in seen] == [6, 5]


def with_inference_mode(make: MakeTrainer) -> dict[str, Any]:
    """C11: as with NCCL, where Lightning evaluates under inference_mode."""
    elsewhere = mock.Mock(get_backend=lambda: "nccl")
    module = AllLoops()
    trainer = make(max_epochs=2, num_sanity_val_steps=2)
    with mock.patch.object(lightning_loops, "dist", elsewhere):
        trainer.fit(module)
        fitted = numbers(trainer.callback_metrics)
        predicted = trainer.predict(module)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module)
    return {"fitted": fitted, "predicted": predicted, "parameters": whole_parameters(module)}


def test_C11_training_after_an_evaluation_that_lightning_runs_in_inference_mode(pool):
    check_same(pool, 2, with_inference_mode)


class BuiltLate(AllLoops):
    """Makes its last layer in `configure_model`."""

    guarded = True

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def configure_model(self) -> None:
        if self.guarded and "head" in self._modules:
            return
        torch.manual_seed(3)
        self.head = nn.Linear(16, self.vocab, bias=False)


class BuiltAgain(BuiltLate):
    guarded = False


def late_model(make: MakeTrainer) -> dict[str, Any]:
    module = BuiltLate()
    trainer = make(max_epochs=1)
    before = trainer.validate(module, verbose=False)
    trainer.fit(module)
    return {"before": before, "after": trainer.test(module, verbose=False), "parameters": whole_parameters(module)}


def refusals_of_a_sharded_module() -> dict[str, str]:
    quiet()
    module = AllLoops()
    sharded(1)(max_steps=1).fit(module)
    other_layout = error_of(lambda: sharded(2)(max_steps=1).fit(module))
    rebuilt = BuiltAgain()
    trainer = sharded(1)(max_steps=1)
    trainer.fit(rebuilt)
    return {"layout": other_layout, "rebuilt": error_of(lambda: trainer.validate(rebuilt, verbose=False))}


def test_configure_model_runs_before_every_loop_and_keeps_the_layers(pool):
    check_same(pool, 2, late_model)


def test_C13_E10_another_layout_and_rebuilt_layers_are_refused_by_name(pool):
    for seen in pool.run(2, refusals_of_a_sharded_module):
        assert "sharded as pp1.dp1x2.cp1.tp1 in a Trainer with layout pp1.dp2x1.cp1.tp1" in seen["layout"]
        assert "configure_model() made 'head.weight' again" in seen["rebuilt"]


class Sampling(Callback):
    """Uses the module outside its steps, at every hook a callback may choose."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.plain: list[str] = []

    def use(self, where: str, module: LightningModule) -> None:
        tokens_BT = torch.arange(12).remainder(31).view(2, 6)
        with torch.no_grad():
            self.seen[f"{where} {len(self.seen)}"] = {
                "whole": module(tokens_BT),
                "block": module.blocks[1](torch.ones(1, 3, 16, dtype=torch.float64)),
                "embedding": module.embedding(tokens_BT),
                "generated": module.generate(tokens_BT),
            }
        if isinstance(module.trainer.strategy, NDStrategy):
            self.plain += [f"{where}: {n}" for n, p in module.named_parameters() if not isinstance(p, DTensor)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.use("on_train_start", pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.use("on_train_batch_end", pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.use("on_train_epoch_end", pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.use("on_validation_epoch_end", pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.use("on_fit_end", pl_module)


class Generating(AllLoops):
    def generate(self, tokens_BT: Tensor) -> Tensor:
        for _ in range(3):
            tokens_BT = torch.cat((tokens_BT, self(tokens_BT[:, -6:])[:, -1:].argmax(-1)), dim=1)
        return tokens_BT


def sampling(make: MakeTrainer) -> dict[str, Any]:
    callback = Sampling()
    module = Generating()
    make(max_epochs=2, limit_train_batches=2, callbacks=[callback], num_sanity_val_steps=1).fit(module)
    assert not callback.plain, callback.plain
    return {"seen": callback.seen, "parameters": whole_parameters(module)}


@pytest.mark.parametrize("replicate", [1, 2])
def test_callbacks_call_the_module_outside_a_step(pool, replicate):
    seen = check_same(pool, 2, sampling, replicate=replicate)
    assert len(seen[0]["seen"]) == 1 + 1 + 4 + 2 + 2 + 1
