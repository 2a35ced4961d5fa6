"""Ordinary models of the shapes that tensor parallelism meets; nothing of lightning_4d in them. All use SGD.

Shape suffixes: B batch, T sequence, C channels, H heads, D channels of one head, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.modules import Attention, Block, Regression, SyntheticModule, TinyGPT, rotate


class RMSNorm(nn.Module):
    """Written out, as many models have it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaAttention(nn.Module):
    """Grouped keys, norms of queries and keys by head, rotary tables given by the model."""

    def __init__(self, dim: int, heads: int, kv_heads: int, qk_norm: str) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.qk_norm = qk_norm
        if qk_norm == "head":
            self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)
        elif qk_norm == "full":
            self.q_norm, self.k_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(kv_heads * self.head_dim, eps=1e-6)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = self.wq(x_BTC), self.wk(x_BTC), self.wv(x_BTC)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(B, T, self.n_heads, self.head_dim)
        k = k.view(B, T, self.n_kv_heads, self.head_dim)
        v = v.view(B, T, self.n_kv_heads, self.head_dim)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5
        if mask is not None:
            scores = scores + mask
        y = F.softmax(scores, dim=-1) @ v
        return self.wo(y.transpose(1, 2).contiguous().view(B, T, C))


class SwiGLU(nn.Module):
    """Three weights in the order w1, w2, w3 of the original Llama; or gate and up in one."""

    def __init__(self, dim: int, hidden: int, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        else:
            self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        if not fused:
            self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1) if self.fused else (self.w1(x), self.w3(x))
        return self.w2(F.silu(gate) * up)


class LlamaBlock(nn.Module):
    """Attention and MLP one after the other, or side by side on one norm."""

    def __init__(self, dim: int, heads: int, kv_heads: int, qk_norm: str, fused: bool, parallel: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.attention = LlamaAttention(dim, heads, kv_heads, qk_norm)
        self.feed_forward = SwiGLU(dim, 2 * dim, fused)
        self.attention_norm = RMSNorm(dim)
        if not parallel:
            self.ffn_norm = RMSNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        if self.parallel:
            h = self.attention_norm(x)
            return x + self.attention(h, cos, sin, mask) + self.feed_forward(h)
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(SyntheticModule):
    """Blocks that take the rotary tables and the mask; the loss has the options given."""

    def __init__(
        self,
        vocab: int = 24,
        dim: int = 32,
        heads: int = 4,
        kv_heads: int = 2,
        layers: int = 2,
        length: int = 8,
        qk_norm: str = "head",
        fused: bool = False,
        parallel: bool = False,
        tied: bool = False,
        loss_options: dict[str, Any] | None = None,
        batch_size: int = 4,
        samples: int = 24,
        lr: float = 0.1,
    ) -> None:
        super().__init__(batch_size, samples, lr)
        self.vocab, self.length, self.loss_options = vocab, length, loss_options or {}
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, qk_norm, fused, parallel) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight
        half = dim // heads // 2
        angle = torch.outer(torch.arange(64.0), 100.0 ** (-torch.arange(half) / half)).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def dataset(self, split: str) -> TensorDataset:
        count, generator = self._draw(split)
        return TensorDataset(torch.randint(self.vocab, (count, self.length + 1), generator=generator))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        T = tokens_BT.shape[1]
        x = self.tok_embeddings(tokens_BT)
        mask = torch.full((T, T), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        cos, sin = self.cos[:T, None], self.sin[:T, None]
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.output(self.norm(x))

    def loss(self, batch: Any, stage: str) -> Tensor:
        (tokens_BT,) = batch
        logits_BTV, targets_BT = self(tokens_BT[:, :-1]), tokens_BT[:, 1:]
        options = dict(self.loss_options)
        if options.pop("weighted", False):
            options["weight"] = torch.linspace(0.5, 1.5, self.vocab, dtype=logits_BTV.dtype)
        if options.pop("by_sequence", False):
            return F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, **options)
        if options.pop("smoothed_by_hand", False):
            return -F.log_softmax(logits_BTV, -1).gather(2, targets_BT[..., None]).mean()
        reduced = F.cross_entropy(logits_BTV.view(-1, self.vocab), targets_BT.reshape(-1), **options)
        return reduced.mean() if options.get("reduction") == "none" else reduced


class NormedAttention(Attention):
    """Norms of queries and keys by head."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, fused_qkv=False, rope=True, causal=True, dropout=0.0)
        self.q_norm, self.k_norm = RMSNorm(dim // heads), nn.RMSNorm(dim // heads, eps=1e-6)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = (part(x_BTC).view(B, T, self.heads, C // self.heads) for part in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        y_BHTD = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))


class NormedGPT(TinyGPT):
    """A TinyGPT with norms of queries and keys."""

    def __init__(self) -> None:
        super().__init__(vocab=32, layers=2, rope=True)
        for block in self.blocks:
            block.attention = NormedAttention(16, 4)  # type: ignore[assignment]


class NanoAttention(nn.Module):
    """One weight and bias for queries, keys and values, taken apart by split."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd = heads, dim

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(torch.ones(T, T, device=x.device).tril()[None, None] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class NanoBlock(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = NanoAttention(dim, heads, dropout)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(dim, 4 * dim), "c_proj": nn.Linear(4 * dim, dim), "dropout": nn.Dropout(dropout)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        h = self.mlp["dropout"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))
        return x + self.mlp["c_proj"](h)


class NanoGPT(SyntheticModule):
    """GPT-2 as it is written for teaching: learned positions, tied vocabulary, dropout everywhere."""

    def __init__(
        self,
        vocab: int = 24,
        dim: int = 32,
        heads: int = 4,
        layers: int = 2,
        length: int = 8,
        dropout: float = 0.0,
        frozen: bool = False,
        batch_size: int = 4,
        samples: int = 24,
        lr: float = 0.1,
    ) -> None:
        super().__init__(batch_size, samples, lr)
        self.vocab, self.length = vocab, length
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(NanoBlock(dim, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        self.temperature = nn.Parameter(torch.tensor(1.3))
        if frozen:
            self.h[0].attn.c_attn.requires_grad_(False)
            self.wpe.requires_grad_(False)

    dataset = Llama.dataset

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x = self.drop(self.wte(tokens_BT) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)) / self.temperature

    def loss(self, batch: Any, stage: str) -> Tensor:
        (tokens_BT,) = batch
        logits_BTV = self(tokens_BT[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


class Perceptron(Regression):
    """No blocks: four Linears, a norm over a divided dim between the second pair."""

    def __init__(self, dim: int = 8, hidden: int = 16, batch_size: int = 4, samples: int = 24, lr: float = 0.1) -> None:
        super().__init__(dim, batch_size, samples, lr)
        self.net = nn.Sequential(
            nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim), nn.Linear(dim, hidden), nn.LayerNorm(hidden),
            nn.Tanh(), nn.Linear(hidden, 1),
        )  # fmt: skip

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.net(x_BC)


class Running(Perceptron):
    """Running statistics in front, and a buffer that each training step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(self.dim)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x_BC: Tensor) -> Tensor:
        if self.training:
            self.seen += x_BC.abs().mean()
        return super().forward(self.norm(x_BC))


class Unusual(NanoGPT):
    """Code without rules: whole tensors are gathered, numbers stay right."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.wte(tokens_BT)
        for block in self.h:
            h = F.gelu(block.mlp["c_fc"](block.ln_2(x)))
            h = torch.cummax(h, dim=-1).values + torch.flip(h, (-1,)).tril(3)
            h = h[..., torch.arange(h.shape[-1] - 1, -1, -1)]
            x = x + block.mlp["c_proj"](h) + block.attn(block.ln_1(x))
        return self.lm_head(self.ln_f(x + self.wpe.weight)) / self.temperature


class SkipStack(SyntheticModule):
    """Blocks of which the later half also gets the outputs of the earlier one, merged by a chain of Linears (U-ViT)."""

    def __init__(self, dim: int = 16, layers: int = 4, length: int = 8) -> None:
        super().__init__(4, 48, 0.1)
        self.length = length
        self.inlet = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(Block(dim, 4, causal=False) for _ in range(layers))
        self.merges = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(layers // 2))
        self.outlet = nn.Linear(dim, 5)

    def dataset(self, split: str) -> TensorDataset:
        count, generator = self._draw(split)
        return TensorDataset(*(torch.randn(count, self.length, 5, generator=generator) for _ in range(2)))

    def loss(self, batch: Any, stage: str) -> Tensor:
        x_BTD, noise_BTD = batch
        h_BTC, half, kept = self.inlet(x_BTD), len(self.merges), []
        for number, block in enumerate(self.blocks):
            if number >= half:
                h_BTC = self.merges[number - half](torch.cat([h_BTC, kept.pop()], dim=-1))
            h_BTC = block(h_BTC)
            if number < half:
                kept.append(h_BTC)
        return F.mse_loss(self.outlet(h_BTC), noise_BTD)
