"""Counts the bytes that a rank holds of a model whose layers are divided: counted, not timed or sampled.

Of parameters, gradients and optimizer states, the part that the plan divides and the part that it leaves whole. Of the
activations that blocks save for backward, what attention and MLP make inside themselves, and what stands between them:
their input, the residual stream, norms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_4d.parallel.tensor import Sharded
from tests.harness import quiet

KINDS = ("parameters", "gradients", "optimizer states")


@dataclass
class Held:
    """Bytes of one rank.

    Attributes:
        tensors: of each of `KINDS`, by parameter name.
        inside: of activations that attention and MLP of the blocks make and save.
        between: of what the blocks save besides: inputs of attention and MLP, residual stream, norms.
    """

    tensors: dict[str, Counter[str]] = field(default_factory=dict)
    inside: int = 0
    between: int = 0

    def of(self, kind: str, names: Iterable[str]) -> int:
        """Bytes of one kind that belong to these parameters."""
        return sum(self.tensors[kind][name] for name in names)


class Watching(Callback):
    """Fills a `Held` in the last of the steps, of a model whose blocks have `attention` and `mlp`."""

    def __init__(self, step: int) -> None:
        self.held = Held()
        self._step = step
        self._saved: dict[int, Tensor] = {}  # by address of the memory; kept, so that an address is one tensor's
        self._inside: set[int] = set()
        self._outside: set[int] = set()
        self._depth = 0
        self._hooks: list[Any] = []
        self._context: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx != self._step:
            return
        self._ignored = {_address(_local(p)) for p in (*pl_module.parameters(), *pl_module.buffers())}
        blocks: Any = pl_module.blocks
        self._hooks = [blocks[0].register_forward_pre_hook(self._begin), blocks[-1].register_forward_hook(self._end)]
        for block in blocks:
            for part in (block.attention, block.mlp):
                self._hooks.append(part.register_forward_pre_hook(self._enter))
                self._hooks.append(part.register_forward_hook(self._leave))

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._context = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._context.__enter__()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._context.__exit__(None, None, None)

    def _enter(self, module: nn.Module, args: Any) -> None:
        """What the layer reads is whole, also where sequence parallelism has to gather it first."""
        value = args[0]
        if type(value) is Sharded:
            entered = _entered(value)
            value = entered if entered is not None else value.local
        self._outside.add(_address(value))
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        gathered = _entered(args[0]) if type(args[0]) is Sharded else None
        if gathered is not None:  # made inside, by the first product that reads it
            self._outside.add(_address(gathered))

    def _pack(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._ignored:
            if address not in self._saved and self._depth:
                self._inside.add(address)
            self._saved[address] = tensor.detach()
        return tensor.detach() if tensor.requires_grad else tensor

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if not self._hooks:
            return
        inside = self._inside - self._outside
        sizes = {address: tensor.untyped_storage().nbytes() for address, tensor in self._saved.items()}
        self.held.inside = sum(size for address, size in sizes.items() if address in inside)
        self.held.between = sum(size for address, size in sizes.items() if address not in inside)
        parameters = dict(pl_module.named_parameters())
        self.held.tensors["parameters"] = Counter({n: _bytes(p) for n, p in parameters.items()})
        self.held.tensors["gradients"] = Counter(
            {name: _bytes(p.grad) for name, p in parameters.items() if p.grad is not None}
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._saved.clear()
        states = trainer.optimizers[0].state
        self.held.tensors["optimizer states"] = Counter(
            {name: sum(map(_bytes, _per_element(states[p]))) for name, p in pl_module.named_parameters()}
        )


def _per_element(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _entered(part: Sharded) -> Tensor | None:
    """What sequence parallelism has gathered of it for the products of a layer."""
    return None if part._entered_whole is None else part._entered_whole[1]


def _address(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    """The memory that is really held: a slice of a larger tensor holds all of it."""
    return _local(tensor).untyped_storage().nbytes()


def held(module: Callable[[], LightningModule], strategy: Callable[[], Strategy], length: int, batch: int) -> Held:
    """Train two steps on random bytes and count. Which ranks must call: all."""
    steps = 2
    watching = Watching(step=steps - 1)
    tokens = torch.randint(256, (steps * batch, length + 1), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=batch)
    with quiet():
        trainer = Trainer(
            strategy=strategy(),
            accelerator="cpu",
            devices=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
            max_steps=steps,
            logger=False,
            callbacks=[watching],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module(), loader)
    return watching.held
