"""A Llama-shaped LightningModule of any size: what is rehearsed where the user names a preset, not a module.

Grouped-query attention, rotary positions, SwiGLU, RMS norms, no biases; the embedding and the head may be one tensor.
It is an ordinary module: nothing in it knows of parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

__all__ = ["Llama", "LlamaSizes"]


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a Llama: layers, width, heads of queries and of keys, width of the feed-forward part, vocabulary."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    tied: bool = False


class Attention(nn.Module):
    """Causal self-attention; several heads of queries share one of keys and values."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = sizes.heads, sizes.kv_heads, sizes.hidden // sizes.heads
        self.q = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k = nn.Linear(sizes.hidden, sizes.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(sizes.hidden, sizes.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Return the attention's output, of the shape of its input."""
        B, T, C = x_BTC.shape
        q_BHTD = self.q(x_BTC).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k_BHTD = self.k(x_BTC).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        v_BHTD = self.v(x_BTC).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        q_BHTD, k_BHTD = _rotated(q_BHTD, cos_TD, sin_TD), _rotated(k_BHTD, cos_TD, sin_TD)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True, enable_gqa=True)
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))


def _rotated(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cos_TD - second * sin_TD, second * cos_TD + first * sin_TD), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.ffn_hidden, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.ffn_hidden, bias=False)
        self.down = nn.Linear(sizes.ffn_hidden, sizes.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return the output, of the shape of the input."""
        return self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))


class Block(nn.Module):
    """One layer."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.hidden)
        self.ffn = FeedForward(sizes)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Return the residual stream after this layer."""
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), cos_TD, sin_TD)
        return x_BTC + self.ffn(self.ffn_norm(x_BTC))


class Llama(LightningModule):
    """A Llama with its own step, optimizer (AdamW) and loader of ``batch_size`` samples of ``seq_len`` tokens.

    Args:
        sizes: of the model.
        seq_len: tokens of a sample.
        batch_size: samples of a batch of its loader.
    """

    def __init__(self, sizes: LlamaSizes, seq_len: int, batch_size: int = 1) -> None:
        super().__init__()
        self.sizes, self.seq_len, self.batch_size = sizes, seq_len, batch_size
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if sizes.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of each position."""
        T, half = tokens_BT.shape[1], self.sizes.hidden // self.sizes.heads // 2
        frequency_D = 500_000.0 ** (-torch.arange(half, device=tokens_BT.device) / half)
        angle_TD = torch.arange(T, device=tokens_BT.device)[:, None] * frequency_D
        cos_TD, sin_TD = angle_TD.cos(), angle_TD.sin()
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, cos_TD, sin_TD)
        return self.head(self.norm(x_BTC))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the next tokens."""
        tokens_BT, targets_BT = batch
        return F.cross_entropy(self(tokens_BT).flatten(0, 1), targets_BT.flatten())

    def configure_optimizers(self) -> Optimizer:
        """AdamW, two moments for each parameter."""
        return AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Batches of zeros: shapes are what a rehearsal needs."""
        return DataLoader(_Zeros(self.seq_len, 64 * self.batch_size), batch_size=self.batch_size)


class _Zeros(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, length: int, count: int) -> None:
        self._sample = torch.zeros(length, dtype=torch.int64)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._sample, self._sample
