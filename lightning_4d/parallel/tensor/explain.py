"""What a tensor-parallel plan does to a module, in numbers and words: what ``lightning-4d explain`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_4d import _torch_private as private
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.tensor.discover import blocks_to_run
from lightning_4d.parallel.tensor.inputs import calls_of_blocks
from lightning_4d.parallel.tensor.plan import Choice, TensorPlan, starred
from lightning_4d.parallel.tensor.simulate import Simulation, simulate
from lightning_4d.utilization.isolation import faked


@dataclass(frozen=True)
class Division:
    """One kind of module under a plan.

    Attributes:
        name: dotted, with ``*`` for the numbers of repeated layers.
        style: see `STYLES`.
        why: what the plan knows about it.
        shapes: of each of its own parameters, by name: the whole and one rank's part.
        count: how many modules are of this kind.
    """

    name: str
    style: str
    why: str
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    count: int


@dataclass(frozen=True)
class BlockCollectives:
    """Collectives of one kind of block.

    Attributes:
        name: of the first such block.
        forward: number by kind.
        backward: likewise.
        gathered: what had to be put together for want of a rule, in words; empty for a good plan.
        error: why the block could not be run, or None.
        count: how many blocks are of this kind.
    """

    name: str
    forward: dict[str, int]
    backward: dict[str, int]
    gathered: list[str]
    error: str | None
    count: int


def divisions(root: nn.Module, plan: TensorPlan) -> list[Division]:
    """List every module that holds parameters, equal ones of repeated layers once."""
    splits = plan.splits(root)
    found: dict[tuple[str, str, str, str], Division] = {}
    for name, module in root.named_modules():
        own = {key: p for key, p in module._parameters.items() if p is not None}
        if not own:
            continue
        choice = plan.choices.get(name) or _inside(name, plan)
        style, why = (choice.style, choice.why) if choice else ("replicate", "not a layer that can be divided")
        style = f"{style}:{choice.parts}" if choice and choice.parts > 1 else style
        shapes = {}
        for key, parameter in own.items():
            local = list(parameter.shape)
            split = splits.get(f"{name}.{key}" if name else key)
            if split is not None:
                local[split.dim] //= plan.size
            shapes[key] = (tuple(parameter.shape), tuple(local))
        kind = (starred(name), style, starred(why), str(shapes))
        count = found[kind].count + 1 if kind in found else 1
        found[kind] = Division(kind[0], style, why, shapes, count)
    return list(found.values())


def _inside(name: str, plan: TensorPlan) -> Choice | None:
    """The choice of an attention layer for the projection inside it."""
    outer = plan.choices.get(name.rpartition(".")[0])
    return outer if outer is not None and outer.style == "attention" else None


def whole_fraction(rows: Iterable[Division]) -> float:
    """The share of all parameters that is whole on every rank, 0 to 1."""
    whole = total = 0
    for row in rows:
        for shape, local in row.shapes.values():
            size = row.count * torch.Size(shape).numel()
            total += size
            whole += size if shape == local else 0
    return whole / total if total else 0.0


def block_collectives(
    root: nn.Module, blocks: Sequence[Block], plan: TensorPlan, *, sequence_parallel: bool = False
) -> list[BlockCollectives]:
    """Run each kind of block on fake tensors as one rank of the plan would, and count its collectives."""
    blocks = blocks_to_run(root, blocks)
    splits = plan.splits(root)
    found: dict[str, list[BlockCollectives]] = {}
    with faked(root, torch.device("cpu"), {}), private.quiet_fake_tensors():
        calls = calls_of_blocks(root, blocks)
        for block in blocks:
            call = calls.get(block.name)
            prefix = f"{block.name}." if block.name else ""
            own = {name.removeprefix(prefix): s for name, s in splits.items() if name.startswith(prefix)}
            key = f"{type(block.module).__name__} {own} {[tuple(p.shape) for p in block.module.parameters()]}"
            if key in found:
                found[key].append(found[key][0])
                continue
            result = Simulation(error="the block could not be run on fake tensors")
            if call is not None:
                result = simulate(
                    block.module, call.args, call.kwargs, own, plan.size, sequence_parallel=sequence_parallel
                )
            found[key] = [_counts(block.name, result)]
    return [replace(same[0], count=len(same)) for same in found.values()]


def _counts(name: str, result: Simulation) -> BlockCollectives:
    gathered = [f"{function}: {', '.join(sorted(origin)) or 'an input'}" for function, origin in result.gathered]
    return BlockCollectives(name, result.count(backward=False), result.count(backward=True), gathered, result.error, 1)
