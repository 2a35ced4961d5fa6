"""Checkpoints of pipeline stages: they open under every layout and without us; what follows is as if uninterrupted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_4d import NDStrategy
from lightning_4d.checkpoint import consolidate
from tests.checkpoint.runs import fit, same
from tests.checkpoint.runs import trainer as quiet_trainer
from tests.harness import staged_tensors
from tests.modules import Block
from tests.staged_modules import Staged
from tests.strategies.scenarios import error_of

STEP = 3  # of the checkpoint


class Tied(Staged):
    """Input and head share a weight, other parameters are frozen, unused or 0-d; all samples equal; AdamW, cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(self.dim, self.dim)
        self.head.weight = self.input.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Linear(self.dim, 5)
        self.blocks[2].norm1.requires_grad_(False)

    def dataset(self, split: str) -> TensorDataset:
        x_TC = torch.randn(self.length, self.dim, generator=torch.Generator().manual_seed(3))
        return TensorDataset(x_TC.expand(64, -1, -1))

    def loss(self, batch: Any, stage: str) -> Tensor:
        (x_BTC,) = batch
        return F.mse_loss(self.scale * self(x_BTC), torch.sin(3 * x_BTC))

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim == 2]
        others = [p for p in self.parameters() if p.ndim != 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = AdamW(groups, lr=0.05, eps=1e-3)  # or noise of gradients that are zero would grow
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": CosineAnnealingLR(optimizer, 20), "interval": "step"},
        }


class Norms(Staged):
    """Batch normalisation in blocks and in the head, shuffled samples, SGD with momentum. For one microbatch."""

    class Normed(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.inner, self.norm = Block(dim, 2, causal=False), nn.BatchNorm1d(dim)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.BatchNorm1d(self.length), nn.BatchNorm1d(self.length)

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(self.Normed(self.dim) for _ in range(self.blocks_count))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.head(self.last(self.through(self.first(self.input(x_BTC)))))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset("train"), batch_size=self.batch_size, shuffle=True)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.05, momentum=0.9)


KINDS: dict[str, Callable[[], LightningModule]] = {"tied": Tied, "norms": Norms}


def layout(kind: str, pipeline: int, shard: int = 1, **kwargs: Any) -> NDStrategy:
    options = {"pipeline_schedule": "gpipe", "num_microbatches": 1} if kind == "norms" else {}
    return NDStrategy(pipeline_parallel_size=pipeline, data_parallel_shard_size=shard, **options, **kwargs)


class States(Callback):
    """What all ranks together hold when training starts and after each batch, and the losses."""

    def __init__(self) -> None:
        self.start: Any = None
        self.after: dict[int, Any] = {}  # by the number of steps
        self.losses: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = states(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        if trainer.global_step >= STEP:
            self.after[trainer.global_step] = states(trainer)


def states(trainer: Trainer) -> dict[str, Any]:
    """The whole state dict and the optimizer's states by name; each buffer from the rank that saves it."""
    module = trainer.lightning_module
    elsewhere = trainer.strategy.saved_elsewhere() if isinstance(trainer.strategy, NDStrategy) else set()
    buffers = {name: b for name, b in module.state_dict().items() if name not in elsewhere}
    names = {parameter: name for name, parameter in module.named_parameters()}
    (optimizer,) = trainer.optimizers
    kept = {f"{names[p]}/{k}": v for p, values in optimizer.state.items() for k, v in values.items() if v is not None}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    parameters = staged_tensors(dict(module.named_parameters(remove_duplicate=False)))
    return {"state_dict": staged_tensors(buffers) | parameters, "optimizer": staged_tensors(kept), "groups": groups}


def run(kind: str, strategy: Any, steps: int = STEP + 1, **kwargs: Any) -> dict[str, Any]:
    seen = States()
    fit(KINDS[kind], strategy, steps, callbacks=[seen], **kwargs)
    return {"start": seen.start, "after": seen.after, "losses": seen.losses}


def write(path: Path, kind: str, strategy: Any) -> dict[str, Any]:
    """Train 4 batches, a checkpoint after the third, in mid-epoch."""
    saver = ModelCheckpoint(path.parent, path.stem, every_n_train_steps=STEP, save_top_k=-1)
    return run(kind, strategy, checkpoint=saver)


def check(path: Path, kind: str, strategy: Any, written: dict[str, Any], *, follows: bool = True) -> None:
    """Resume from `path`: what was saved is there, and the next step is the one that followed."""
    warnings.filterwarnings("ignore", message=".*was written in mid-epoch by")
    resumed = run(kind, strategy, ckpt_path=path)
    plain = strategy == "auto"  # loads into a float32 module, which it converts afterwards
    same(resumed["start"], written["after"][STEP], 1e-6 if plain else 0.0)
    if follows:
        same(resumed["losses"], written["losses"][STEP:], 1e-5 if plain else 1e-10)
        same(resumed["after"][STEP + 1], written["after"][STEP + 1], 1e-5 if plain else 1e-10)


def on_four_ranks(folder: Path) -> dict[str, Any]:
    written = {kind: write(folder / f"{kind}.ckpt", kind, layout(kind, 4)) for kind in KINDS}
    for kind in KINDS:
        write(folder / f"{kind}-file.ckpt", kind, layout(kind, 4, save_distributed_checkpoint=False))
    write(folder / "sharded.ckpt", "tied", layout("tied", 2, 2))
    write(folder / "sharded-file.ckpt", "tied", layout("tied", 2, 2, save_distributed_checkpoint=False))
    check(folder / "tied-file.ckpt", "tied", layout("tied", 2, 2), written["tied"])
    return written


def on_two_ranks(folder: Path, written: dict[str, Any]) -> None:
    for name in ("tied", "tied-file", "sharded", "sharded-file"):
        check(folder / f"{name}.ckpt", "tied", layout("tied", 2), written["tied"])
    for name in ("norms", "norms-file"):
        check(folder / f"{name}.ckpt", "norms", layout("norms", 2), written["norms"])
    check(folder / "tied.ckpt", "tied", layout("tied", 1, 2), written["tied"])


def on_one_process(folder: Path, written: dict[str, Any]) -> dict[str, Any]:
    for name in ("tied", "norms"):
        for path in (folder / f"{name}.ckpt", folder / f"{name}-file.ckpt"):
            check(path, name, layout(name, 1), written[name])
        consolidate(folder / f"{name}.ckpt", folder / "one" / f"{name}.ckpt")
        for path in (folder / "one" / f"{name}.ckpt", folder / f"{name}-file.ckpt"):
            check(path, name, "auto", written[name], follows=name == "tied")
    plain = {kind: write(folder / "plain" / f"{kind}.ckpt", kind, "auto") for kind in KINDS}
    same(written["tied"], plain["tied"], 1e-10)
    same(written["norms"], write(folder / "own" / "norms.ckpt", "norms", layout("norms", 1)), 1e-10)  # same shuffling
    return plain


def from_one_process(folder: Path, plain: dict[str, Any]) -> None:
    for kind in KINDS:
        check(folder / "plain" / f"{kind}.ckpt", kind, layout(kind, 4), plain[kind], follows=kind == "tied")


def test_every_number_of_stages_and_one_process(pool, tmp_path):
    written = pool.run(4, on_four_ranks, tmp_path, timeout=300)
    pool.run(2, on_two_ranks, tmp_path, written[0], timeout=300)
    plain = pool.run(1, on_one_process, tmp_path, written[0], timeout=300)
    pool.run(4, from_one_process, tmp_path, plain[0], timeout=300)
    content = torch.load(tmp_path / "tied-file.ckpt", weights_only=True)
    assert list(content["state_dict"]) == list(Tied().state_dict())
    assert len(content["optimizer_states"][0]["state"]) == len(written[0]["tied"]["after"][STEP]["optimizer"]) // 3


class Longer(Tied):
    """One parameter more, in the tail, and one less, before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)
        del self.unused


def read_other_names(folder: Path, kind: str) -> list[str]:
    path = folder / f"{kind}.ckpt"
    strict = error_of(lambda: fit(Longer, layout("tied", 2), 4, ckpt_path=path), RuntimeError)

    def lenient() -> LightningModule:
        module = Longer()
        module.strict_loading = False
        return module

    seen = Loaded()
    trainer, module = quiet_trainer(layout("tied", 2), callbacks=[seen], limit_val_batches=1), lenient()
    trainer.validate(module, DataLoader(module.dataset("val"), batch_size=4), ckpt_path=path, verbose=False)
    return [strict, f"{seen.found:.6f}"]


class Loaded(Callback):
    """The sum of all parameters that both modules have, over all ranks."""

    found = 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        whole = staged_tensors(dict(pl_module.named_parameters()))
        self.found = float(sum(v.double().abs().sum() for k, v in whole.items() if not k.startswith("extra")))


def test_other_names_are_refused_on_every_rank(pool, tmp_path):
    pool.run(2, partial(write_both, tmp_path))
    for kind in ("folder", "file"):
        content = torch.load(tmp_path / "file.ckpt", weights_only=True)["state_dict"]
        expected = sum(v.double().abs().sum() for k, v in content.items() if k.split(".")[0] not in ("unused",))
        expected -= content["head.weight"].double().abs().sum()  # tied: counted once
        for strict, found in pool.run(2, read_other_names, tmp_path, kind):
            assert "extra.weight" in strict, strict
            assert "unused.weight" in strict, strict
            assert found == f"{float(expected):.6f}"


def write_both(folder: Path) -> None:
    write(folder / "folder.ckpt", "tied", layout("tied", 2))
    write(folder / "file.ckpt", "tied", layout("tied", 2, save_distributed_checkpoint=False))
