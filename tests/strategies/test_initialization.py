"""Initial weights, buffers and compiled blocks: those of one process, or of data-parallel rank 0, on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from tests.modules import TinyGPT, WithBuffers
from tests.strategies.scenarios import MakeTrainer, check_same, numbers, quiet, sharded, whole_parameters


class OnMeta(TinyGPT):
    """Builds everything in configure_model, on the meta device if told so; embedding and head may be tied."""

    def __init__(self, meta: bool, tied: bool) -> None:
        LightningModule.__init__(self)
        self.meta, self.tied = meta, tied

    def configure_model(self) -> None:
        if "blocks" in self._modules:
            return
        settings = {"rope": True, "tied": self.tied, "layers": 2}
        with torch.device("meta") if self.meta else torch.device("cpu"):
            built = TinyGPT(**settings)
        for name, value in built.__dict__.items():
            if name in ("batch_size", "samples", "lr", "vocab", "length", "rope", "positions"):
                setattr(self, name, value)
        for name, child in built._modules.items():
            setattr(self, name, MulticlassAccuracy(31, average="micro") if "accuracy" in name else child)


def initial(make: MakeTrainer, meta: bool, tied: bool) -> dict[str, Any]:
    quiet()
    seed_everything(7, verbose=False)
    module = OnMeta(meta, tied)
    trainer = make(precision="32-true")
    seen = {"before": trainer.validate(module, verbose=False), "parameters": whole_parameters(module)}
    if tied:
        assert module.head.weight is module.embedding.weight
    return seen


def initial_sharded(replicate: int, meta: bool, tied: bool) -> dict[str, Any]:
    return initial(sharded(replicate), meta, tied)


def initial_alone(meta: bool, tied: bool) -> dict[str, Any]:
    return initial(sharded(1), meta, tied)


@pytest.mark.parametrize("tied", [False, True])
def test_E5_a_model_built_on_meta_has_the_weights_of_one_process(pool, tied):
    (expected,) = pool.run(1, initial_alone, True, tied)
    (plain,) = pool.run(1, initial_alone, False, tied)
    assert expected["parameters"].keys() == plain["parameters"].keys()
    if not tied:  # a tied head draws its own values first when it is built for real, and then drops them
        for name, weight in plain["parameters"].items():
            assert torch.equal(expected["parameters"][name], weight), name
    for replicate in (1, 2):
        for seen in pool.run(2, initial_sharded, replicate, True, tied):
            for name, weight in expected["parameters"].items():
                assert torch.equal(seen["parameters"][name], weight), name


def unseeded(replicate: int) -> dict[str, Any]:
    """Each rank builds a model of its own."""
    quiet()
    torch.manual_seed(100 + torch.distributed.get_rank())
    module = TinyGPT(layers=2)
    mine = {name: p.detach().double() for name, p in module.named_parameters()}
    sharded(replicate)().validate(module, verbose=False)
    return {"built": mine, "trained": whole_parameters(module)}


@pytest.mark.parametrize("replicate", [1, 2])
def test_without_a_seed_all_ranks_start_with_the_weights_of_rank_0(pool, replicate):
    first, second = pool.run(2, unseeded, replicate)
    assert not torch.equal(first["built"]["head.weight"], second["built"]["head.weight"])
    for name, weight in first["built"].items():
        assert torch.equal(first["trained"][name], weight), name
        assert torch.equal(second["trained"][name], weight), name


def buffers(make: MakeTrainer) -> dict[str, Any]:
    module = WithBuffers()
    trainer = make(max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    return {
        "metrics": numbers(trainer.callback_metrics),
        "buffers": dict(module.named_buffers()),
        "parameters": whole_parameters(module),
    }


@pytest.mark.parametrize("replicate", [1, 2])
def test_A7_buffers_follow_the_rule_of_ddp(pool, replicate):
    ranks = check_same(pool, 2, buffers, replicate=replicate)
    assert ranks[0]["buffers"]["norm.num_batches_tracked"] == 12
    for name, buffer in ranks[0]["buffers"].items():
        assert torch.equal(buffer, ranks[1]["buffers"][name]), name


def compiled(compile_blocks: bool) -> dict[str, Any]:
    quiet()
    seed_everything(0, verbose=False)
    module = TinyGPT(layers=2)
    trainer = sharded(compile_blocks=compile_blocks)(max_epochs=1)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    assert isinstance(module.blocks, nn.ModuleList)
    assert not [name for name in module.state_dict() if "_orig_mod" in name]
    return {"metrics": numbers(trainer.callback_metrics), "parameters": whole_parameters(module)}


@pytest.mark.slow
def test_compiled_blocks_give_the_numbers_of_eager_ones(pool):
    eager, fast = (pool.run(2, compiled, value, timeout=400) for value in (False, True))
    for expected, actual in zip(eager, fast, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
