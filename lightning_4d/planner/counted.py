"""Sizes of a model that exists only as code: counted in one training step on fake tensors, with nothing computed.

The count is that of lightning_4d.utilization, as MFUMonitor makes it. It finds what each block and the rest compute;
the sizes of the transformer that computes, holds and passes on the same are what the planner goes on with. This is the
only file of the planner that needs torch.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_4d.errors import PlanError, explain
from lightning_4d.planner.model import ModelFacts
from lightning_4d.utilization import CountError, StepFlops, count_step
from lightning_4d.utilization.isolation import FakeRun

__all__ = ["build_module", "count_module", "parse_batch"]

_HEADS = ("n_heads", "num_heads", "n_head", "num_attention_heads", "heads", "nhead")
_KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")


def build_module(class_path: str, init_args: Mapping[str, Any]) -> nn.Module:
    """Make a module on the meta device from its dotted class path and arguments, as a LightningCLI's YAML names them.

    Raises:
        PlanError: the path names no class, or the class cannot be made.
    """
    package, _, name = class_path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        rule = f"a class path is package.module.Class and must be importable ({error})"
        raise PlanError(
            explain(f"class_path {class_path!r}", rule, "check it, and start in the folder it is in")
        ) from error
    try:
        with torch.device("meta"):
            module = kind(**init_args)
            if callable(configure := getattr(module, "configure_model", None)):
                configure()
            return module
    except Exception as error:  # whatever the user's constructor raises
        raise PlanError(
            explain(f"{class_path}({dict(init_args)})", f"it raises {error!r}", "correct init_args")
        ) from error


def parse_batch(text: str) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Read the tensors of a batch: ``int64:8x128`` is one of shape (8, 128); several are separated by commas.

    Raises:
        PlanError: a part that is no dtype with a shape.

    >>> parse_batch("int64:8x128,float32:8")
    [(torch.int64, (8, 128)), (torch.float32, (8,))]
    """
    tensors = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+):(\d+(?:x\d+)*)\s*", part)
        dtype = getattr(torch, match[1], None) if match else None
        if match is None or not isinstance(dtype, torch.dtype):
            rule = "each tensor of a batch is written as dtype:shape"
            raise PlanError(explain(f"batch {part!r}", rule, "use for instance int64:8x128,int64:8x128"))
        tensors.append((dtype, tuple(int(size) for size in match[2].split("x"))))
    return tensors


def count_module(
    module: nn.Module,
    batch: Sequence[tuple[torch.dtype, tuple[int, ...]]],
    blocks: Mapping[str, nn.Module],
    name: str = "model",
) -> ModelFacts:
    """Return the sizes of the transformer that does in a step what `module` does.

    Args:
        module: has a ``training_step(batch, batch_idx)``, or is called with the batch and returns a loss or an output.
        batch: dtypes and shapes of its tensors; the first dim is that of samples. One tensor is the batch itself,
            several are a tuple.
        blocks: the repeated blocks by name, at least one; `lightning_4d.parallel.blocks.find_blocks` finds them.
        name: of the result.

    Raises:
        PlanError: the step does not run on fake tensors, gives no loss, or no block runs in it.
    """
    if not blocks:
        rule = "a plan needs repeated layers, in an nn.ModuleList or nn.Sequential"
        raise PlanError(explain(f"{type(module).__name__} without repeated layers", rule, "name them: --blocks"))
    shapes: list[torch.Size] = []
    first = next(iter(blocks.values()))

    def step(_: FakeRun, __: Any) -> Tensor:
        # Here and not before: a fake run drops what this package hooks to modules.
        handle = first.register_forward_pre_hook(_shape_of_input(shapes), with_kwargs=True)
        try:
            return _loss(module, batch)
        finally:
            handle.remove()

    try:
        flops = count_step(module, step, torch.device("cpu"), blocks=blocks)
    except CountError as error:
        remedy = "give the sizes as YAML, or simplify the step"
        raise PlanError(explain(f"{type(module).__name__}.training_step", str(error), remedy)) from error
    if not shapes or not flops.blocks:
        rule = "at least one repeated block runs in a step"
        raise PlanError(explain(f"{type(module).__name__} with blocks {list(blocks)}", rule, "name its blocks"))
    return _facts(module, blocks, flops, shapes[0], batch[0][1][0], name)


def _shape_of_input(shapes: list[torch.Size]) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 1]
        if tensors:
            shapes.append(tensors[0].shape)

    return hook


def _loss(module: nn.Module, batch: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> Any:
    tensors = tuple(torch.empty(shape, dtype=dtype) for dtype, shape in batch)
    whole = tensors[0] if len(tensors) == 1 else tensors
    step = getattr(module, "training_step", None)
    if callable(log := getattr(module, "log", None)) and log.__module__.startswith(("lightning", "pytorch_lightning")):
        module.__dict__.update(log=_nothing, log_dict=_nothing)  # restored after the fake run
    out: Any = step(whole, 0) if callable(step) else module(*tensors)
    if isinstance(out, dict):
        out = out.get("loss")
    if not isinstance(out, Tensor):
        rule = "a step returns a loss, or a dict with one as 'loss'"
        raise PlanError(explain(f"{type(module).__name__}.training_step returned {out!r}", rule, "return the loss"))
    return out if out.dim() == 0 else out.float().mean()


def _nothing(*_: Any, **__: Any) -> None: ...


def _facts(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    flops: StepFlops,
    shape: torch.Size,
    samples: int,
    name: str,
) -> ModelFacts:
    """Solve for the sizes: what a block computes gives its widths, what remains gives the head's."""
    layers = len(blocks)
    hidden = shape[1] if len(shape) == 4 else shape[-1]  # (B, C, H, W), or (B, T, C)
    tokens = shape.numel() // hidden // samples
    attention = sum(each.attention for each in flops.blocks.values()) / layers / samples
    products = sum(each.total - each.attention for each in flops.blocks.values()) / layers / samples
    query_width = attention / (4 * tokens**2)
    heads = _attribute(blocks.values(), _HEADS) or max(1, round(query_width / 64)) if attention else 0
    kv_heads = _attribute(blocks.values(), _KV_HEADS) or heads
    head_dim = query_width / heads if heads else 0.0
    weights = products / (2 * tokens)  # of the matrices that each token meets
    own = hidden * (2 * query_width + 2 * kv_heads * head_dim)
    head = (flops.forward.total - sum(each.total for each in flops.blocks.values())) / samples / (2 * hidden)
    head_tokens = tokens if head >= tokens else 1
    facts = ModelFacts(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden=max(0.0, round((weights - own) / (2 * hidden))),
        ffn_matrices=2,
        vocab=max(1, round(head / head_tokens)),
        seq_len=tokens,
        tied=1.0,
        causal=float(flops.attention_calls.get("causal", 0) > 0),
        head_tokens=head_tokens,
        name=name,
    )
    held = sum(parameter.numel() for parameter in module.parameters())
    return _with_parameters(facts, held)


def _with_parameters(facts: ModelFacts, held: int) -> ModelFacts:
    return replace(facts, extra_parameters=held - float(facts.parameters))


def _attribute(blocks: Any, names: Sequence[str]) -> int | None:
    """The first attribute of a block or a part of it that says how many heads it has."""
    for block in blocks:
        for part in block.modules():
            for name in names:
                value = getattr(part, name, None)
                if isinstance(value, int) and value > 0:
                    return value
        return None
    return None
