"""ActivationCheckpointing gives the numbers of a run without it, under every strategy, and costs no communication."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_4d import NDStrategy
from lightning_4d.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.recompute import installed, recompute_plan
from tests.harness import Recording, compare, train
from tests.modules import Block, EncoderStack, TinyGPT

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "sqrt": {"policy": "sqrt"},
    "segments": {"policy": "sqrt", "segments": 2},
    "nested": {"policy": "sqrt", "segments": 2, "nested": True},
    "every_k": {"policy": "every_k", "every_k": 2},
    "selective": {"policy": "selective"},
    "budget": {"policy": "budget", "budget_bytes": 300_000},
}


class WithArguments(TinyGPT):
    """Blocks get arguments that differ, and there is code between them."""

    class Layer(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.inner = Block(dim, 4, dropout=0.5)

        def forward(self, x: Tensor, index: int, *, hidden: list[Tensor], mask: Tensor | None = None) -> Tensor:
            x = self.inner(x) * (index + 1)
            hidden = [*hidden, x]
            return x if mask is None else x * mask + hidden[0]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = nn.ModuleList(self.Layer(16) for _ in range(4))
        self.embed, self.out = nn.Embedding(31, 16), nn.Linear(16, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        x, hidden = self.embed(tokens), []
        for index, block in enumerate(self.blocks):
            mask = torch.ones(16, dtype=x.dtype) * index if index % 2 else None
            x = block(x, index, hidden=hidden, mask=mask)
            hidden.append(x)
            x = x * 1.1
        return self.out(x + hidden[1])


class BuiltLate(TinyGPT):
    """Makes its blocks in configure_model, and shards them there if it is given a mesh."""

    def __init__(self, shard: bool = False) -> None:
        super().__init__(layers=1, dropout=0.5)
        self.shard = shard

    def configure_model(self) -> None:
        if len(self.blocks) == 1:
            self.blocks = nn.ModuleList(Block(16, 4, dropout=0.5) for _ in range(4))
            if self.shard:
                mesh = self.device_mesh["data_parallel"]
                for block in self.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(self, mesh=mesh)


GPT = partial(TinyGPT, layers=4, dropout=0.5)
TIED = partial(TinyGPT, layers=4, dropout=0.5, tied=True)
ENCODER = partial(EncoderStack, layers=4, dropout=0.5)


class PlanRecorder(Callback):
    """Notes the plan at the end of fit."""

    def __init__(self) -> None:
        self.plan: dict[str, float] = {}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.plan = dict(recompute_plan(pl_module))


def run_policies(module: Any, strategy: Any, names: list[str], communication: bool, precision: str) -> list[Recording]:
    """On one rank: the run without checkpointing, then one with each policy."""
    settings: dict[str, Any] = {"count_communication": communication, "precision": precision}
    runs = [train(module, strategy, **settings)]
    for name in names:
        plan = PlanRecorder()
        callbacks = partial(_callbacks, name, plan)
        runs.append(train(module, strategy, callbacks=callbacks, **settings))
        assert any(value > 0 for value in plan.plan.values()) or name == "selective", plan.plan
        assert plan.plan, "the policy was not installed"
    return runs


def _callbacks(name: str, plan: PlanRecorder) -> list[Callback]:
    return [ActivationCheckpointing(**POLICIES[name]), plan]


def check(
    pool: Any,
    world: int,
    module: Any,
    strategy: Any,
    names: list[str],
    *,
    communication: bool = False,
    precision: str = "64-true",
) -> None:
    task = (module, strategy, names, communication, precision)
    for plain, *recomputed in pool.run(world, run_policies, *task, timeout=300.0):
        for name, run in zip(names, recomputed, strict=True):
            compare(run, plain, rtol=0.0, label=f"{name}: ")
            assert run.communication == plain.communication, name
            assert not communication or run.communication


def layout(replicate: int, shard: int, **options: Any) -> Any:
    return partial(NDStrategy, data_parallel_replicate_size=replicate, data_parallel_shard_size=shard, **options)


def test_single_process(pool):
    check(pool, 1, GPT, "auto", list(POLICIES))


@pytest.mark.parametrize("module", [TIED, ENCODER, WithArguments], ids=["tied", "encoder", "arguments"])
def test_other_modules_in_a_single_process(pool, module):
    check(pool, 1, module, "auto", ["sqrt", "segments", "nested", "selective"])


def test_ddp(pool):
    check(pool, 2, GPT, "ddp", list(POLICIES))


@pytest.mark.parametrize(("replicate", "shard"), [(1, 2), (2, 1)])
def test_sharded_and_replicated_without_more_communication(pool, replicate, shard):
    check(pool, 2, GPT, layout(replicate, shard), list(POLICIES), communication=True)


@pytest.mark.parametrize("module", [TIED, ENCODER, WithArguments], ids=["tied", "encoder", "arguments"])
def test_other_modules_sharded(pool, module):
    check(pool, 2, module, layout(1, 2), ["segments", "nested"], communication=True)


def test_hsdp(pool):
    check(pool, 4, GPT, layout(2, 2), ["segments", "nested"], communication=True)


def test_blocks_made_late_and_sharded_by_the_user(pool):
    strategy = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    module = partial(BuiltLate, shard=True)
    check(pool, 2, module, strategy, ["full", "segments", "nested"], communication=True, precision="32-true")
    check(pool, 2, BuiltLate, layout(1, 2), ["segments"])


def run_accumulating(strategy: Any, policy: str | None) -> Recording:
    callbacks = None if policy is None else partial(_callbacks, policy, PlanRecorder())
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "limit_val_batches": 2}
    return train(GPT, strategy, callbacks=callbacks, precision="bf16-mixed", **settings)


def test_mixed_precision_accumulation_clipping_and_validation(pool):
    plain = pool.run(2, run_accumulating, layout(1, 2), None)
    for policy in ("segments", "nested", "selective"):
        compare(pool.run(2, run_accumulating, layout(1, 2), policy), plain, rtol=0.0)


def test_compiled_blocks_of_the_strategy(pool):
    strategy = layout(1, 1, compile_blocks=True)
    plain = pool.run(1, run_compiled, strategy, None, timeout=300.0)
    compare(pool.run(1, run_compiled, strategy, "nested", timeout=300.0), plain, rtol=1e-12)


def run_compiled(strategy: Any, policy: str | None) -> Recording:
    compiler = torch.compile
    torch.compile = partial(compiler, backend="aot_eager")  # type: ignore[assignment]
    callbacks = None if policy is None else partial(_callbacks, policy, PlanRecorder())
    return train(partial(TinyGPT, layers=4), strategy, callbacks=callbacks, steps=2)


def quiet_trainer(*callbacks: Callback, **settings: Any) -> Trainer:
    defaults = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False, "enable_checkpointing": False}
    defaults |= {"enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    return Trainer(callbacks=list(callbacks), **(defaults | settings))


@pytest.mark.filterwarnings("ignore")
def test_the_policy_ends_with_fit_and_another_may_follow():
    module = GPT()
    names = list(module.state_dict())
    for policy, extra in (
        ({"policy": "full"}, [1, 1, 1, 1]),
        (POLICIES["every_k"], [0, 1, 0, 1]),
        ({"policy": "none"}, []),
    ):
        recorder = PlanRecorder()
        quiet_trainer(ActivationCheckpointing(**policy), recorder).fit(module)
        assert list(recorder.plan.values()) == extra
        assert installed(module) is None
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
        assert list(module.state_dict()) == names


@pytest.mark.filterwarnings("ignore")
def test_the_policy_ends_with_an_exception():
    class Fails(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError("on purpose")

    module = GPT()
    with pytest.raises(ValueError, match="on purpose"):
        quiet_trainer(ActivationCheckpointing("full"), Fails()).fit(module)
    assert installed(module) is None


@pytest.mark.filterwarnings("ignore")
def test_refusals():
    with pytest.raises(UnsupportedError, match="use 'sqrt'"):
        ActivationCheckpointing("sqrrt")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="two ActivationCheckpointing"):
        quiet_trainer(ActivationCheckpointing("full"), ActivationCheckpointing()).fit(GPT())
    with pytest.raises(UnsupportedError, match="there is no such module"):
        quiet_trainer(ActivationCheckpointing(blocks="layers")).fit(GPT())
    trainer = SimpleNamespace(strategy=FSDPStrategy(), callbacks=[])
    with pytest.raises(UnsupportedError, match="ActivationCheckpointing with FSDPStrategy"):
        ActivationCheckpointing().setup(trainer, GPT(), "fit")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_offload_changes_nothing_on_cpu():
    module, losses = GPT(), []

    class Losses(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    for offload in (False, True):
        torch.manual_seed(0)
        quiet_trainer(ActivationCheckpointing("full", offload=offload), Losses()).fit(GPT())
    assert losses[0] == losses[1]
    assert math.isfinite(losses[0])
    assert installed(module) is None
