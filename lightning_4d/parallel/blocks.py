"""Find the repeated blocks of a model from its module tree alone.

A *block* is one repeated layer of the model; a *chain* is the run of blocks in one ``nn.ModuleList`` or
``nn.Sequential``. Sharding, activation checkpointing and pipelining all work by block.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_4d._torch_private import user_class
from lightning_4d.errors import UnsupportedError, explain

_CONTAINERS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Block:
    """One repeated layer: its dotted name in the module tree, and the module."""

    name: str
    module: nn.Module


def find_blocks(root: nn.Module, blocks: str | Sequence[str] = "auto") -> list[Block]:
    """Return the repeated blocks of ``root`` in the order of the module tree, each module once.

    With ``"auto"``, a chain is the largest set of at least two children of one class in a ``ModuleList`` or
    ``Sequential``. Chains nested in a block of another chain (the experts of a layer) belong to that block. Chains that
    hold less than a tenth of the parameters of the largest one are left out, so that a small stem does not count.
    An empty list means that the model has no repeated blocks.

    Args:
        root: any module; a LightningModule as well.
        blocks: ``"auto"``, or the dotted name of the container of the repeated layers, or several such names.

    Raises:
        UnsupportedError: a given name does not exist, or names something that holds no layers.
    """
    if blocks == "auto":
        return _unique(block for chain in _largest(_outermost(_chains(root))) for block in chain)
    names = [blocks] if isinstance(blocks, str) else list(blocks)
    return _unique(block for name in names for block in _named_chain(root, name))


def _named_chain(root: nn.Module, name: str) -> list[Block]:
    modules = dict(root.named_modules())
    container = modules.get(name)
    containers = [n for n, m in modules.items() if isinstance(m, _CONTAINERS) and len(m) > 0]
    if container is None or not isinstance(container, _CONTAINERS) or len(container) == 0:
        near = difflib.get_close_matches(name, containers, n=3, cutoff=0.0)
        what = "there is no such module" if container is None else f"it is a {type(container).__name__}"
        raise UnsupportedError(
            explain(
                f"blocks={name!r}: {what}",
                "blocks is 'auto' or the dotted name of a non-empty nn.ModuleList or nn.Sequential",
                f"use one of {near}" if near else "this model has no such container; use blocks='auto'",
            )
        )
    return [Block(f"{name}.{child}", module) for child, module in container.named_children()]


def _chains(root: nn.Module) -> list[list[Block]]:
    chains = []
    for name, container in root.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        prefix = f"{name}." if name else ""
        children = [Block(prefix + child, module) for child, module in container.named_children()]
        children = [block for block in children if _may_be_block(block.module)]
        if not children:
            continue
        cls, count = Counter(user_class(block.module) for block in children).most_common(1)[0]
        if count >= 2:
            chains.append([block for block in children if user_class(block.module) is cls])
    return chains


def _may_be_block(module: nn.Module) -> bool:
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module) is nn.Sequential
    return not is_container and any(True for _ in module.parameters())


def _outermost(chains: list[list[Block]]) -> list[list[Block]]:
    """Drop chains that lie inside a block of another chain. ``named_modules`` lists parents before children."""
    inside: set[nn.Module] = set()
    kept = []
    for chain in chains:
        if chain[0].module in inside:
            continue
        kept.append(chain)
        for block in chain:
            inside.update(block.module.modules())
    return kept


def _largest(chains: list[list[Block]]) -> list[list[Block]]:
    if not chains:
        return []
    sizes = [_parameter_count(chain) for chain in chains]
    return [chain for chain, size in zip(chains, sizes, strict=True) if size * 10 >= max(sizes)]


def _parameter_count(chain: list[Block]) -> int:
    return sum(p.numel() for p in {p for block in chain for p in block.module.parameters()})


def _unique(blocks: Iterator[Block]) -> list[Block]:
    seen: set[nn.Module] = set()
    kept = []
    for block in blocks:
        if block.module not in seen:
            seen.add(block.module)
            kept.append(block)
    return kept
