"""One rule for buffers under every data layout: as in DDP, data-parallel rank 0's values count.

Buffers that training changes (running statistics) are sent from rank 0 before each training forward that follows a
synchronised one, and before evaluation. Constant ones (rotary tables, masks) are never sent again after set-up.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_4d.mesh import Mesh
from lightning_4d.parallel.data.initialize import broadcast

_CHUNK = 2**20  # bytes


class Buffers:
    """The buffers of ``root`` that training changes, kept equal over the data-parallel ranks."""

    def __init__(self, root: nn.Module, mesh: Mesh, device: torch.device) -> None:
        self._root = root
        self._mesh = mesh
        self._device = device
        # By content: batch normalisation changes its statistics without raising a tensor's version.
        self._initial = {name: fingerprint(buffer) for name, buffer in root.named_buffers()}
        self._changing: list[str] = []
        self._has_trained = False  # since then it is known which buffers a training step changes
        self._stale = False  # a synchronised training forward may have changed them since the last broadcast

    def before_training_step(self) -> None:
        """Make changed buffers equal. Which ranks must call: all data-parallel ranks."""
        if self._stale and self._changing:
            self._broadcast()
        self._stale = False

    def after_training_step(self, synchronised: bool) -> None:
        """Note a training forward; the first time, agree on which buffers change."""
        if not self._has_trained:
            self.agree()
            self._has_trained = True
        self._stale = synchronised

    def agree(self) -> None:
        """Agree on which buffers change, at a point that all ranks reach. Which ranks must call: all of them."""
        if not self._initial:
            return
        buffers = dict(self._root.named_buffers())
        changed = [n in self._changing or self._has_changed(n, buffers) for n in self._initial]
        changed = torch.tensor(changed, dtype=torch.uint8, device=self._device)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._mesh.parameter_group)
        self._changing = [n for n, c in zip(self._initial, changed.tolist(), strict=True) if c and n in buffers]

    def _has_changed(self, name: str, buffers: dict[str, Tensor]) -> bool:
        return name not in buffers or fingerprint(buffers[name]) != self._initial[name]

    def synchronize(self) -> None:
        """Agree and make equal, for example before an evaluation. Which ranks must call: all data-parallel ranks."""
        self.agree()
        if self._changing:
            self._broadcast()
        self._stale = False

    def _broadcast(self) -> None:
        buffers = dict(self._root.named_buffers())
        broadcast([buffers[name] for name in self._changing], self._mesh.parameter_source, self._mesh.parameter_group)


def fingerprint(buffer: Tensor) -> tuple[int, int]:
    """Two 64-bit sums over the bytes of ``buffer``, one of them weighted by position."""
    as_bytes = buffer.detach().reshape(-1).contiguous().view(torch.uint8)
    plain, weighted = torch.zeros((2,), dtype=torch.int64, device=buffer.device)
    for start in range(0, as_bytes.numel(), _CHUNK):  # as 64-bit numbers a chunk takes eight times its bytes
        chunk = as_bytes[start : start + _CHUNK].long()
        plain = plain + chunk.sum()
        weighted = weighted + (chunk * torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)).sum()
    return int(plain), int(weighted)
