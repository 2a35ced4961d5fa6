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


class Buffers:
    """The buffers of ``root`` that training changes, kept equal over the data-parallel ranks."""

    def __init__(self, root: nn.Module, mesh: Mesh, device: torch.device) -> None:
        self._root = root
        self._mesh = mesh
        self._device = device
        # By content: batch normalisation changes its statistics without raising a tensor's version.
        self._initial = {name: _fingerprint(buffer) for name, buffer in root.named_buffers()}
        self._changing: list[str] = []
        self._settled = False  # the set of changing buffers has been agreed on once
        self._stale = False  # a synchronised training forward may have changed them since the last broadcast

    def before_training_step(self) -> None:
        """Make changed buffers equal. Which ranks must call: all data-parallel ranks."""
        if self._stale and self._changing:
            self._broadcast()
        self._stale = False

    def after_training_step(self, synchronised: bool) -> None:
        """Note a training forward; the first time, agree on which buffers change."""
        if not self._settled:
            self.agree()
        self._stale = synchronised

    def agree(self) -> None:
        """Agree on which buffers change, and make them equal, at a point that all ranks reach (epoch or evaluation)."""
        if not self._initial:
            self._settled = True
            return
        buffers = dict(self._root.named_buffers())
        changed = [n not in buffers or _fingerprint(buffers[n]) != before for n, before in self._initial.items()]
        changed = torch.tensor(changed, dtype=torch.uint8, device=self._device)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._mesh.data_parallel_group)
        self._changing = [n for n, c in zip(self._initial, changed.tolist(), strict=True) if c and n in buffers]
        self._settled = True

    def synchronize(self) -> None:
        """Agree and make equal, for example before an evaluation. Which ranks must call: all data-parallel ranks."""
        self.agree()
        if self._changing:
            self._broadcast()
        self._stale = False

    def _broadcast(self) -> None:
        buffers = dict(self._root.named_buffers())
        broadcast(
            [buffers[name] for name in self._changing], self._mesh.data_parallel_source, self._mesh.data_parallel_group
        )


def _fingerprint(buffer: Tensor) -> tuple[int, int]:
    """Two 64-bit sums over the bytes of ``buffer``, one of them weighted by position."""
    as_bytes = buffer.detach().reshape(-1).contiguous().view(torch.uint8).long()
    position = torch.arange(1, as_bytes.numel() + 1, device=as_bytes.device)
    return int(as_bytes.sum()), int((as_bytes * position).sum())
