"""Fake inputs for blocks: the whole model's run on made-up inputs where that works, else each block by itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.tensor.plan import input_features, kind_of

_BATCH, _LENGTH = 2, 8


@dataclass(frozen=True)
class Call:
    """Arguments of one call of a block; fake tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def calls_of_blocks(root: nn.Module, blocks: Sequence[Block]) -> dict[str, Call]:
    """Find arguments for each block, by name; a block for which none were found is left out. Inside `faked` only."""
    calls: dict[str, Call] = {}
    if [block.module for block in blocks] != [root]:
        calls = _captured(root, blocks)
    for block in blocks:
        if block.name not in calls:
            found = _for_model(block.module) if block.module is root else _guessed(block.module)
            if found is not None:
                calls[block.name] = found
    return calls


def _captured(root: nn.Module, blocks: Sequence[Block]) -> dict[str, Call]:
    """Run a module that holds all blocks, the smallest first, and note how each is called."""
    for module in _holders(root, blocks):
        for args, kwargs in _model_inputs(module):
            calls: dict[str, Call] = {}
            with ExitStack() as stack:
                for block in blocks:
                    hook = _noting(calls, block.name)
                    stack.callback(block.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                try:
                    module(*args, **kwargs)
                except Exception:
                    continue
            if len(calls) == len(blocks):
                return calls
    return {}


def _noting(calls: dict[str, Call], name: str) -> Any:
    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(name, Call(args, dict(kwargs)))

    return note


def _holders(root: nn.Module, blocks: Sequence[Block]) -> list[nn.Module]:
    names = [block.name for block in blocks]
    holding = [
        module
        for name, module in root.named_modules()
        if all(block.startswith(f"{name}." if name else "") for block in names)
        and not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    ]
    return holding[::-1]


def _model_inputs(module: nn.Module) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Inputs that models of the usual kinds take: token ids, features, images."""
    tokens = torch.zeros(_BATCH, _LENGTH, dtype=torch.int64)
    parameters = _signature(module)
    if "input_ids" in parameters:
        kwargs: dict[str, Any] = {"input_ids": tokens}
        if "use_cache" in parameters or hasattr(module, "config"):
            yield (), {**kwargs, "use_cache": False}
        yield (), kwargs
    if any(isinstance(part, nn.Embedding) for part in module.modules()):
        yield (tokens,), {}
        yield (tokens[:, :4],), {}
    for features in _first_widths(module):
        for shape in ((_BATCH, _LENGTH, features), (_BATCH, features), (_BATCH, 9, features)):
            yield (_hidden(module, *shape),), {}
    for side in (224, 32, 28):
        for channels in (3, 1):
            yield (_hidden(module, _BATCH, channels, side, side),), {}


def _signature(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []


def _first_widths(module: nn.Module) -> list[int]:
    widths = [input_features(part) for part in module.modules() if kind_of(part) in ("linear", "conv1d")]
    return list(dict.fromkeys(widths))[:2]


def _hidden(module: nn.Module, *shape: int) -> Tensor:
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def _for_model(module: nn.Module) -> Call | None:
    """Inputs of a whole model that is one block."""
    for args, kwargs in _model_inputs(module):
        try:
            module(*args, **kwargs)
        except Exception:
            continue
        return Call(args, kwargs)
    return None


def _guessed(module: nn.Module) -> Call | None:
    """One hidden state of the width that the block's first layer takes."""
    for features in _first_widths(module) + _attention_widths(module):
        for shape in ((_BATCH, _LENGTH, features), (_BATCH, features)):
            call = Call((_hidden(module, *shape),), {})
            try:
                module(*call.args)
            except Exception:
                continue
            return call
    return None


def _attention_widths(module: nn.Module) -> list[int]:
    return [part.embed_dim for part in module.modules() if isinstance(part, nn.MultiheadAttention)][:1]
