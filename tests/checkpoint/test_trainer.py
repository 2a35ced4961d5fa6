"""Checkpoints through the Trainer: weights_only, errors by name, ModelCheckpoint, exceptions, paths."""

from __future__ import annotations

import io
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.optim import SGD, AdamW

from lightning_4d.checkpoint import open_checkpoint
from lightning_4d.errors import CheckpointError
from tests.checkpoint.modules import Portable
from tests.checkpoint.runs import fit, layout, same, states, trainer


class Custom:
    """Something that only unpickling brings back."""

    def __init__(self, value: int) -> None:
        self.value = value


class WithCustom(Portable):
    def __init__(self, custom: Custom | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.hparams["dim"] = 7


class OtherSizes(Portable):
    def __init__(self) -> None:
        super().__init__(dim=9)


class MoreLayers(Portable):
    def __init__(self, strict: bool = True) -> None:
        super().__init__()
        self.strict_loading = strict
        self.extra = torch.nn.Linear(7, 7)
        del self.unused


class OtherGroups(Portable):
    def configure_optimizers(self) -> Any:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=0.1)


class MoreOptimizers(Portable):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        groups = Portable.configure_optimizers(self)["optimizer"].param_groups
        return [AdamW(groups), SGD([self.scale], lr=0.1)]


def saved(folder: Path, module: Any = Portable, strategy: Any = None, steps: int = 2, **kwargs: Any) -> Path:
    fit(
        module,
        strategy or layout(1, 2),
        steps,
        checkpoint=ModelCheckpoint(folder, "a", every_n_train_steps=steps),
        **kwargs,
    )
    return folder / "a.ckpt"


def raised(kind: type[BaseException], function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def loading(folder: Path) -> None:
    path = saved(folder, partial(WithCustom, Custom(3)))
    resume = partial(fit, partial(WithCustom, Custom(3)), steps=3, ckpt_path=path)
    # D5: as plain Lightning, whose default is torch.load's.
    raised(pickle.UnpicklingError, resume, strategy=layout(1, 2))
    raised(pickle.UnpicklingError, resume, strategy=layout(1, 2), weights_only=True)
    fitted, _ = resume(strategy=layout(1, 2), weights_only=False)
    assert fitted.global_step == 3

    path = saved(folder / "b")
    message = raised(CheckpointError, fit, OtherSizes, layout(1, 2), 3, ckpt_path=path)
    assert "has shape (9, 9) here and (7, 7) in" in message
    message = raised(RuntimeError, fit, MoreLayers, layout(1, 2), 3, ckpt_path=path)
    assert 'Missing key(s) in state_dict: "extra.weight"' in message
    assert 'Unexpected key(s) in state_dict: "unused.bias", "unused.weight"' in message
    message = raised(CheckpointError, fit, OtherGroups, layout(1, 2), 3, ckpt_path=path)
    assert "optimizer parameter groups of [5, 7] parameters in the checkpoint and [12] here" in message, message
    message = raised(CheckpointError, fit, MoreOptimizers, layout(1, 2), 3, ckpt_path=path)
    assert "optimizer number 1 has no state in a checkpoint with 1" in message

    loose = partial(MoreLayers, strict=False)
    tester, module = trainer(layout(1, 2)), loose()
    before = module.extra.weight.detach().clone()
    tester.validate(module, module.val_dataloader(), ckpt_path=path, verbose=False)
    loaded = states(tester)["state_dict"]
    same(loaded["extra.weight"], before.double())
    opened = open_checkpoint(path)
    same(loaded["layers.0.linear.weight"], opened.tensor("state_dict.layers.0.linear.weight"))


def test_d5_weights_only_and_what_does_not_fit(pool, tmp_path):
    pool.run(2, loading, tmp_path)


class Unpicklable:
    """Its unpickling leaves a trace."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def poison(path: Path) -> None:
    """Replace the stored value of a learning rate, which is no tensor, by a pickle that runs code."""
    with path.joinpath(".metadata").open("rb") as file:
        metadata = pickle.load(file)
    index, info = next((i, info) for i, info in metadata.storage_data.items() if i.fqn.endswith(".lr"))
    buffer = io.BytesIO()
    torch.save(Unpicklable(), buffer)
    data = path / info.relative_path
    offset = data.stat().st_size
    with data.open("ab") as file:
        file.write(buffer.getvalue())
    metadata.storage_data[index] = type(info)(info.relative_path, offset, len(buffer.getvalue()))
    with path.joinpath(".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def resume_poisoned(folder: Path) -> tuple[bool, bool]:
    path = saved(folder, strategy=layout())
    poison(path)
    with pytest.raises(CheckpointError, match=r"Weights only load failed"):
        fit(Portable, layout(), 3, ckpt_path=path, weights_only=True)
    before = Path("unpickled").exists()
    with pytest.raises(TypeError):  # the learning rate is now what os.mkdir returns
        fit(Portable, layout(), 3, ckpt_path=path, weights_only=False)
    return before, Path("unpickled").exists()


def test_d5_values_in_a_folder_are_not_unpickled_under_weights_only(pool, tmp_path):
    assert pool.run(1, resume_poisoned, tmp_path) == [(False, True)]  # the second shows that the poison works


def model_checkpoint(folder: Path) -> dict[str, Any]:
    best = ModelCheckpoint(folder, "{step}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True)
    settings = {"limit_val_batches": 2, "val_check_interval": 4}
    fitted, module = fit(Portable, layout(1, 2), 16, checkpoint=best, **settings)
    kept = sorted(p.name for p in folder.iterdir())
    assert Path(best.best_model_path).is_dir()
    assert sorted([*(Path(p).name for p in best.best_k_models), "last.ckpt"]) == kept
    fitted.validate(module, module.val_dataloader(), ckpt_path="best", verbose=False)
    assert float(fitted.callback_metrics["val_loss"]) == pytest.approx(float(best.best_model_score), rel=1e-6)

    again = ModelCheckpoint(folder, "{step}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True)
    resumed, _ = fit(Portable, layout(1, 2), 20, checkpoint=again, ckpt_path="last", **settings)
    assert resumed.global_step == 20
    assert again.best_model_score is not None
    assert again.best_model_score <= best.best_model_score

    link = ModelCheckpoint(folder / "link", "{step}", save_top_k=1, every_n_train_steps=2, save_last="link")
    fit(Portable, layout(1, 2), 4, checkpoint=link)
    assert (folder / "link" / "last.ckpt").is_symlink()
    assert sorted(p.name for p in (folder / "link").iterdir()) == ["last.ckpt", "step=4.ckpt"]
    resumed, _ = fit(Portable, layout(1, 2), 5, checkpoint=link, ckpt_path="last")
    assert resumed.global_step == 5
    return {"best": best.best_model_path, "score": float(best.best_model_score), "kept": kept}


def test_d7_model_checkpoint(pool, tmp_path):
    first, second = pool.run(2, model_checkpoint, tmp_path)
    assert first == second
    assert len(first["kept"]) == 3


class Fails(Portable):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            raise ValueError("every rank fails here")


class RankLocal(Callback):
    """D10: what a callback holds of its rank comes back as rank 0's, as with Lightning's own sharded strategies."""

    def __init__(self) -> None:
        self.rank: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"rank": int(os.environ["RANK"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rank = state["rank"]


class Average(Callback):
    """C14: an average of the parameters, sharded as they are, kept in the callback's state."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.average = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["average"]


def exceptions_and_paths(folder: Path) -> None:
    with pytest.raises(ValueError, match="every rank"):
        fit(Fails, layout(1, 2), 9, callbacks=[OnExceptionCheckpoint(folder)])
    local, average = RankLocal(), Average()
    resumed, _ = fit(Portable, layout(1, 2), 5, ckpt_path=folder / "on_exception.ckpt", callbacks=[local])
    assert (resumed.global_step, local.rank) == (5, None)

    path = saved(folder / "callbacks", callbacks=[local, average])
    expected = open_checkpoint(path).tensor("state_dict.input.weight")
    fit(Portable, layout(1, 2), 3, ckpt_path=path, callbacks=[local, average])
    assert local.rank == 0
    same(average.loaded["input.weight"], expected)

    # D7: one rank does not see the checkpoint directory.
    rank = int(os.environ["RANK"])
    message = raised(CheckpointError, fit, Portable, layout(1, 2), 3, ckpt_path=path if rank == 0 else None)
    assert "ranks [1] found no checkpoint to load, others" in message
    message = raised(CheckpointError, fit, Portable, layout(1, 2), 3, ckpt_path=folder / "absent.ckpt")
    assert "no such checkpoint exists" in message
    resumed, _ = fit(Portable, layout(1, 2), 3, ckpt_path=path if rank == 0 else folder / "b")
    assert resumed.global_step == 3  # rank 0's path is every rank's

    # D9
    remote = partial(fit, Portable, steps=2, default_root_dir="memory://runs")
    message = raised(CheckpointError, remote, strategy=layout(1, 2), checkpoint=ModelCheckpoint())
    assert "save_distributed_checkpoint=False" in message
    single = partial(layout, 1, 2, save_distributed_checkpoint=False)
    remote(strategy=single(), checkpoint=ModelCheckpoint("memory://runs", "{step}", every_n_train_steps=2))
    written = fsspec.filesystem("memory").glob("**/*.ckpt")
    assert len(written) == (rank == 0)
    assert not [p for p in Path.cwd().iterdir() if p.name.startswith("memory")]


def test_exceptions_callbacks_and_paths(pool, tmp_path):
    pool.run(2, exceptions_and_paths, tmp_path)
