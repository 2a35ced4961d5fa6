"""A pipeline rank holds its own stages only: parameters, gradients, optimizer states, and activations in flight."""

from __future__ import annotations

import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import AdamW
from torch.utils._pytree import tree_leaves

from lightning_4d import NDStrategy
from lightning_4d.absent import is_absent
from tests.harness import compare, staged_tensors, train
from tests.modules import Block, TinyGPT
from tests.staged_modules import Staged
from tests.strategies.scenarios import quiet, trainer_with


class Held(Callback):
    """Elements in the memory of this rank after a step, of what the module and its optimizer name."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.names: list[str] = []
        self.in_flight: dict[int, int] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        parameters = list(pl_module.parameters())
        held = [p for p in parameters if not is_absent(p)]
        self.names = [name for name, p in pl_module.named_parameters() if not is_absent(p)]
        states = tree_leaves([list(values.values()) for values in trainer.optimizers[0].state.values()])
        self.sizes = {
            "all": sum(p.numel() for p in parameters),
            "held": sum(p.numel() for p in held),
            "parameters": _elements(parameters),
            "gradients": _elements([p.grad for p in parameters if p.grad is not None]),
            "states": _elements(states),
        }
        self.in_flight = trainer.strategy._pipeline.pipeline.most_in_flight


def _elements(tensors: list[Any]) -> int:
    """Elements of distinct storages, of local parts."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, Tensor) and t.ndim]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size() for t in local}
    return sum(storages.values())


class WithAdam(TinyGPT):
    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=0.01)


OLD: list[Any] = []  # weak references to the gradients of the step before
ALIVE: dict[int, float] = {}  # by training step: which share of them exists while it makes new ones


class LooksBack(WithAdam):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ALIVE[batch_idx] = sum(reference() is not None for reference in OLD) / max(len(OLD), 1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        OLD[:] = [weakref.ref(p.grad) for p in self.parameters() if p.grad is not None]


class ReadsThem(LooksBack):
    def on_before_zero_grad(self, optimizer: Any) -> None: ...


def alive(module: Any, **settings: Any) -> dict[int, float]:
    OLD.clear()
    ALIVE.clear()
    strategy = NDStrategy(pipeline_parallel_size=2, num_microbatches=2)
    trainer = trainer_with(lambda: strategy)(limit_train_batches=4, max_epochs=1, limit_val_batches=0, **settings)
    trainer.fit(module(layers=2, batch_size=4))
    return dict(ALIVE)


def alive_by_case() -> list[dict[int, float]]:
    quiet()
    return [alive(LooksBack), alive(ReadsThem), alive(LooksBack, accumulate_grad_batches=2)]


def test_gradients_of_the_step_before_are_let_go_unless_someone_needs_them(pool):
    for cleared, read, accumulated in pool.run(2, alive_by_case):
        assert cleared == {0: 0, 1: 0, 2: 0, 3: 0}
        assert read == {0: 0, 1: 1, 2: 1, 3: 1}
        assert accumulated == {0: 0, 1: 1, 2: 0, 3: 1}


def held(schedule: str, microbatches: int) -> SimpleNamespace:
    callback = Held()
    strategy = partial(NDStrategy, pipeline_parallel_size=2, pipeline_schedule=schedule, num_microbatches=microbatches)
    train(partial(WithAdam, layers=4, batch_size=8), strategy, callbacks=lambda: [callback], gather=staged_tensors)
    return SimpleNamespace(sizes=callback.sizes, names=callback.names, in_flight=callback.in_flight)


def held_by_each() -> dict[str, SimpleNamespace]:
    runs = [("gpipe", 8), ("1f1b", 8), ("1f1b", 4), ("gpipe", 3)]
    return {f"{schedule} {count}": held(schedule, count) for schedule, count in runs}


def test_a_rank_holds_its_own_stages_only(pool):
    ranks = pool.run(2, held_by_each, timeout=200)
    for found in ranks:
        for callback in found.values():
            sizes = callback.sizes
            assert sizes["held"] < 0.65 * sizes["all"]
            absent = len(list(WithAdam(layers=4).parameters())) - len(callback.names)
            assert sizes["held"] <= sizes["parameters"] <= sizes["held"] + absent  # one element for each stand-in
            assert sizes["gradients"] == sizes["held"]
            assert sizes["states"] == 2 * sizes["held"]
    names = [set(found["1f1b 4"].names) for found in ranks]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {name for name, _ in WithAdam(layers=4).named_parameters()}
    # Activations of a stage: 1f1b holds as many as there are stages from it to the end, gpipe all microbatches.
    in_flight = {run: {**ranks[0][run].in_flight, **ranks[1][run].in_flight} for run in ranks[0]}
    assert in_flight == {
        "gpipe 8": {0: 8, 1: 8},
        "1f1b 8": {0: 2, 1: 1},
        "1f1b 4": {0: 2, 1: 1},
        "gpipe 3": {0: 3, 1: 3},
    }


class BuiltOnMeta(Staged):
    """Makes its layers in configure_model, where the strategy builds them without memory."""

    def __init__(self) -> None:
        super().__init__()
        del self.input, self.blocks, self.head

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        self.input = torch.nn.Linear(self.dim, self.dim)
        self.blocks = torch.nn.ModuleList(Block(self.dim, 2, causal=False) for _ in range(4))
        self.head = torch.nn.Linear(self.dim, 3)


def from_meta(strategy: Any, module: Any) -> Any:
    return train(module, strategy, gather=staged_tensors, precision="32-true")


def test_models_built_in_configure_model_start_as_in_one_process(pool):
    (expected,) = pool.run(1, from_meta, NDStrategy, BuiltOnMeta)
    for actual in pool.run(2, from_meta, partial(NDStrategy, pipeline_parallel_size=2), BuiltOnMeta):
        compare(actual, expected, rtol=1e-5)
