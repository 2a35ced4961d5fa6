"""What users of tensor parallelism elsewhere have reported as broken, each with its right value."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_4d import NDStrategy
from lightning_4d._torch_private import HAS_STRIDED_SHARDS
from tests.harness import compare, reference, train
from tests.modules import TinyGPT, WithScalar
from tests.parallel.tensor.modules import Llama, NanoGPT, NormedGPT
from tests.strategies.scenarios import numbers, quiet, sharded, trainer_with
from tests.strategies.test_data import reading
from tests.strategies.test_initialization import initial, initial_alone
from tests.strategies.test_tensor_parity import check, slow

TP = partial(NDStrategy, tensor_parallel_size=2)
LAYOUTS = [slow(1, 2), (2, 2)]  # shard, tensor


# ------------------------------------------------------------------------------------------- numbers that are shown


class Counting(TinyGPT):
    """Counts samples in three ways."""

    def __init__(self) -> None:
        super().__init__(layers=1, samples=16)
        self.seen = SumMetric()
        self.judged = MulticlassAccuracy(self.vocab, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (tokens_BT,) = batch
        self.log("summed", float(len(tokens_BT)), reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        self.seen.update(float(len(tokens_BT)))
        self.log("metric", self.seen)
        self.judged.update(self(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())

    def on_validation_epoch_end(self) -> None:
        self.judged.compute()
        counts = self.judged.tp + self.judged.fn  # of the rank's own share after compute has given it back
        self.log("judged", counts.sum().float(), sync_dist=True, reduce_fx="sum")


def counted(shard: int, tensor: int) -> dict[str, float]:
    quiet()
    make = trainer_with(partial(NDStrategy, data_parallel_shard_size=shard, tensor_parallel_size=tensor))
    trainer = make()
    trainer.validate(Counting(), verbose=False)
    return numbers(trainer.callback_metrics)


@pytest.mark.parametrize(("shard", "tensor"), LAYOUTS)
def test_C1_every_sample_counts_once(pool, shard, tensor):
    for metrics in pool.run(shard * tensor, counted, shard, tensor):
        assert metrics["summed"] == 8
        assert metrics["metric"] == 8
        assert metrics["judged"] == 8 * 12, "targets of all samples"


# ---------------------------------------------------------------------------------------------------- who reads what


def read_by_groups(workers: int) -> dict[str, Any]:
    quiet()
    make = trainer_with(partial(NDStrategy, data_parallel_shard_size=2, tensor_parallel_size=2))
    return reading(make, workers)


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_F1_ranks_of_a_group_read_the_same_samples_and_groups_share_the_data_set(pool, workers):
    ranks = pool.run(4, read_by_groups, workers)
    for first, second in ((ranks[0], ranks[1]), (ranks[2], ranks[3])):
        for stage in ("train", "val"):
            assert torch.equal(first["read"][stage], second["read"][stage])
            assert torch.equal(first["contents"][stage], second["contents"][stage]), "augmented in the same way too"
    mine, theirs = (rank["read"]["train"].view(2, 11) for rank in (ranks[0], ranks[2]))
    for epoch in range(2):
        assert set(mine[epoch].tolist()).isdisjoint(theirs[epoch].tolist())
        assert set(mine[epoch].tolist()) | set(theirs[epoch].tolist()) == set(range(22))
    assert not torch.equal(mine[0], mine[1]), "shuffled anew in each epoch"
    assert not torch.equal(ranks[0]["contents"]["train"], ranks[2]["contents"]["train"])


# -------------------------------------------------------------------------------------------------- weights and states


def initial_divided(tied: bool) -> dict[str, Any]:
    return initial(sharded(tensor_parallel_size=2), True, tied)


@pytest.mark.parametrize("tied", [slow(False), True])
def test_E5_initial_weights_are_those_of_one_process_to_the_last_bit(pool, tied):
    (expected,) = pool.run(1, initial_alone, True, tied)
    for world in (2, 4):
        for seen in pool.run(world, initial_divided, tied):
            assert seen["parameters"].keys() == expected["parameters"].keys()
            for name, weight in expected["parameters"].items():
                assert torch.equal(seen["parameters"][name], weight), name


def test_E1_every_row_of_a_tied_vocabulary_that_does_not_divide_is_trained(pool):
    module = partial(TinyGPT, vocab=7, layers=1, tied=True)
    check(pool, module, 2)
    check(pool, module, 2, 2)


class Adam(NanoGPT):
    """AdamW by foreach over all parameters that train: CUDA's default."""

    def configure_optimizers(self) -> Any:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, eps=1e-3, foreach=True)


MLP_ONLY = {"h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"}


@pytest.mark.parametrize("algorithm", ["norm", slow("value")])
@pytest.mark.parametrize("shard", [1, 2])
def test_B2_B3_clipping_and_foreach_with_only_the_mlp_divided(pool, shard, algorithm):
    # Norms and attention are whole on each rank, so the norm of the gradients has to count them once.
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    check(pool, Adam, 2, shard, options={"tensor_parallel_plan": MLP_ONLY}, **clip)


class Looking(Callback):
    """Notes what the optimizer holds."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        states = trainer.optimizers[0].state
        for name, parameter in pl_module.named_parameters():
            self.seen[name] = (parameter.requires_grad, parameter in states, isinstance(parameter, DTensor))


class FrozenEmbedding(Adam):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = torch.nn.Parameter(self.wte.weight.detach().clone())
        self.wte.requires_grad_(False)
        self.h[0].mlp["c_fc"].requires_grad_(False)


def frozen() -> dict[str, Any]:
    looking = Looking()
    train(FrozenEmbedding, TP, callbacks=lambda: [looking])
    return looking.seen


def test_B8_frozen_parameters_stay_frozen_and_have_no_state(pool):
    check(pool, FrozenEmbedding, 2)
    names = {"wte.weight", "h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias"}
    for seen in pool.run(2, frozen):
        assert {name for name, (trains, *_) in seen.items() if not trains} == names
        assert {name for name, (_, has_state, _) in seen.items() if not has_state} == names
        assert all(is_dtensor for *_, is_dtensor in seen.values()), "one kind of tensor: what mixes them fails"


@pytest.mark.parametrize("shard", [slow(1), 2])
def test_E9_a_parameter_without_dims_is_trained_on_all_ranks(pool, shard):
    check(pool, WithScalar, 2, shard)


class ShowingTypes(Llama):
    """Notes dtypes inside the training step."""

    def loss(self, batch: Any, stage: str) -> Tensor:
        loss = super().loss(batch, stage)
        self.seen = {
            "cos": self.cos.dtype,
            "tokens": batch[0].dtype,
            "loss": loss.dtype,
            "weight": self.layers[0].attention.wq.weight.dtype,
            "logits": self(batch[0][:, :-1]).dtype,
        }
        return loss


def types(strategy: Any, precision: str) -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}

    class Noting(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            found.update(pl_module.seen)

    train(ShowingTypes, strategy, precision=precision, steps=1, callbacks=lambda: [Noting()])
    return found


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", slow("32-true")])
def test_E8_buffers_and_batches_have_the_types_that_one_process_gives_them(pool, precision):
    (expected,) = pool.run(1, types, "auto", precision)
    assert pool.run(2, types, TP, precision) == [expected] * 2
    assert expected["tokens"] == torch.int64


# -------------------------------------------------------------------------------------------------------- random masks


class Masks(NanoGPT):
    """Notes where dropout on the residual stream and on divided attention weights gave zero."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.zeros: dict[str, Tensor] = {}
        for name in ("attn_dropout", "resid_dropout"):
            getattr(self.h[0].attn, name).register_forward_hook(partial(self.note, name))

    def note(self, name: str, module: Any, args: Any, output: Any) -> None:
        local = getattr(output, "local", output)
        before = getattr(args[0], "local", args[0])
        self.zeros[name] = (local == 0) & (before != 0)


def masks() -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    class Noting(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            found.update(pl_module.zeros)

    train(Masks, TP, steps=1, callbacks=lambda: [Noting()])
    return found


@pytest.mark.skipif(not HAS_STRIDED_SHARDS, reason="fused weights are divided since torch 2.13")
def test_dropout_has_one_mask_where_ranks_hold_the_same_and_another_on_each_part(pool):
    first, second = pool.run(2, masks)
    assert torch.equal(first["resid_dropout"], second["resid_dropout"])
    assert first["attn_dropout"].shape[1] == 2, "half of the heads"
    assert not torch.equal(first["attn_dropout"], second["attn_dropout"])
    for name in ("resid_dropout", "attn_dropout"):
        assert 0.2 < first[name].float().mean() < 0.7, "half, of what causality left"


# ----------------------------------------------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize(
    "options",
    [slow({}), {"ignore_index": 3, "label_smoothing": 0.1}, slow({"reduction": "sum", "ignore_index": 3})],
    ids=["plain", "smoothed", "sum"],
)
@pytest.mark.parametrize("vocab", [7, 8])
def test_H1_H2_losses_over_classes_that_divide_and_that_do_not(pool, options, vocab):
    check(pool, partial(Llama, layers=1, vocab=vocab, loss_options=options, lr=0.02), 2, steps=2)


# ---------------------------------------------------------------------------------------------- with sequences divided


def test_C2_F9_norms_of_queries_and_keys_with_divided_sequences(pool):
    expected = reference(pool, 1, NormedGPT, limit_val_batches=2)
    layout = partial(NDStrategy, context_parallel_size=2, tensor_parallel_size=2)
    for rank, actual in enumerate(pool.run(4, train, NormedGPT, layout, limit_val_batches=2)):
        compare(actual, expected[0], rtol=1e-10, label=f"rank {rank} ")  # the shown loss is the whole one, on each


# ------------------------------------------------------------------------------------------------- whole parameters


@pytest.mark.parametrize("sequence_parallel", [slow(False), True])
def test_copies_of_whole_parameters_stay_equal_to_the_last_bit(pool, sequence_parallel):
    # Under sequence parallelism a norm's gradient on a rank is a part of it, from its part of the tokens.
    mine, theirs = pool.run(2, copies, sequence_parallel)
    assert mine.keys() == theirs.keys()
    assert "h.0.ln_1.weight" in mine
    for name, parameter in mine.items():
        assert torch.equal(parameter, theirs[name]), name
    expected = reference(pool, 1, NanoGPT)
    strategy = partial(TP, sequence_parallel=sequence_parallel)
    compare(pool.run(2, train, NanoGPT, strategy)[1], expected[0], rtol=1e-10)


def copies(sequence_parallel: bool) -> dict[str, Tensor]:
    """This rank's copies of parameters that are whole on every rank, after training."""
    found: dict[str, Tensor] = {}

    class Keeping(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            for name, parameter in pl_module.named_parameters():
                if isinstance(parameter, DTensor) and parameter.placements[0].is_replicate():
                    found[name] = parameter.to_local().detach().clone()

    train(NanoGPT, partial(TP, sequence_parallel=sequence_parallel), callbacks=lambda: [Keeping()])
    return found
