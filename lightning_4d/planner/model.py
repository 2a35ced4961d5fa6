"""Facts about a model: the sizes of a transformer, and what follows from them (parameters, FLOPs).

A model that is no transformer is described by the same sizes, see `lightning_4d.planner.counted`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_4d.planner.numbers import Number

__all__ = ["ModelFacts"]


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a transformer. Every field may be an array, for a table of models.

    Attributes:
        layers: repeated blocks.
        hidden: width of the residual stream.
        heads: attention heads; 0 for a model without attention.
        kv_heads: heads of keys and values (fewer than `heads` with grouped-query attention).
        head_dim: width of one head.
        ffn_hidden: inner width of the feed-forward part.
        ffn_matrices: its matrices: 2, or 3 when it is gated (SwiGLU).
        vocab: entries of the vocabulary, or classes of a classifier.
        seq_len: tokens of one sample.
        tied: 1 where the embedding's matrix is also the head's.
        causal: 1 where a token attends to earlier ones only.
        positions: learned position embeddings.
        head_tokens: how many tokens of a sample the head sees: `seq_len` for a language model, 1 for a classifier.
        extra_parameters: parameters that the other fields do not explain.
    """

    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    head_dim: Number
    ffn_hidden: Number
    ffn_matrices: Number
    vocab: Number
    seq_len: Number
    tied: Number = 0
    causal: Number = 1
    positions: Number = 0
    head_tokens: Number | None = None
    extra_parameters: Number = 0
    name: str = "model"

    @property
    def query_width(self) -> Number:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> Number:
        """Width of all keys together; values have the same."""
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> Number:
        """Weights of the projections of one block's attention."""
        return self.hidden * (2 * self.query_width + 2 * self.key_width)

    @property
    def ffn_parameters(self) -> Number:
        """Weights of one block's feed-forward part."""
        return self.ffn_matrices * self.hidden * self.ffn_hidden

    @property
    def block_parameters(self) -> Number:
        """Parameters of one block: its matrices and two norms."""
        return self.attention_parameters + self.ffn_parameters + 2 * self.hidden

    @property
    def embedding_parameters(self) -> Number:
        """Parameters of the token embedding alone."""
        return self.vocab * self.hidden

    @property
    def other_parameters(self) -> Number:
        """Parameters outside the blocks: embedding, positions, last norm, head."""
        tables = self.embedding_parameters * (2 - np.asarray(self.tied))
        return tables + (self.positions + 1) * self.hidden + self.extra_parameters

    @property
    def parameters(self) -> Number:
        """All parameters."""
        return self.layers * self.block_parameters + self.other_parameters

    @property
    def head_rows(self) -> Number:
        """Tokens of a sample that the head sees."""
        return self.seq_len if self.head_tokens is None else self.head_tokens

    @property
    def attention_flops(self) -> Number:
        """Forward FLOPs of one block's scores and their product with the values, of one sample; half if causal."""
        return 4 * self.seq_len**2 * self.query_width * (1 - 0.5 * np.asarray(self.causal))

    @property
    def flops(self) -> Number:
        """Model FLOPs of one sample: forward and backward, causal attention by half, head included, no recompute."""
        matrices = self.layers * (self.attention_parameters + self.ffn_parameters)
        forward = 2 * (self.seq_len * matrices + self.head_rows * self.embedding_parameters)
        return 3 * (forward + self.layers * self.attention_flops)
