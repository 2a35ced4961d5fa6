"""Find a tensor-parallel plan for a module that nobody wrote one for.

Each kind of block is run on fake tensors. Following which divisible layer's output reaches which other layer's input
gives a first plan: a layer fed by the residual stream is column-wise, one fed by column-wise layers is row-wise. Then
the block is simulated as one rank would run it, and what turns out to need whole tensors is divided otherwise or left
whole. A wrong guess here costs time, never numbers: the rules gather what they do not understand.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_4d import _torch_private as private
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.tensor.inputs import Call, calls_of_blocks
from lightning_4d.parallel.tensor.parameters import Split
from lightning_4d.parallel.tensor.plan import (
    Choice,
    TensorPlan,
    divisors,
    kind_of,
    matches,
    module_splits,
    output_features,
)
from lightning_4d.parallel.tensor.simulate import Simulation, simulate
from lightning_4d.parallel.tensor.vocabulary import vocabulary_choices
from lightning_4d.utilization.isolation import faked

_PARTS = (3, 2, 4)  # queries, keys and values; gate and up


def find_plan(root: nn.Module, blocks: Sequence[Block], size: int) -> TensorPlan:
    """Find how the layers of ``root`` can be divided over ``size`` ranks.

    Runs on fake tensors: nothing is computed, and nothing changes. All ranks find the same plan.

    Raises:
        UnsupportedError: nothing can be divided; names sizes that work.
    """
    blocks = blocks_to_run(root, blocks)
    plan = _search(root, blocks, size)
    if not _divides(plan):
        raise _nothing_divides(root, blocks, size, plan)
    _warn_of_whole_blocks(root, plan)
    return plan


def _search(root: nn.Module, blocks: Sequence[Block], size: int) -> TensorPlan:
    plan = TensorPlan(size, source="found by running blocks on fake tensors")
    published = published_styles(root)
    if published:
        plan.source = "the model's own tp_plan, checked by running blocks on fake tensors"
    with faked(root, torch.device("cpu"), {}), private.quiet_fake_tensors():
        calls = calls_of_blocks(root, blocks)
        for block, kind in _kinds(blocks):
            choices = kind.get("choices")
            if choices is None:
                known = _within(published, block)
                choices = kind["choices"] = choices_for_block(block.module, calls.get(block.name), size, known)
            prefix = f"{block.name}." if block.name else ""
            plan.choices |= {f"{prefix}{name}".rstrip("."): choice for name, choice in choices.items()}
        plan.choices |= vocabulary_choices(root, blocks, size)
    return plan


def _divides(plan: TensorPlan) -> bool:
    return any(choice.style != "replicate" for choice in plan.choices.values())


def _warn_of_whole_blocks(root: nn.Module, plan: TensorPlan) -> None:
    """Only the vocabulary is divided: right, and hardly faster."""
    reasons = {choice.why for choice in plan.choices.values() if choice.style == "replicate"}
    if {choice.style for choice in plan.choices.values()} <= {"replicate", "vocab"} and reasons:
        warnings.warn(
            f"tensor_parallel_plan='auto' divides only the vocabulary of {type(root).__name__} over {plan.size} ranks: "
            f"{min(reasons)}. Every rank computes all layers. Give tensor_parallel_plan={{module pattern: style}}, "
            "such as {'blocks.*.mlp.up': 'colwise', 'blocks.*.mlp.down': 'rowwise'}",
            stacklevel=2,
        )


def _kinds(blocks: Sequence[Block]) -> Iterator[tuple[Block, dict[str, Any]]]:
    """Blocks of one class and shapes share what is found for the first."""
    kinds: dict[Any, dict[str, Any]] = {}
    for block in blocks:
        shapes = tuple((name, tuple(p.shape)) for name, p in block.module.named_parameters())
        yield block, kinds.setdefault((type(block.module), shapes), {})


def blocks_to_run(root: nn.Module, blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks that have layers to divide, not those that are one; without any the whole model is one block.

    A chain of mere Linears stands beside other blocks where each merges a skip connection.
    """
    return [block for block in blocks if kind_of(block.module) is None] or [Block("", root)]


def published_styles(root: nn.Module) -> dict[str, Choice]:
    """The styles of a Hugging Face model's own ``tp_plan``, by module name of ``root``; empty if there is none."""
    found: dict[str, Choice] = {}
    for prefix, model in root.named_modules():
        given = getattr(model, "tp_plan", None) if hasattr(model, "config") else None
        for pattern, style in given.items() if isinstance(given, Mapping) else ():
            kind = next((kind for kind in ("colwise", "rowwise") if str(style).startswith(kind)), None)
            if kind is None:
                continue  # the parts of an expert layer and the like: whole, as everything that is not understood
            full = f"{prefix}.{pattern}" if prefix else pattern
            names = [name for name, module in root.named_modules() if kind_of(module) and matches(full, name)]
            found |= {name: Choice(kind, f"tp_plan {pattern!r} of {type(model).__name__}") for name in names}
    return found


def _within(choices: Mapping[str, Choice], block: Block) -> dict[str, Choice]:
    prefix = f"{block.name}." if block.name else ""
    return {name.removeprefix(prefix): choice for name, choice in choices.items() if name.startswith(prefix)}


def choices_for_block(
    module: nn.Module, call: Call | None, size: int, known: Mapping[str, Choice] | None = None
) -> dict[str, Choice]:
    """Find the styles of the divisible layers in one block, by name within it. Inside fake tensors only.

    ``known`` styles, if any, are the first guess.
    """
    units = {name: part for name, part in module.named_modules() if kind_of(part) is not None}
    units = {name: part for name, part in units.items() if not _inside_attention(name, units)}
    whole = Choice("replicate", "the block could not be run on fake tensors")
    choices = {name: (known or {}).get(name, whole) for name in units}
    if call is None:
        _leave_uneven(_State(module, Call((), {}), units, choices, size))
        return choices
    if not known:
        choices = trace(module, call, units)
    _refine(module, call, units, choices, size)
    return choices


def _inside_attention(name: str, units: Mapping[str, nn.Module]) -> bool:
    return any(
        kind_of(other) == "attention" and (name.startswith(f"{outer}.") or outer == "")
        for outer, other in units.items()
        if other is not units[name]
    )


# ---------------------------------------------------------------------------------------------------------- first guess


def trace(module: nn.Module, call: Call, units: Mapping[str, nn.Module]) -> dict[str, Choice]:
    """Follow outputs of divisible layers to inputs of others in one run of the block."""
    flow = _Flow(units)
    with flow, contextlib.ExitStack() as stack:
        for name, unit in units.items():
            stack.callback(unit.register_forward_hook(flow.hook(name), with_kwargs=True).remove)
        try:
            module(*call.args, **call.kwargs)
        except Exception as error:
            why = f"the block could not be run on fake tensors: {type(error).__name__}: {error}"
            return {name: Choice("replicate", why) for name in units}
    return flow.choices()


class _Flow(TorchFunctionMode):
    """Marks tensors with the column-wise layers whose output is in them."""

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._units = units
        self._style: dict[str, str] = {}
        self._feeds: dict[str, set[str]] = {}  # row-wise layers by what feeds them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        marks = frozenset().union(*(mark for mark in _marks((args, kwargs or {}))))
        if marks:
            for tensor in _tensors(output):
                vars(tensor)["_marks"] = marks
        return output

    def hook(self, name: str) -> Any:
        """A forward hook that decides on the style of a layer at its first call."""

        def decide(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            marks = frozenset().union(*(mark for mark in _marks((args, kwargs))))
            if name not in self._style:
                self._style[name] = self._decide(module, marks)
                if self._style[name] == "rowwise":
                    self._feeds[name] = set(marks)
            for tensor in _tensors(output):
                vars(tensor)["_marks"] = frozenset((name,)) if self._style[name] == "colwise" else frozenset()

        return decide

    @staticmethod
    def _decide(module: nn.Module, marks: frozenset[str]) -> str:
        kind = kind_of(module)
        if kind == "attention":
            return "attention" if not marks else "replicate"
        if kind == "embedding":
            return "replicate"
        return "rowwise" if marks else "colwise"

    def choices(self) -> dict[str, Choice]:
        fed = {feeder: row for row, feeders in self._feeds.items() for feeder in feeders}
        choices = {}
        for name in self._units:
            style = self._style.get(name)
            if style is None:
                choices[name] = Choice("replicate", "the block's run does not call it")
            elif style == "rowwise":
                choices[name] = Choice(style, f"fed by {', '.join(sorted(self._feeds[name]))}")
            elif style == "colwise" and name not in fed:
                choices[name] = Choice("replicate", "no other layer of the block takes its output")
            elif style == "colwise":
                choices[name] = Choice(style, f"fed by the residual stream, feeds {fed[name]}")
            else:
                choices[name] = Choice(style, "a whole attention layer" if style == "attention" else "an embedding")
        return choices


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _marks(value: Any) -> Iterator[frozenset[str]]:
    return (tensor.__dict__["_marks"] for tensor in _tensors(value) if "_marks" in tensor.__dict__)


# ----------------------------------------------------------------------------------------------------------- refinement


@dataclass
class _State:
    module: nn.Module
    call: Call
    units: Mapping[str, nn.Module]
    choices: dict[str, Choice]
    size: int

    def splits(self) -> dict[str, Split]:
        found = {}
        for name, choice in self.choices.items():
            for own, split in module_splits(self.units[name], choice.style, choice.parts).items():
                found[f"{name}.{own}" if name else own] = split
        return found

    def run(self) -> Simulation:
        return simulate(self.module, self.call.args, self.call.kwargs, self.splits(), self.size)


def _refine(
    module: nn.Module, call: Call, units: Mapping[str, nn.Module], choices: dict[str, Choice], size: int
) -> None:
    """Change choices until the block runs without whole tensors; each round settles one layer at least."""
    state = _State(module, call, units, choices, size)
    _leave_uneven(state)
    for _ in range(2 * len(units) + 1):
        found = state.run()
        if found.error is not None:
            for name, choice in choices.items():
                if choice.style != "replicate":
                    choices[name] = Choice("replicate", f"divided, the block fails: {found.error}")
            return
        culprits = _culprits(found, state)
        if not culprits:
            return
        if any(_divides_in_parts(state, name, len(found.gathered)) for name in culprits):
            continue
        name = _best_left_whole(state, list(culprits))
        choices[name] = Choice("replicate", f"its output in parts does not suit {culprits[name]}")
    _leave_uneven(state)


def _leave_uneven(state: _State) -> None:
    for name, choice in state.choices.items():
        unit = state.units[name]
        uneven = [
            f"{unit.get_parameter(own).shape[split.dim]} features"
            for own, split in module_splits(unit, choice.style, choice.parts).items()
            if not split.fits(unit.get_parameter(own).shape, state.size)
        ]
        if choice.style == "attention" and isinstance(unit, nn.MultiheadAttention) and unit.num_heads % state.size:
            uneven.append(f"{unit.num_heads} heads")
        if choice.style == "attention" and not private.HAS_STRIDED_SHARDS:
            state.choices[name] = Choice("replicate", "dividing a fused weight needs torch 2.13")
        elif uneven:
            state.choices[name] = Choice("replicate", f"{uneven[0]} do not divide by {state.size}")


def _culprits(found: Simulation, state: _State) -> dict[str, str]:
    """The divided layers behind whole tensors, in the order of the run, and what needed these first."""
    culprits: dict[str, str] = {}
    for function, origin in found.gathered:
        for parameter in sorted(origin):
            name = next((n for n in state.choices if parameter.startswith(f"{n}.") or n == ""), None)
            if name is not None and state.choices[name].style != "replicate":
                culprits.setdefault(name, function)
    return culprits


def _best_left_whole(state: _State, names: Sequence[str]) -> str:
    """The layer that leaves the fewest whole tensors when it is whole itself; the first of several."""
    if len(names) == 1:
        return names[0]
    remaining = []
    for name in names:
        before = state.choices[name]
        state.choices[name] = Choice("replicate", "tried")
        remaining.append(len(state.run().gathered))
        state.choices[name] = before
    return names[remaining.index(min(remaining))]


def _divides_in_parts(state: _State, name: str, gathers: int) -> bool:
    """Whether the layer's output consists of parts side by side; if so, choose that."""
    before = state.choices[name]
    if before.style != "colwise" or not private.HAS_STRIDED_SHARDS:
        return False
    length = output_features(state.units[name])
    for parts in _PARTS:
        if length % (parts * state.size):
            continue
        why = before.why.replace("fed by", f"{parts} parts side by side, fed by")
        state.choices[name] = Choice("fused_colwise", why, parts)
        found = state.run()
        if found.error is None and len(found.gathered) < gathers:
            return True
    state.choices[name] = before
    return False


def _nothing_divides(root: nn.Module, blocks: Sequence[Block], size: int, plan: TensorPlan) -> UnsupportedError:
    reasons = list(dict.fromkeys(choice.why for choice in plan.choices.values()))[:3]
    heads = sorted({count for block in blocks for module in block.module.modules() if (count := _heads(module))})
    others = {d for number in (size, *heads[:1]) for d in divisors(number)} - {1, size}
    nearest = sorted(others, key=lambda other: abs(other - size))[:4]
    sizes = [str(other) for other in sorted(nearest) if _divides(_search(root, blocks, other))]
    return UnsupportedError(
        explain(
            f"tensor_parallel_size={size} for {type(root).__name__}: {'; '.join(reasons) or 'no layer to divide'}",
            "at least one pair of layers has to divide into equal shares, or the ranks would all do the same work",
            f"use tensor_parallel_size={' or '.join(sizes)}" if sizes else "use tensor_parallel_size=1",
        )
    )


def _heads(module: nn.Module) -> int:
    for name in ("num_heads", "n_heads", "heads", "n_head", "num_attention_heads", "nhead"):
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    return 0
