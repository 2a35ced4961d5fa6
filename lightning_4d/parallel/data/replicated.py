"""Parameters that FSDP2 cannot shard, kept whole on every rank: 0-d ones, and ones of another dtype than their group.

Optimizers, clipping and checkpoints want one kind of parameter, so between steps each of them *is* a replicated
``DTensor`` like all others. During a step the module holds a plain parameter that shares the DTensor's memory, so the
user's arithmetic never mixes the two kinds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


@dataclass
class _Entry:
    distributed: nn.Parameter
    plain: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    def register(self, parameter: nn.Parameter) -> None:
        for module, name in self.owners:
            module._parameters[name] = parameter


class ReplicatedParameters:
    """The parameters of ``root`` in ``parameters``, replicated over ``mesh``.

    Args:
        root: module whose tree holds the parameters (a tied one may have several owners).
        parameters: the plain parameters to take over; each on its final device, equal on all ranks.
        mesh: the mesh of all data-parallel ranks, as FSDP uses it for the others (1-D or 2-D).
        group: the process group of all ranks of ``mesh``.
    """

    def __init__(
        self, root: nn.Module, parameters: Iterable[nn.Parameter], mesh: DeviceMesh, group: dist.ProcessGroup
    ) -> None:
        self._group = group
        entries = {parameter: self._make_entry(parameter, mesh) for parameter in parameters}
        for module in root.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter in entries:
                    entries[parameter].owners.append((module, name))
        self._entries = list(entries.values())
        self._gathered = True
        self.reshard()

    @staticmethod
    def _make_entry(parameter: nn.Parameter, mesh: DeviceMesh) -> _Entry:
        distributed = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return _Entry(nn.Parameter(distributed, requires_grad=parameter.requires_grad), parameter)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def plain(self) -> list[nn.Parameter]:
        """The parameters that steps use and that get the gradients."""
        return [entry.plain for entry in self._entries]

    def gather(self) -> None:
        """Let the module hold the plain parameters."""
        if self._gathered:
            return
        self._gathered = True
        self.mirror_requires_grad()
        for entry in self._entries:
            entry.register(entry.plain)

    def mirror_requires_grad(self) -> None:
        """Apply ``requires_grad`` of the distributed parameters, which optimizers see, to the plain ones in use."""
        for entry in self._entries:
            entry.plain.requires_grad_(entry.distributed.requires_grad)

    def reshard(self) -> None:
        """Let the module hold the distributed parameters, which share the plain ones' memory."""
        if not self._gathered:
            return
        self._gathered = False
        for entry in self._entries:
            _share_memory(entry)
            entry.register(entry.distributed)

    @property
    def has_unreduced_gradients(self) -> bool:
        """Whether a backward left gradients that :meth:`reduce_gradients` has not averaged yet."""
        return any(entry.plain.grad is not None for entry in self._entries)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Average the gradients over the data-parallel ranks and hand them to the distributed parameters.

        A parameter that no rank used keeps no gradient. Which ranks must call: all ranks of the mesh.
        """
        entries = [entry for entry in self._entries if entry.distributed.requires_grad]
        if not entries:
            return
        for dtype in {entry.plain.dtype for entry in entries}:
            self._reduce([entry for entry in entries if entry.plain.dtype == dtype])

    def _reduce(self, entries: list[_Entry]) -> None:
        first = entries[0].plain
        used = torch.tensor([entry.plain.grad is not None for entry in entries], dtype=first.dtype, device=first.device)
        gradients = [torch.zeros_like(e.plain) if e.plain.grad is None else e.plain.grad for e in entries]
        flat = torch.cat([used, *(gradient.reshape(-1) for gradient in gradients)])
        dist.all_reduce(flat, group=self._group)
        used, values = flat[: len(entries)], flat[len(entries) :] / dist.get_world_size(self._group)
        for entry, count, value in zip(
            entries, used.tolist(), values.split([g.numel() for g in gradients]), strict=True
        ):
            entry.plain.grad = None
            if count != 0:  # complex for complex parameters
                _accumulate(entry.distributed, value.reshape(entry.plain.shape))


def _share_memory(entry: _Entry) -> None:
    """Undo what ``module.to()`` or ``load_state_dict(assign=True)`` may have separated."""
    local = entry.distributed.to_local() if isinstance(entry.distributed, DTensor) else entry.distributed
    if local.data_ptr() != entry.plain.data_ptr():
        entry.plain.data = local.detach()


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    assert isinstance(parameter, DTensor)  # narrows the type: an nn.Parameter made of a DTensor is one
    distributed = DTensor.from_local(gradient, parameter.device_mesh, parameter.placements, run_check=False)
    parameter.grad = distributed if parameter.grad is None else parameter.grad + distributed
