"""Embedding and output head over the vocabulary: which layers these are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.tensor.plan import Choice, kind_of


def vocabulary_choices(root: nn.Module, blocks: Sequence[Block], size: int) -> dict[str, Choice]:
    """Choose the embedding and the head outside the blocks that share a vocabulary, by name.

    A head is a Linear with a row for each row of an embedding, the same weight or one of its own. Position embeddings
    and classifiers have no such partner and stay whole: they are small, and dividing them costs a collective.
    """
    inside = {module for block in blocks for module in block.module.modules() if block.name}
    outside = {name: module for name, module in root.named_modules() if module not in inside and kind_of(module)}
    embeddings = {name: module for name, module in outside.items() if type(module) is nn.Embedding}
    heads = {name: module for name, module in outside.items() if isinstance(module, nn.Linear)}
    choices: dict[str, Choice] = {}
    for name, embedding in embeddings.items():
        partners = [n for n, head in heads.items() if tuple(head.weight.shape) == tuple(embedding.weight.shape)]
        if not partners:
            continue
        reason = _obstacle(embedding, size)
        for each in (name, *partners):
            tied = heads[each].weight is embedding.weight if each in heads else False
            why = f"vocabulary of {embedding.num_embeddings}" + (f", tied to {name}" if tied else "")
            choices[each] = Choice("replicate", reason) if reason else Choice("vocab", why)
    return choices


def _obstacle(embedding: nn.Embedding, size: int) -> str | None:
    if embedding.num_embeddings % size:
        return f"a vocabulary of {embedding.num_embeddings} does not divide by {size}"
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        return "an embedding with max_norm, scale_grad_by_freq or sparse"
    return None
