"""Manual optimization, several optimizers, optimizers with closures, and ranks that use different parameters."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from lightning_4d import NDStrategy
from lightning_4d.parallel.data import participation
from tests.modules import MLP, Regression
from tests.pool import WorkerError
from tests.strategies.scenarios import MakeTrainer, check_same, error_of, numbers, quiet, sharded, whole_parameters

UNUSED = "ddp_find_unused_parameters_true"


class Actor(Regression):
    """B12: like soft actor-critic: three optimizers, a 0-d `log_alpha` used after another optimizer stepped."""

    def __init__(self, plain_backward: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.plain_backward = plain_backward
        self.actor = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))
        self.critic = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 1))
        self.log_alpha = nn.Parameter(torch.tensor(0.1))
        self.offset = nn.Parameter(torch.ones(3))

    def step(self, index: int, loss: Tensor) -> None:
        optimizer = self.optimizers()[index]
        optimizer.zero_grad()
        offset = self.offset.mean() + loss.detach()  # also after another optimizer's step, parameters are plain tensors
        if self.plain_backward and isinstance(self.trainer.strategy, NDStrategy):
            loss.backward()  # under Lightning's DDP, this would leave gradients unsynchronised
        else:
            self.manual_backward(loss)
        self.log(f"offset_{index}", offset)
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BC, target_B1 = batch
        with torch.no_grad():
            action_B1 = self.actor(x_BC)
        critic_loss = F.mse_loss(self.critic(torch.cat((x_BC, action_B1), 1)), target_B1)
        self.step(0, critic_loss)
        optimizer = self.optimizers()[1]
        self.toggle_optimizer(optimizer)
        action_B1 = self.actor(x_BC)
        value_B1 = self.critic(torch.cat((x_BC, action_B1), 1))
        actor_loss = (self.log_alpha.exp().detach() * action_B1.square() - value_B1).mean()
        self.step(1, actor_loss)
        self.untoggle_optimizer(optimizer)
        alpha_loss = -(self.log_alpha * (action_B1.detach().square().mean() - 0.5)) + self.offset.square().sum() * 0.1
        self.step(2, alpha_loss)
        alpha = self.log_alpha.exp()  # right after its own step: the new value
        self.log_dict(
            {"critic": critic_loss, "actor": actor_loss, "alpha": alpha.detach(), "offset": self.offset.mean()}
        )
        return critic_loss.detach()

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.actor(x_BC)

    def configure_optimizers(self) -> list[Optimizer]:
        return [
            AdamW(self.critic.parameters(), lr=0.01),
            SGD(self.actor.parameters(), lr=0.1),
            SGD([self.log_alpha, self.offset], lr=0.1),
        ]


class ByHand(MLP):
    """Accumulates over 3 batches by hand, with a plain backward or Lightning's."""

    def __init__(self, plain_backward: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.plain_backward = plain_backward

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch, "train") / 3
        if self.plain_backward and isinstance(self.trainer.strategy, NDStrategy):
            loss.backward()  # under Lightning's DDP, this would leave gradients unsynchronised
        else:
            self.manual_backward(loss)
        if (batch_idx + 1) % 3 == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def by_module(make: MakeTrainer, module: type, kwargs: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    built = module(**kwargs)
    trainer = make(**({"max_epochs": 1, "limit_val_batches": 2} | settings))
    trainer.fit(built)
    return {"metrics": numbers(trainer.callback_metrics), "parameters": whole_parameters(built)}


@pytest.mark.parametrize("plain_backward", [False, True])
@pytest.mark.parametrize("replicate", [1, 2])
def test_B12_several_optimizers_and_a_scalar_parameter(pool, plain_backward, replicate):
    check_same(pool, 2, by_module, Actor, {"plain_backward": plain_backward}, {}, ddp=UNUSED, replicate=replicate)


@pytest.mark.parametrize("plain_backward", [False, True])
def test_accumulation_by_hand(pool, plain_backward):
    check_same(pool, 2, by_module, ByHand, {"plain_backward": plain_backward}, {})


class WithLBFGS(MLP):
    def configure_optimizers(self) -> Optimizer:
        return LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=4)


def lbfgs(replicate: int) -> str:
    quiet()
    return error_of(lambda: sharded(replicate)(max_steps=1).fit(WithLBFGS()))


def test_lbfgs_is_refused_by_name(pool):
    for message in pool.run(2, lbfgs, 1):
        assert "LBFGS with layout pp1.dp1x2.cp1.tp1: it treats all parameters as one vector" in message


class Experts(Regression):
    """Two experts of one shape, blocks or not; batches alternate between them, in lockstep or not."""

    def __init__(self, lockstep: bool, blocks: bool = False) -> None:
        super().__init__()
        self.lockstep = lockstep
        make = nn.ModuleList if blocks else nn.ModuleDict
        experts = [nn.Linear(8, 8) for _ in range(2)]
        self.experts = make(experts if blocks else {str(i): e for i, e in enumerate(experts)})
        self.output = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BC, target_B1 = batch
        chosen = batch_idx % 2 if self.lockstep else (batch_idx + self.global_rank * (batch_idx > 1)) % 2
        expert = list(self.experts.children())[chosen]
        return F.mse_loss(self.output(torch.tanh(expert(x_BC))), target_B1)

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.output(next(self.experts.children())(x_BC))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("replicate", [1, 2])
def test_experts_used_in_lockstep(pool, blocks, replicate):
    kwargs = {"lockstep": True, "blocks": blocks}
    check_same(pool, 2, by_module, Experts, kwargs, {}, ddp=UNUSED, replicate=replicate)


def different_experts(replicate: int, blocks: bool) -> str:
    quiet()
    trainer = sharded(replicate)(max_epochs=1, limit_val_batches=0)
    return error_of(lambda: trainer.fit(Experts(lockstep=False, blocks=blocks)))


@pytest.mark.parametrize("replicate", [1, 2])
def test_ranks_that_use_different_parameters_of_one_shape_are_refused_on_all_ranks(pool, replicate):
    for message in pool.run(2, different_experts, replicate, False, timeout=60):
        assert message.startswith("UnsupportedError: the data-parallel ranks used different parameters in one backward")


@pytest.mark.parametrize("replicate", [1, 2])
def test_ranks_that_call_different_blocks_do_not_train_on(pool, replicate):
    for message in pool.run(2, different_experts, replicate, True, timeout=60):
        assert message.startswith("UnsupportedError: the data-parallel ranks used different parameters in one backward")


class DiffersLate(Experts):
    """The second rank leaves, in the third batch, what all batches did before; the first rank sees nothing new."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chosen = self.global_rank if batch_idx == 2 else 0
        expert = list(self.experts.children())[chosen]
        return F.mse_loss(self.output(torch.tanh(expert(batch[0]))), batch[1])


def differs_late(replicate: int, blocks: bool) -> None:
    quiet()
    participation.PATIENCE = timedelta(seconds=3)
    sharded(replicate)(max_epochs=1, limit_val_batches=0).fit(DiffersLate(lockstep=True, blocks=blocks))


@pytest.mark.parametrize(("replicate", "blocks"), [(1, True), (2, False)])
def test_a_rank_that_uses_other_parameters_later_ends_the_job_by_name(pool, replicate, blocks):
    with pytest.raises(WorkerError, match="UnsupportedError: the data-parallel ranks used different parameters"):
        pool.run(2, differs_late, replicate, blocks, timeout=60)


class EvaluatesDifferently(Experts):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        expert = list(self.experts.children())[self.global_rank if batch_idx == 1 else 0]
        self.log("val_loss", self.output(expert(batch[0])).mean(), sync_dist=True)


def evaluate_different_blocks() -> str:
    quiet()
    module = EvaluatesDifferently(lockstep=True, blocks=True)
    return error_of(lambda: sharded()().validate(module, verbose=False))


def test_ranks_that_evaluate_different_blocks_of_one_shape_are_refused_on_all_ranks(pool):
    for message in pool.run(2, evaluate_different_blocks, timeout=60):
        assert message.startswith("UnsupportedError: the data-parallel ranks called different blocks")


class Frozen(MLP):
    """B8: its first layer is frozen; weight decay and momentum would move it if the optimizer stepped it."""

    def __init__(self) -> None:
        super().__init__()
        self.input.requires_grad_(False)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def frozen(make: MakeTrainer) -> dict[str, Any]:
    module = Frozen()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = make(max_epochs=1)
    trainer.fit(module)
    after = whole_parameters(module)
    assert all(torch.equal(after[name], before[name].double()) for name in after if name.startswith("input"))
    assert all(p.grad is None and not p.requires_grad for p in module.input.parameters())
    states = trainer.optimizers[0].state
    assert all(p not in states for p in module.input.parameters())
    return {"parameters": after, "states": len(states)}


@pytest.mark.parametrize("replicate", [1, 2])
def test_B8_frozen_parameters(pool, replicate):
    check_same(pool, 2, frozen, replicate=replicate)
