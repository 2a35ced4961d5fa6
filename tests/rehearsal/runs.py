"""Real training steps of the module that is rehearsed, and what one rank held and communicated in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_4d import NDStrategy
from lightning_4d import _torch_private as private
from lightning_4d.absent import is_absent
from lightning_4d.layout import ParallelLayout
from lightning_4d.rehearsal import Communications, Llama, LlamaSizes
from lightning_4d.rehearsal.activations import Activations
from tests.strategies.scenarios import quiet, trainer_with

SIZES = LlamaSizes(layers=4, hidden=32, heads=4, kv_heads=2, ffn_hidden=64, vocab=64)
LENGTH, BATCH, COUNTED = 16, 4, 4  # by then agreements of the first steps are past


def module(*, tied: bool = False) -> Llama:
    sizes = LlamaSizes(SIZES.layers, SIZES.hidden, SIZES.heads, SIZES.kv_heads, SIZES.ffn_hidden, SIZES.vocab, tied)
    return Llama(sizes, LENGTH, BATCH)


class Watcher(Callback):
    """Counts the collectives and the activations of one training step, and measures what the rank holds."""

    def __init__(self, text: str) -> None:
        self.seen = Communications(ParallelLayout.parse(text))
        self.found: dict[str, Any] = {}
        self._watching = ExitStack()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != COUNTED:
            return
        self._saved = Activations(lambda: self._held(trainer, module))
        self._saved.refresh()
        self._watching.enter_context(self._saved.watching())
        self._watching.enter_context(self.seen.watching())

    def _held(self, trainer: Any, module: Any) -> Iterator[Tensor]:
        yield from private.fsdp_gathered_parameters(trainer.strategy.data.units)
        yield from module.parameters()
        yield from module.buffers()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found["gradient_bytes"] = sum(size(p.grad) for p in module.parameters() if p.grad is not None)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != COUNTED:
            return
        self._watching.close()
        own = [p for p in module.parameters() if not is_absent(p)]
        states = [v for state in trainer.optimizers[0].state.values() for v in state.values()]
        self.found |= {
            "parameters": sum(local(p).numel() for p in own),
            "parameter_bytes": sum(map(size, own)),
            "optimizer_bytes": sum(size(v) for v in states if isinstance(v, Tensor) and v.dim() > 0),
            "activation_bytes": self._saved.peak,
            "collectives": {key: (count, self.seen.bytes[key]) for key, count in self.seen.calls.items()},
        }


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size(tensor: Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def real(text: str, precision: str, *, tied: bool = False, **strategy: Any) -> dict[str, Any]:
    """Train some steps under NDStrategy; return what this rank held, and did in the step that was watched."""
    quiet()
    torch.manual_seed(0)
    layout = ParallelLayout.parse(text)
    sizes = {
        "pipeline_parallel_size": layout.pipeline_parallel_size,
        "data_parallel_replicate_size": layout.data_parallel_replicate_size,
        "data_parallel_shard_size": layout.data_parallel_shard_size,
        "context_parallel_size": layout.context_parallel_size,
        "tensor_parallel_size": layout.tensor_parallel_size,
    }
    watcher = Watcher(text)
    settings = {"max_steps": COUNTED + 1, "limit_val_batches": 0, "precision": precision, "callbacks": [watcher]}
    trainer_with(lambda: NDStrategy(**sizes, **strategy), **settings)().fit(module(tied=tied))
    return watcher.found
