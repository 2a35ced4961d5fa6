"""Ordinary LightningModules for tests: nothing of lightning_4d in them, each with its own small deterministic data.

All take `batch_size` (of one data-parallel rank), `samples` (training samples; validation has half of them) and `lr`.
They use plain SGD, since Adam's normalisation hides a gradient that is wrong by a factor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class SyntheticModule(LightningModule):
    """Loaders over `dataset(split)`, SGD, and a step that logs the loss; subclasses give `dataset` and `loss`."""

    def __init__(self, batch_size: int = 4, samples: int = 48, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.samples = samples
        self.lr = lr

    def dataset(self, split: str) -> TensorDataset:
        """The samples of "train" or "val", equal at every call and on every rank."""
        raise NotImplementedError

    def loss(self, batch: Any, stage: str) -> Tensor:
        """The mean loss of a batch; `stage` is "train" or "val"."""
        raise NotImplementedError

    def _draw(self, split: str) -> tuple[int, torch.Generator]:
        count = self.samples if split == "train" else self.samples // 2
        return count, torch.Generator().manual_seed(len(split))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset("train"), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset("val"), batch_size=self.batch_size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, "train")
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, "val"), sync_dist=True)

    def configure_optimizers(self) -> Optimizer:
        return SGD((p for p in self.parameters() if p.requires_grad), lr=self.lr)


def rotate(x_BHTD: Tensor) -> Tensor:
    """Rotary position embedding over the whole head dim D (even), for positions 0 to T - 1."""
    T, half = x_BHTD.shape[-2], x_BHTD.shape[-1] // 2
    frequency_D = 10000.0 ** (-torch.arange(half, device=x_BHTD.device, dtype=x_BHTD.dtype) / half)
    angle_TD = torch.arange(T, device=x_BHTD.device, dtype=x_BHTD.dtype)[:, None] * frequency_D
    first, second = x_BHTD.chunk(2, dim=-1)
    cos, sin = angle_TD.cos(), angle_TD.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Self-attention with one fused or three separate projections."""

    def __init__(self, dim: int, heads: int, *, fused_qkv: bool, rope: bool, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.rope, self.causal, self.dropout = heads, rope, causal, dropout
        self.fused_qkv = fused_qkv
        if fused_qkv:
            self.qkv = nn.Linear(dim, 3 * dim)
        else:
            self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        parts = self.qkv(x_BTC).chunk(3, dim=-1) if self.fused_qkv else (self.q(x_BTC), self.k(x_BTC), self.v(x_BTC))
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in parts)
        if self.rope:
            q, k = rotate(q), rotate(k)
        dropout = self.dropout if self.training else 0.0
        y_BHTD = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        fused_qkv: bool = True,
        rope: bool = False,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, fused_qkv=fused_qkv, rope=rope, causal=causal, dropout=dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.Dropout(dropout))

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC))
        return x_BTC + self.mlp(self.norm2(x_BTC))


class TinyGPT(SyntheticModule):
    """A causal language model: embedding, learned positions or RoPE, `self.blocks` (a ModuleList), norm, head.

    A batch is one tensor of token ids, (batch, length + 1).
    """

    def __init__(
        self,
        vocab: int = 31,
        dim: int = 16,
        heads: int = 4,
        layers: int = 3,
        length: int = 12,
        rope: bool = False,
        fused_qkv: bool = True,
        tied: bool = False,
        dropout: float = 0.0,
        batch_size: int = 4,
        samples: int = 48,
        lr: float = 0.1,
    ) -> None:
        super().__init__(batch_size, samples, lr)
        self.vocab, self.length, self.rope = vocab, length, rope
        self.embedding = nn.Embedding(vocab, dim)
        self.positions = None if rope else nn.Parameter(0.1 * torch.randn(length, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(dim, heads, fused_qkv=fused_qkv, rope=rope, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.train_accuracy = MulticlassAccuracy(vocab, average="micro")
        self.val_accuracy = MulticlassAccuracy(vocab, average="micro")

    def dataset(self, split: str) -> TensorDataset:
        count, generator = self._draw(split)
        return TensorDataset(torch.randint(self.vocab, (count, self.length + 1), generator=generator))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions[: tokens_BT.shape[1]]
        x_BTC = self.dropout(x_BTC)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))

    def loss(self, batch: Any, stage: str) -> Tensor:
        (tokens_BT,) = batch
        targets_BT = tokens_BT[:, 1:]
        logits_BTV = self(tokens_BT[:, :-1])
        accuracy = self.train_accuracy if stage == "train" else self.val_accuracy
        accuracy(logits_BTV.detach().flatten(0, 1), targets_BT.flatten())
        self.log(f"{stage}_accuracy", accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class Regression(SyntheticModule):
    """Inputs (batch, dim) and targets (batch, 1); subclasses give `forward`."""

    def __init__(self, dim: int = 8, batch_size: int = 4, samples: int = 48, lr: float = 0.1) -> None:
        super().__init__(batch_size, samples, lr)
        self.dim = dim

    def dataset(self, split: str) -> TensorDataset:
        count, generator = self._draw(split)
        x_BC = torch.randn(count, self.dim, generator=generator)
        return TensorDataset(x_BC, torch.sin(x_BC.sum(dim=1, keepdim=True)))

    def loss(self, batch: Any, stage: str) -> Tensor:
        x_BC, target_B1 = batch
        return F.mse_loss(self(x_BC), target_B1)


class MLP(Regression):
    """Layers of different classes and shapes: there is no chain of repeated blocks to find."""

    def __init__(self, dim: int = 8, hidden: int = 24, batch_size: int = 4, samples: int = 48, lr: float = 0.1) -> None:
        super().__init__(dim, batch_size, samples, lr)
        self.input = nn.Linear(dim, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, 1)

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.output(torch.tanh(self.norm(self.input(x_BC))))


class WithScalar(MLP):
    """An MLP whose output is scaled by a learnable 0-d parameter."""

    def __init__(self, dim: int = 8, hidden: int = 24, batch_size: int = 4, samples: int = 48, lr: float = 0.1) -> None:
        super().__init__(dim, hidden, batch_size, samples, lr)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.scale * super().forward(x_BC)


class WithUnused(MLP):
    """An MLP with a Linear that no step uses and a frozen Linear in front.

    Under DDP: strategy="ddp_find_unused_parameters_true".
    """

    def __init__(self, dim: int = 8, hidden: int = 24, batch_size: int = 4, samples: int = 48, lr: float = 0.1) -> None:
        super().__init__(dim, hidden, batch_size, samples, lr)
        self.unused = nn.Linear(dim, hidden)
        self.frozen = nn.Linear(dim, dim).requires_grad_(False)

    def forward(self, x_BC: Tensor) -> Tensor:
        return super().forward(self.frozen(x_BC))


class WithBuffers(Regression):
    """BatchNorm, a buffer updated from each training batch, and a constant one outside the state_dict.

    Under DDP the running buffers of rank 0 win, since DDP broadcasts them before each forward.
    """

    def __init__(self, dim: int = 8, hidden: int = 24, batch_size: int = 4, samples: int = 48, lr: float = 0.1) -> None:
        super().__init__(dim, batch_size, samples, lr)
        self.input = nn.Linear(dim, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.output = nn.Linear(hidden, 1)
        self.register_buffer("running_scale", torch.ones(()))
        self.register_buffer("offset", torch.linspace(-1, 1, dim), persistent=False)

    def forward(self, x_BC: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.running_scale.lerp_(x_BC.abs().mean(), 0.1)
        return self.output(torch.relu(self.norm(self.input(x_BC / self.running_scale + self.offset))))


class Classifier(SyntheticModule):
    """Inputs (batch, length, dim), one of `classes` each; subclasses give `forward`, which returns (batch, classes)."""

    def __init__(
        self, dim: int, length: int, classes: int, batch_size: int = 4, samples: int = 48, lr: float = 0.1
    ) -> None:
        super().__init__(batch_size, samples, lr)
        self.dim, self.length, self.classes = dim, length, classes
        self.val_accuracy = MulticlassAccuracy(classes, average="micro")

    def dataset(self, split: str) -> TensorDataset:
        count, generator = self._draw(split)
        x_BTC = torch.randn(count, self.length, self.dim, generator=generator)
        return TensorDataset(x_BTC, torch.randint(self.classes, (count,), generator=generator))

    def loss(self, batch: Any, stage: str) -> Tensor:
        x_BTC, target_B = batch
        logits_BK = self(x_BTC)
        if stage == "val":
            self.val_accuracy(logits_BK, target_B)
            self.log("val_accuracy", self.val_accuracy)
        return F.cross_entropy(logits_BK, target_B)


class ViT(Classifier):
    """Patch embedding, a class token, learned positions, the blocks in an nn.Sequential, a head on the class token."""

    def __init__(
        self,
        patch_dim: int = 12,
        patches: int = 9,
        classes: int = 5,
        dim: int = 16,
        heads: int = 2,
        layers: int = 3,
        batch_size: int = 4,
        samples: int = 48,
        lr: float = 0.1,
    ) -> None:
        super().__init__(patch_dim, patches, classes, batch_size, samples, lr)
        self.patch = nn.Linear(patch_dim, dim)
        self.class_token = nn.Parameter(0.1 * torch.randn(1, 1, dim))
        self.positions = nn.Parameter(0.1 * torch.randn(patches + 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, fused_qkv=False, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, patches_BPC: Tensor) -> Tensor:
        x_BPC = self.patch(patches_BPC)
        x_BTC = torch.cat((self.class_token.expand(len(x_BPC), -1, -1), x_BPC), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x_BTC))[:, 0])


class EncoderStack(Classifier):
    """torch's own nn.TransformerEncoder of post-norm layers, mean-pooled."""

    def __init__(
        self,
        dim: int = 16,
        length: int = 10,
        classes: int = 5,
        heads: int = 2,
        layers: int = 3,
        dropout: float = 0.0,
        batch_size: int = 4,
        samples: int = 48,
        lr: float = 0.1,
    ) -> None:
        super().__init__(dim, length, classes, batch_size, samples, lr)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.head(self.encoder(x_BTC).mean(dim=1))


class GAN(SyntheticModule):
    """Manual optimisation with two optimizers: the generator's step, then the discriminator's, in every training step.

    Under DDP: strategy="ddp_find_unused_parameters_true".
    """

    def __init__(self, dim: int = 6, hidden: int = 16, batch_size: int = 4, samples: int = 48, lr: float = 0.1) -> None:
        super().__init__(batch_size, samples, lr)
        self.automatic_optimization = False
        self.dim = dim
        self.generator = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim))
        self.discriminator = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def dataset(self, split: str) -> TensorDataset:
        count, generator = self._draw(split)
        real_BC = 1 + 0.5 * torch.randn(count, self.dim, generator=generator)
        return TensorDataset(real_BC, torch.randn(count, self.dim, generator=generator))

    def forward(self, noise_BC: Tensor) -> Tensor:
        return self.generator(noise_BC)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        real_BC, noise_BC = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()

        self.toggle_optimizer(generator_optimizer)
        generator_loss = F.softplus(-self.discriminator(self(noise_BC))).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.toggle_optimizer(discriminator_optimizer)
        fake_B1 = self.discriminator(self(noise_BC).detach())
        discriminator_loss = F.softplus(-self.discriminator(real_BC)).mean() + F.softplus(fake_B1).mean()
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        self.log_dict({"generator_loss": generator_loss, "discriminator_loss": discriminator_loss})
        return (generator_loss + discriminator_loss).detach()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        real_BC, noise_BC = batch
        gap = (self.discriminator(real_BC) - self.discriminator(self(noise_BC))).mean()
        self.log("val_loss", gap, sync_dist=True)

    def configure_optimizers(self) -> list[Optimizer]:
        return [SGD(self.generator.parameters(), lr=self.lr), SGD(self.discriminator.parameters(), lr=self.lr)]
