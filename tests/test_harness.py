"""The harness: DDP equals one process, what it records, and that a broken synchronisation turns the comparison red."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from tests.collectives import count_collectives
from tests.comparison import Recording
from tests.harness import compare, full_tensors, merge, reference, train
from tests.modules import GAN, MLP, EncoderStack, SyntheticModule, TinyGPT, ViT, WithBuffers, WithScalar, WithUnused
from tests.pool import Pool, WorkerError

MODULES: dict[str, Callable[[], SyntheticModule]] = {
    "TinyGPT": TinyGPT,
    "TinyGPT rope, separate qkv, tied": partial(TinyGPT, rope=True, fused_qkv=False, tied=True),
    "MLP": MLP,
    "ViT": ViT,
    "EncoderStack": EncoderStack,
    "WithScalar": WithScalar,
    "WithUnused": WithUnused,
    "GAN": GAN,
}
FIND_UNUSED = "ddp_find_unused_parameters_true"


def in_order(module: Callable[[], SyntheticModule], batch_size: int) -> DataLoader:
    """This rank's share of the samples, in their order: left alone, Lightning shuffles what it distributes."""
    dataset = module().dataset("train")
    return DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset, shuffle=False))


def on_two_ranks(pool: Pool, module: Callable[[], SyntheticModule], **kwargs: Any) -> list[Recording]:
    return pool.run(2, train, module, data=partial(in_order, module, 4), use_distributed_sampler=False, **kwargs)


def on_one_process(pool: Pool, module: Callable[[], SyntheticModule], **kwargs: Any) -> Recording:
    return reference(pool, 1, module, data=partial(in_order, module, 8), **kwargs)[0]


# -- the reference is right --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_ddp_equals_one_process(pool: Pool, name: str) -> None:
    module = MODULES[name]
    strategy = FIND_UNUSED if name in ("WithUnused", "GAN") else "ddp"
    two = on_two_ranks(pool, module, strategy=strategy)
    one = on_one_process(pool, module)
    compare(merge(two), one, rtol=1e-12, what=("losses", "gradients", "clipped", "parameters"))
    assert not all(torch.equal(one.parameters[name], start) for name, start in initial_parameters(module).items())


def initial_parameters(module: Callable[[], LightningModule]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: parameter.detach() for name, parameter in module().double().named_parameters()}


def test_batch_norm_of_ddp_is_local(pool: Pool) -> None:
    """Each rank normalises over its own batch, so the comparison with one process must see a difference."""
    two, one = on_two_ranks(pool, WithBuffers, strategy="ddp"), on_one_process(pool, WithBuffers)
    with pytest.raises(AssertionError, match=r"gradients\[0\]\['input.weight'\]"):
        compare(merge(two), one, rtol=1e-12, what=("gradients",))
    assert set(one.buffers) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "running_scale",
        "offset",
    }


def test_two_runs_are_equal_bit_for_bit(pool: Pool) -> None:
    first, second = (reference(pool, 2, TinyGPT, limit_val_batches=None, steps=8) for _ in range(2))
    compare(first, second, rtol=0.0)
    assert {"train_loss", "train_accuracy", "val_loss", "val_accuracy"} <= set(first[0].metrics)


def test_the_harness_runs_in_the_test_process_too(pool: Pool) -> None:
    compare(train(MLP), reference(pool, 1, MLP)[0], rtol=1e-12)  # it may have more threads than a rank


# -- what is recorded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.05, None])
def test_gradients_are_recorded_before_and_after_clipping(pool: Pool, clip: float | None) -> None:
    two = on_two_ranks(pool, TinyGPT, strategy="ddp", gradient_clip_val=clip)
    one = on_one_process(pool, TinyGPT, gradient_clip_val=clip)
    compare(merge(two), one, rtol=1e-12, what=("gradients", "clipped", "parameters"))
    for before, after in zip(one.gradients, one.clipped, strict=True):
        factor = 1.0 if clip is None else clip / (norm(before) + 1e-6)  # torch's epsilon
        assert clip is None or norm(before) > clip
        for name, gradient in before.items():
            torch.testing.assert_close(after[name], gradient * factor, rtol=1e-12, atol=0.0)


def norm(tensors: dict[str, Tensor]) -> float:
    return math.hypot(*(float(tensor.norm()) for tensor in tensors.values()))


def test_losses_are_not_divided_by_accumulation(pool: Pool) -> None:
    (plain,) = reference(pool, 1, MLP, steps=1)
    (accumulated,) = reference(pool, 1, MLP, steps=2, accumulate_grad_batches=3)
    assert len(accumulated.losses) == 6
    assert len(accumulated.gradients) == len(accumulated.clipped) == 2
    assert accumulated.losses[0] == pytest.approx(plain.losses[0], rel=1e-15)


def test_gradients_that_are_none_are_left_out(pool: Pool) -> None:
    (record,) = reference(pool, 1, WithUnused)
    assert not any(name.startswith(("unused", "frozen")) for step in record.gradients for name in step)
    assert {"unused.weight", "frozen.weight"} <= set(record.parameters)


def test_each_optimizer_has_its_own_entry(pool: Pool) -> None:
    (record,) = reference(pool, 1, GAN, steps=4)
    owners = [{name.split(".")[0] for name in step} for step in record.clipped]
    assert owners == [{"generator"}, {"discriminator"}] * 2


class CapturesParameters(MLP):
    """Its optimizer holds a parameter that the module has lost."""

    def configure_optimizers(self) -> Optimizer:
        optimizer = super().configure_optimizers()
        assert isinstance(optimizer, SGD)
        self.output.weight = nn.Parameter(self.output.weight.detach().clone())
        return optimizer


def test_an_optimizer_of_lost_parameters_is_noticed(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"1 tensors that are not parameters of the module.*\(1, 24\)"):
        reference(pool, 1, CapturesParameters)


def gather_in_every_way() -> dict[str, bool]:
    mesh = init_device_mesh("cpu", (2, 2))
    placements: dict[str, list[Placement]] = {
        "plain shards": [Replicate(), Shard(0)],
        "shards of dim 1 over the outer axis": [Shard(1), Replicate()],
        "both axes": [Shard(0), Shard(0)],
        "both dims": [Shard(1), Shard(0)],
        "replicas": [Replicate(), Replicate()],
    }
    tensors: dict[str, Tensor] = {"no DTensor": torch.arange(3.0)}
    expected = dict(tensors)
    for name, placement in placements.items():
        for rows in (1, 5, 8):  # 1: some ranks hold nothing
            whole = torch.rand(rows, 3)
            expected[f"{name} {rows}"] = whole
            tensors[f"{name} {rows}"] = distribute_tensor(whole, mesh, placement)
    expected["sums"] = torch.full((3,), 3.0)
    part = torch.full((3,), mesh.get_local_rank(0) + 1.0)
    tensors["sums"] = DTensor.from_local(part, mesh, [Partial(), Replicate()])
    expected["integers"] = torch.arange(5)
    tensors["integers"] = distribute_tensor(torch.arange(5), mesh, [Replicate(), Shard(0)])
    full = full_tensors(tensors)
    assert list(full) == list(tensors)
    return {name: type(full[name]) is Tensor and torch.equal(full[name], expected[name]) for name in expected}


def test_tensors_are_gathered_from_any_placement(pool: Pool) -> None:
    for result in pool.run(4, gather_in_every_way):
        assert len(result) == 18
        assert all(result.values()), result


class ShardedByHand(TinyGPT):
    """TinyGPT in FSDP2 groups, as one writes it for ModelParallelStrategy."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


def test_sharded_tensors_are_gathered(pool: Pool) -> None:
    strategy = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    sharded = pool.run(2, train, ShardedByHand, strategy, precision="32-true", count_communication=True)
    expected = reference(pool, 2, TinyGPT, precision="32-true")
    compare(sharded, expected, rtol=1e-5, what=("losses", "gradients", "clipped", "parameters"))
    # Three blocks and the root: one reduce-scatter each; all-gathers forward, and backward for the blocks only.
    counted = {(step["reduce_scatter"], step["all_gather"]) for record in sharded for step in record.communication}
    assert counted == {(4, 7)}


def test_collectives_of_ddp_are_counted_per_optimizer_step(pool: Pool) -> None:
    counts = [
        [step.get("all_reduce", 0) for step in record.communication]
        for record in reference(pool, 2, MLP, count_communication=True, accumulate_grad_batches=4)
    ]
    assert counts == [[1, 1, 1]] * 2


def some_collectives() -> dict[str, int]:
    with count_collectives() as counts:
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        dist.broadcast(torch.ones(1), src=0)
        dist.broadcast(torch.ones(1), src=0)
    dist.barrier()
    return dict(counts)


def test_collectives_are_counted_by_name(pool: Pool) -> None:
    assert pool.run(2, some_collectives) == [{"all_reduce": 1, "barrier": 1, "broadcast": 2}] * 2


# -- faults turn it red ------------------------------------------------------------------------------------------------


class ScaleOnRank1(Callback):
    """A gradient that is wrong by a factor, on one rank only."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 1:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 1 + 1e-6


def scale_on_rank_1() -> list[Callback]:
    return [ScaleOnRank1()]


def test_a_gradient_scaled_on_one_rank_is_found(pool: Pool) -> None:
    expected = reference(pool, 2, MLP, steps=1)
    broken = reference(pool, 2, MLP, steps=1, callbacks=scale_on_rank_1)
    with pytest.raises(
        AssertionError, match=r"rank 1 gradients\[0\]\['input.weight'\]: relative error 1e-06"
    ) as caught:
        compare(broken, expected, rtol=1e-10, what=("gradients",))
    assert "rank 0 " not in str(caught.value)
    with pytest.raises(AssertionError, match=r"rank 1 vs\. 0: gradients"):
        merge(broken)


class SkipAllReduce(Callback):
    """Gradients stay those of each rank's own batch."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, DDPStrategy)
        assert isinstance(trainer.strategy.model, DistributedDataParallel)
        trainer.strategy.model.register_comm_hook(None, without_all_reduce)


def skip_all_reduce() -> list[Callback]:
    return [SkipAllReduce()]


def without_all_reduce(state, bucket):  # no hints: torch compares them with classes, and here they would be strings
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_a_skipped_all_reduce_is_found(pool: Pool) -> None:
    expected = reference(pool, 2, TinyGPT)
    broken = reference(pool, 2, TinyGPT, callbacks=skip_all_reduce)
    with pytest.raises(AssertionError, match=r"gradients\[0\]"):
        compare(broken, expected, rtol=1e-1, what=("gradients",))
    with pytest.raises(AssertionError, match="parameters"):
        compare(broken, expected, rtol=1e-10, what=("parameters",))


# -- the comparison ----------------------------------------------------------------------------------------------------


def record(**changes: Any) -> Recording:
    weights = {"a": torch.tensor([3.0, 4.0], dtype=torch.float64), "b": torch.tensor(2.0, dtype=torch.float64)}
    base = Recording(
        losses=[0.1, 0.2],
        gradients=[weights],
        clipped=[weights],
        parameters=weights,
        buffers={"count": torch.tensor(3)},
        metrics={"loss": 0.1, "accuracy": 0.5},
    )
    return replace(base, **changes)


def weights(a: list[float], b: float = 2.0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"a": torch.tensor(a, dtype=dtype), "b": torch.tensor(b, dtype=dtype)}


def test_equal_records_are_equal() -> None:
    compare(record(), record(), rtol=0.0)
    compare([record()] * 2, [record()] * 2, rtol=0.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losses": [0.1]}, "losses: 1 entries, expected 2"),
        ({"losses": [0.1, 0.2000001]}, r"losses\[1\]: 0.2000001, expected 0.2, relative error 5e-07"),
        ({"losses": [0.1, math.nan]}, r"losses\[1\]: nan"),
        ({"parameters": {"a": torch.ones(2)}}, r"parameters\['b'\]: missing"),
        ({"parameters": weights([3, 4]) | {"c": torch.ones(1)}}, r"parameters\['c'\]: not expected"),
        ({"parameters": weights([3, 4], dtype=torch.float32)}, r"\(\(2,\), torch.float32\), expected .*float64"),
        ({"parameters": weights([3, 4, 5])}, r"shape and dtype \(\(3,\)"),
        ({"parameters": weights([3, 4.00001])}, r"parameters\['a'\]: relative error 2e-06"),
        ({"gradients": [weights([1.5, 2.0])]}, r"\['a'\]: relative error 0.5, norm 2.5, expected 5\b"),
        ({"clipped": [weights([3, math.nan])]}, r"clipped\[0\]\['a'\]: relative error nan"),
        ({"buffers": {"count": torch.tensor(4)}}, r"buffers\['count'\]: 4, expected 3"),
        ({"metrics": {"loss": 0.1, "accuracy": 0.50001}}, r"metrics\['accuracy'\]: 0.50001, expected 0.5"),
        ({"metrics": {"loss": 0.1}}, r"metrics\['accuracy'\]: missing"),
    ],
)
def test_differences_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        compare(record(**changes), record(), rtol=1e-8)
    with pytest.raises(AssertionError, match=f"rank 1 .*{said}"):
        compare([record(), record(**changes)], [record(), record()], rtol=1e-8)


def test_the_worst_come_first_and_the_list_is_short() -> None:
    many = {f"w{i}": torch.tensor(1.0, dtype=torch.float64) for i in range(20)}
    wrong = {name: value * (1 + 1e-3 * i) for i, (name, value) in enumerate(many.items(), start=1)}
    with pytest.raises(AssertionError) as caught:
        compare(record(parameters=wrong), record(parameters=many), rtol=1e-8)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("20 differences")
    assert lines[1].startswith("parameters['w19']")
    assert lines[-1] == "... and 10 more"


def test_noise_in_a_tensor_that_should_be_zero_is_allowed_but_no_more() -> None:
    expected = record(gradients=[weights([3, 4], b=1e-17)])
    compare(record(gradients=[weights([3, 4], b=-2e-17)]), expected, rtol=1e-10)
    for b in (1e-13, 1e-17 + 1e-14):
        with pytest.raises(AssertionError, match=r"gradients\[0\]\['b'\]"):
            compare(record(gradients=[weights([3, 4], b=b * 10)]), expected, rtol=1e-10)
    # bfloat16's own epsilon would hide everything.
    low = [weights([3, 4], b=1e-3, dtype=torch.bfloat16)]
    with pytest.raises(AssertionError, match=r"gradients\[0\]\['b'\]"):
        compare(record(gradients=[weights([3, 4], b=2e-3, dtype=torch.bfloat16)]), record(gradients=low), rtol=1e-2)


@pytest.mark.parametrize("name", ["losses", "gradients", "clipped", "parameters"])
def test_nothing_is_not_equal_to_nothing(name: str) -> None:
    empty = Recording(gradients=[{}]) if name == "gradients" else Recording()
    with pytest.raises(AssertionError, match=f"{name}: nothing was recorded"):
        compare(empty, empty, rtol=1.0, what=(name,))


def test_misuse_of_compare_is_told() -> None:
    with pytest.raises(ValueError, match=r"\['gradient'\]: name at least one of"):
        compare(record(), record(), rtol=0.0, what=("gradient",))
    with pytest.raises(ValueError, match="name at least one"):
        compare(record(), record(), rtol=0.0, what=())
    with pytest.raises(TypeError, match="a list with a list"):
        compare(record(), [record()], rtol=0.0)
    with pytest.raises(AssertionError, match="1 ranks recorded, 2 expected"):
        compare([record()], [record(), record()], rtol=0.0)
