"""The tensor-parallel plan: which module is divided how, and why; written by the user, or found by `discover`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_4d._torch_private import HAS_STRIDED_SHARDS
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.tensor.parameters import Split

STYLES = {
    "colwise": "output features divided: the first product of a pair (queries, keys, values; up, gate)",
    "rowwise": "input features divided: the second product of a pair (attention output; down)",
    "fused_colwise": "colwise for a weight of several parts side by side (queries, keys and values in one; gate and "
    "up in one), each divided by itself; fused_colwise:2 says how many",
    "attention": "an nn.MultiheadAttention, by heads",
    "vocab": "an embedding or an output head, over the vocabulary",
    "sequence": "whole; with sequence_parallel=True it works on parts of the sequence (norms)",
    "replicate": "whole on every rank",
}


@dataclass
class Choice:
    """How one module is divided.

    Attributes:
        style: one of `STYLES`, without a number of parts.
        why: for people.
        parts: of a fused_colwise.
    """

    style: str
    why: str
    parts: int = 1


@dataclass
class TensorPlan:
    """A plan for a module.

    Attributes:
        size: the number of ranks it is for.
        choices: by module name.
        source: where it comes from, for people.
    """

    size: int
    choices: dict[str, Choice] = field(default_factory=dict)
    source: str = "no plan"

    def splits(self, root: nn.Module) -> dict[str, Split]:
        """How each divided parameter is divided, by name."""
        found: dict[str, Split] = {}
        for name, choice in self.choices.items():
            for own, split in module_splits(root.get_submodule(name), choice.style, choice.parts).items():
                found[f"{name}.{own}" if name else own] = split
        return found


def kind_of(module: nn.Module) -> str | None:
    """Which kind of divisible module this is: linear, conv1d (Hugging Face), embedding, attention; None for others.

    A weight that is computed from other parameters (weight norm) is no parameter to divide: None.
    """
    if isinstance(module, nn.MultiheadAttention):
        return "attention" if module.out_proj._parameters.get("weight") is not None else None
    weight = module._parameters.get("weight")
    if weight is None:
        return None
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear):
        return "linear"
    if type(module).__name__ == "Conv1D" and weight.dim() == 2 and hasattr(module, "nf"):
        return "conv1d"
    return None


def module_splits(module: nn.Module, style: str, parts: int = 1) -> dict[str, Split]:
    """How the module's own parameters are divided in a style, by name; whole ones are left out."""
    kind = kind_of(module)
    if style in ("replicate", "sequence") or kind is None:
        return {}
    if kind == "attention":
        return _attention_splits(module)
    if kind == "embedding":
        return {"weight": Split(1 if style == "colwise" else 0)}
    features_out, features_in = (1, 0) if kind == "conv1d" else (0, 1)
    if style == "rowwise":
        return {"weight": Split(features_in)}
    splits = {"weight": Split(features_out, parts)}
    if module._parameters.get("bias") is not None:
        splits["bias"] = Split(0, parts)
    return splits


def _attention_splits(module: nn.Module) -> dict[str, Split]:
    splits = {"in_proj_weight": Split(0, 3), "in_proj_bias": Split(0, 3), "out_proj.weight": Split(1)}
    return {
        name: split
        for name, split in splits.items()
        if name == "out_proj.weight" or module._parameters.get(name) is not None
    }


def output_features(module: nn.Module) -> int:
    """The size of a linear module's output."""
    weight: Tensor = module._parameters["weight"]  # pyright: ignore[reportAssignmentType]
    return weight.shape[1] if kind_of(module) == "conv1d" else weight.shape[0]


def input_features(module: nn.Module) -> int:
    """The size of a linear module's input."""
    weight: Tensor = module._parameters["weight"]  # pyright: ignore[reportAssignmentType]
    return weight.shape[0] if kind_of(module) == "conv1d" else weight.shape[1]


# ------------------------------------------------------------------------------------------------------ plans by users


def explicit_plan(root: nn.Module, given: Mapping[str, str], size: int) -> TensorPlan:
    """Apply ``{pattern: style}`` to ``root``: each pattern is a module name in which ``*`` stands for one segment.

    Raises:
        UnsupportedError: a pattern that matches nothing, an unknown style or one that the module cannot have, sizes
            that do not divide, or two patterns that disagree. Names what would work.
    """
    modules = dict(root.named_modules())
    plan = TensorPlan(size, source="tensor_parallel_plan")
    for pattern, text in given.items():
        style, parts = _parsed(pattern, text)
        names = [name for name in modules if matches(pattern, name)]
        if not names:
            raise _no_match(pattern, modules)
        for name in names:
            choice = _checked(name, modules[name], style, parts, size, pattern)
            if plan.choices.get(name, choice).style != choice.style:
                raise _disagree(name, plan.choices[name], choice)
            plan.choices[name] = choice
    return plan


def _parsed(pattern: str, text: str) -> tuple[str, int | None]:
    style, _, number = str(text).partition(":")
    if style not in STYLES or (number and (not number.isdigit() or int(number) < 1 or style != "fused_colwise")):
        near = difflib.get_close_matches(str(text), STYLES, n=1, cutoff=0.0)[0]
        raise UnsupportedError(
            explain(
                f"tensor_parallel_plan[{pattern!r}]={text!r}",
                f"a style is one of {', '.join(STYLES)} (fused_colwise:2 for two parts)",
                f"use {near!r}",
            )
        )
    return style, int(number) if number else None


def starred(name: str) -> str:
    """A module name with ``*`` for the numbers of repeated layers.

    >>> starred("layers.11.ln_1")
    'layers.*.ln_1'
    """
    return re.sub(r"(?<![^. ])\d+(?=\.|$)", "*", name)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern, in which ``*`` stands for one segment, is a module's name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]*"), name) is not None


def _no_match(pattern: str, names: Iterable[str]) -> UnsupportedError:
    divisible = sorted({starred(name) for name in names if name})
    near = difflib.get_close_matches(starred(pattern), divisible, n=3, cutoff=0.0)
    return UnsupportedError(
        explain(
            f"tensor_parallel_plan has the pattern {pattern!r}, which matches no module",
            "a pattern is the dotted name of a module, in which * stands for one segment",
            f"the nearest names are {', '.join(map(repr, near))}",
        )
    )


def _checked(name: str, module: nn.Module, style: str, parts: int | None, size: int, pattern: str) -> Choice:
    kind = kind_of(module)
    allowed = {
        "linear": ("colwise", "rowwise", "fused_colwise", "vocab", "replicate"),
        "conv1d": ("colwise", "rowwise", "fused_colwise", "replicate"),
        "embedding": ("vocab", "colwise", "replicate"),
        "attention": ("attention", "replicate"),
        None: ("sequence", "replicate"),
    }[kind]
    if style not in allowed:
        raise UnsupportedError(
            explain(
                f"tensor_parallel_plan[{pattern!r}]={style!r} for {name!r}, a {type(module).__name__}",
                f"such a module can be {', '.join(allowed)}",
                f"use {allowed[0]!r}",
            )
        )
    if style == "fused_colwise":
        parts = parts or _likely_parts(module)
    refuse_uneven(name, module, style, parts or 1, size)
    return Choice(style, f"tensor_parallel_plan[{pattern!r}]", parts or 1)


def _likely_parts(module: nn.Module) -> int:
    whole, rest = divmod(output_features(module), input_features(module))
    return whole if rest == 0 and whole > 1 else 2


def refuse_uneven(name: str, module: nn.Module, style: str, parts: int, size: int) -> None:
    """Refuse a division into unequal shares.

    Raises:
        UnsupportedError: names the module and the sizes that work.
    """
    if style in ("fused_colwise", "attention") and not HAS_STRIDED_SHARDS:
        raise UnsupportedError(
            explain(
                f"{name!r} as {style!r}", "a fused weight in parts needs torch 2.13", "update torch, or 'replicate'"
            )
        )
    shares = [
        (own, module.get_parameter(own).shape[split.dim], split)
        for own, split in module_splits(module, style, parts).items()
    ]
    if isinstance(module, nn.MultiheadAttention) and style == "attention":
        shares.append(("num_heads", module.num_heads, Split(0)))
    for own, length, split in shares:
        if length % (split.parts * size):
            raise UnsupportedError(
                explain(
                    f"tensor_parallel_size={size} for {name!r} as {style!r}: {own} has {length // split.parts} "
                    + ("features" if split.parts == 1 else f"features in each of {split.parts} parts"),
                    "each rank takes an equal share",
                    f"use {_some(divisors(length // split.parts))}, or 'replicate' for this module",
                )
            )


def divisors(number: int) -> list[int]:
    """All sizes that give equal shares.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [size for size in range(1, number + 1) if number % size == 0]


def _some(sizes: list[int], most: int = 8) -> str:
    shown = [str(size) for size in sizes[:most]]
    return ", ".join(shown[:-1]) + f" or {shown[-1]}" if len(shown) > 1 else shown[0]


def _disagree(name: str, first: Choice, second: Choice) -> UnsupportedError:
    return UnsupportedError(
        explain(
            f"{name!r} is {first.style!r} by {first.why} and {second.style!r} by {second.why}",
            "a module has one style",
            "make the patterns disjoint",
        )
    )
