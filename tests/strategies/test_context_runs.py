"""Ordinary uses of a Trainer with context parallelism: evaluation, prediction, resuming, wrong data, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_4d import CPStrategy, NDStrategy
from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.context import SequenceTensor
from tests.modules import MLP, TinyGPT
from tests.strategies.scenarios import error_of, numbers, quiet, trainer_with, whole_parameters


def both(scenario: Any, *args: Any) -> tuple[Any, Any]:
    """On each of the ranks: what one process gives, and what all give together."""
    from lightning.pytorch import seed_everything

    quiet()
    results = []
    for make in (partial(_alone), trainer_with(partial(NDStrategy, context_parallel_size=dist.get_world_size()))):
        seed_everything(0, workers=True, verbose=False)
        results.append(scenario(make, *args))
    return results[0], results[1]


def _alone(**settings: Any) -> Any:
    from lightning.pytorch import Trainer

    from tests.strategies.scenarios import SETTINGS

    return Trainer(devices=1, **(SETTINGS | settings))


class Predicting(TinyGPT):
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        logits = self(batch[0][:, :-1])
        return {"logits": logits, "best": (logits.argmax(-1), [logits[:, -1]])}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        return {"logits": self(batch[0][:, :-1])}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert type(outputs["logits"]) is Tensor
        assert outputs["logits"].shape[:2] == (len(batch[0]), self.length)
        self.log("peak", outputs["logits"].amax())


def predict_and_evaluate(make: Any) -> Any:
    module = Predicting(layers=2)
    predictions = make(limit_predict_batches=2).predict(module, module.val_dataloader())
    metrics = make(limit_val_batches=2).validate(module, module.val_dataloader(), verbose=False)
    assert all(type(leaf) is Tensor for leaf in torch.utils._pytree.tree_leaves(predictions))
    return {"predictions": predictions, "metrics": metrics}


def test_predictions_and_outputs_are_whole(pool):
    for expected, actual in pool.run(2, both, predict_and_evaluate):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def fit_and_resume(folder: str) -> Any:
    quiet()
    from lightning.pytorch import seed_everything

    make = trainer_with(partial(NDStrategy, context_parallel_size=2))
    results = []
    for steps in ((4,), (2, 4)):
        seed_everything(0, workers=True, verbose=False)
        path = None
        for stop in steps:
            module = TinyGPT(layers=2, dropout=0.1)
            trainer = make(max_steps=stop, limit_val_batches=0, gradient_clip_val=0.5)
            trainer.fit(module, ckpt_path=path)
            path = f"{folder}/{len(steps)}-{stop}.ckpt"
            trainer.save_checkpoint(path)
        results.append({"parameters": whole_parameters(module), "loss": float(trainer.callback_metrics["train_loss"])})
    return results


def test_resuming_changes_no_number(pool, tmp_path):
    for straight, resumed in pool.run(2, fit_and_resume, str(tmp_path)):
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


def load_on_one(path: str) -> Any:
    quiet()
    module = TinyGPT(layers=2, dropout=0.1)
    trainer = trainer_with(NDStrategy)(max_steps=4, limit_val_batches=0, gradient_clip_val=0.5)
    trainer.fit(module, ckpt_path=path)
    return whole_parameters(module)


def test_a_checkpoint_loads_without_context_parallelism(pool, tmp_path):
    straight = pool.run(2, fit_and_resume, str(tmp_path))[0][0]
    loaded = pool.run(1, load_on_one, f"{tmp_path}/2-4.ckpt")[0]
    torch.testing.assert_close(loaded, straight["parameters"], rtol=0, atol=0)


# --------------------------------------------------------------------------------------------------- data and refusals


class ByGlobalRank(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (torch.full((13,), (index + dist.get_rank()) % 31),)


class Augmented(Dataset):
    """Each worker draws its own random tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (torch.randint(31, (13,)),)


def fit_on(dataset: type[Dataset], workers: int) -> Any:
    quiet()
    from lightning.pytorch import seed_everything

    seed_everything(dist.get_rank(), workers=True, verbose=False)  # a careless user: each rank its own seed
    module = TinyGPT(layers=2)
    loader = DataLoader(dataset(), batch_size=2, num_workers=workers)
    trainer = trainer_with(CPStrategy)(max_steps=3, limit_val_batches=0)
    trainer.fit(module, loader)
    return numbers(trainer.callback_metrics)


def wrong_data() -> str:
    return error_of(lambda: fit_on(ByGlobalRank, 0))


def test_different_batches_are_refused(pool):
    for message in pool.run(2, wrong_data):
        assert "different batches" in message
        assert "data_parallel_rank" in message


@pytest.mark.parametrize("workers", [0, 1])
def test_random_data_is_equal_in_a_group(pool, workers):
    first, second = pool.run(2, fit_on, Augmented, workers)
    assert first == second


def refusals() -> dict[str, str]:
    quiet()
    cases = {
        "no blocks": (MLP, {"context_parallel_size": 2}),
        "compiled": (TinyGPT, {"context_parallel_size": 2, "compile_blocks": True}),
        "method": (TinyGPT, {"context_parallel_size": 2, "context_parallel_attention": "rings"}),
        "ulysses": (
            TinyGPT,
            {"context_parallel_size": 2, "context_parallel_attention": "hybrid", "ulysses_size": 3},
        ),
        "heads": (
            partial(TinyGPT, heads=1),
            {"context_parallel_size": 2, "context_parallel_attention": "ulysses"},
        ),
    }
    found = {}
    for name, (module, options) in cases.items():
        make = trainer_with(partial(NDStrategy, **options))
        found[name] = error_of(lambda make=make, module=module: make(max_steps=1).fit(module()), UnsupportedError)
    return found


def test_refusals(pool):
    for found in pool.run(2, refusals):
        assert "MLP with context_parallel_size > 1" in found["no blocks"]
        assert "compile_blocks=True" in found["compiled"]
        assert "use 'ring'" in found["method"]
        assert "use one of [1, 2]" in found["ulysses"]
        assert "1 heads over 2 Ulysses ranks" in found["heads"]


class Watching(TinyGPT):
    """Notes what its blocks get."""

    def forward(self, tokens: Tensor) -> Tensor:
        seen: list[Any] = []
        handle = self.blocks[1].norm1.register_forward_hook(
            lambda m, args, out: seen.append((type(args[0]), args[0].shape))
        )
        logits = super().forward(tokens)
        handle.remove()
        assert [(kind, tuple(shape)) for kind, shape in seen] == [(SequenceTensor, (len(tokens), self.length, 16))]
        self.seen = len(seen)
        return logits


def watch() -> bool:
    quiet()
    module = Watching(layers=2)
    trainer_with(CPStrategy)(max_steps=1, limit_val_batches=0).fit(module)
    return module.seen == 1


def test_blocks_see_divided_sequences_of_the_whole_shape(pool):
    assert pool.run(2, watch) == [True, True]
