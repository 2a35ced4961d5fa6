"""Bytes that autograd holds, counted from outside: by watching the memory of each tensor that it is given to save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_4d.parallel.recompute import calls


class SavedBytes:
    """Knows each storage that was ever saved, and which of them still exist.

    It does not trust what keeps or drops them: a storage counts as long as it is in memory, whoever holds it.
    Storages of `module`'s parameters and buffers do not count.
    """

    def __init__(self, module: nn.Module) -> None:
        held = [*module.parameters(), *module.buffers()]
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in held}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def see(self, tensor: Tensor) -> None:
        """A tensor is saved now."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._ignored:
            return
        reference = StorageWeakRef(storage)
        self._storages[reference.cdata] = (reference, storage.nbytes())
        self.peak = max(self.peak, self.now())

    def now(self) -> int:
        """Bytes of saved storages that exist."""
        self._storages = {key: pair for key, pair in self._storages.items() if not pair[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())

    @contextmanager
    def watch(self) -> Iterator[None]:
        """See all that is saved in the body: outside of recomputed blocks, and inside of them, both times they run."""

        def pack(tensor: Tensor) -> Tensor:
            self.see(tensor)
            return tensor.detach() if tensor.requires_grad else tensor  # as torch keeps it, without a cycle

        watcher = self

        class Watched(saved_tensors_hooks):
            def __init__(self, pack: Any, unpack: Any) -> None:
                def seeing(tensor: Tensor) -> Any:
                    watcher.see(tensor)
                    return pack(tensor)

                super().__init__(seeing, unpack)

        original = calls.saved_tensors_hooks
        calls.saved_tensors_hooks = Watched  # type: ignore[misc]
        try:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
        finally:
            calls.saved_tensors_hooks = original  # type: ignore[misc]


class TinyBlock(nn.Module):
    """A residual MLP block that saves `width + 2` times its input; its input is one of these."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim * width // 2)
        self.outer = nn.Linear(dim * width // 2, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x.sin()).sin())


class TinyStack(nn.Module):
    """`count` blocks in a loop."""

    def __init__(self, count: int, dim: int = 16, width: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TinyBlock(dim, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def peak_of_step(module: nn.Module, x: Tensor) -> int:
    """The peak of one forward and backward."""
    module.zero_grad()
    saved = SavedBytes(module)
    with saved.watch():
        module(x.clone().requires_grad_()).backward()
    torch.cuda.synchronize() if x.is_cuda else None
    return saved.peak
