"""Modules and a data set for checkpoint tests: they record which samples they trained on, in which order."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Sample i is (i, x_i + noise): the noise is drawn from all three generators at each access, as augmentation is."""

    def __init__(self, size: int = 24, dim: int = 7) -> None:
        self.x = torch.randn(size, dim, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * (torch.rand(()) + float(np.random.rand()) + random.random())
        return torch.tensor(index), self.x[index] + noise


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x_BC: Tensor) -> Tensor:
        return x_BC + self.dropout(torch.tanh(self.linear(x_BC)))


class Resumable(LightningModule):
    """Dropout 0.5, sizes that nothing divides, tied, frozen, unused and 0-d parameters, a buffer, AdamW, cosine."""

    def __init__(
        self, dim: int = 7, batch_size: int = 2, workers: int = 0, size: int = 24, shuffle: bool = True
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.ModuleList(Layer(dim) for _ in range(3))
        self.input = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        self.output.weight = self.input.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Linear(dim, dim).requires_grad_(False)
        self.unused = nn.Linear(dim, 5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.trace: list[tuple[int, list[int], float]] = []

    def forward(self, x_BC: Tensor) -> Tensor:
        x_BC = self.input(self.frozen(x_BC))
        for layer in self.layers:
            x_BC = layer(x_BC)
        return self.scale * self.output(x_BC)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index_B, x_BC = batch
        loss = F.mse_loss(self(x_BC), torch.sin(3 * x_BC))
        self.seen += len(x_BC)
        self.trace.append((self.global_step, index_B.tolist(), float(loss.detach())))
        self.log("train_loss", loss.detach(), on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, x_BC = batch
        self.log("val_loss", F.mse_loss(self(x_BC), torch.sin(3 * x_BC)), sync_dist=True)

    def train_dataloader(self) -> DataLoader:
        hparams = self.hparams
        return DataLoader(
            Noisy(hparams["size"], hparams["dim"]),
            batch_size=hparams["batch_size"],
            shuffle=hparams["shuffle"],
            num_workers=hparams["workers"],
            multiprocessing_context="fork" if hparams["workers"] else None,
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Noisy(8, self.hparams["dim"]), batch_size=2)

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim == 2 and p.requires_grad]
        others = [p for p in self.parameters() if p.ndim != 2 and p.requires_grad]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = AdamW(groups, lr=0.05)
        schedule = CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Same(Dataset):
    """All samples are equal, so that a mean loss and its gradients do not depend on how many ranks share a batch."""

    def __init__(self, dim: int = 7) -> None:
        self.x = torch.randn(dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), self.x


class Portable(Resumable):
    """`Resumable` without dropout, on equal samples: its next step is the same under every layout."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim, shuffle=False)
        for layer in self.layers:
            layer.dropout = nn.Identity()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Same(self.hparams["dim"]), batch_size=2)

    val_dataloader = train_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index_B, x_BC = batch
        loss = F.mse_loss(self(x_BC.to(self.scale.dtype)), torch.sin(3 * x_BC).to(self.scale.dtype))
        self.trace.append((self.global_step, index_B.tolist(), float(loss.detach())))
        return loss


class TwoOptimizers(LightningModule):
    """A generator and a discriminator, each with its Adam, on equal samples."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.dim = dim
        self.generator = nn.Sequential(nn.Linear(dim, 10), nn.Tanh(), nn.Linear(10, dim))
        self.discriminator = nn.Sequential(nn.Linear(dim, 10), nn.Tanh(), nn.Linear(10, 1))
        self.trace: list[tuple[int, list[int], float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        index_B, real_BC = batch
        generate, discriminate = self.optimizers()
        self.toggle_optimizer(generate)
        loss = F.softplus(-self.discriminator(self.generator(real_BC))).mean()
        self._step(generate, loss)
        self.toggle_optimizer(discriminate)
        fake_BC = self.generator(real_BC).detach()
        other = F.softplus(-self.discriminator(real_BC)).mean() + F.softplus(self.discriminator(fake_BC)).mean()
        self._step(discriminate, other)
        self.trace.append((self.global_step, index_B.tolist(), float((loss + other).detach())))

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Same(self.dim), batch_size=2)

    def configure_optimizers(self) -> Any:
        return [Adam(self.generator.parameters(), lr=0.01), Adam(self.discriminator.parameters(), lr=0.02)]
