"""Gradient norms and clipping over every mesh axis.

A gradient may be plain, or a DTensor on any mesh, sharded over some axes and replicated over others. Each element of
the global gradient counts once, whatever the layout, so the norm equals that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from lightning_4d._torch_private import clamp_all, multiply_all
from lightning_4d.errors import UnsupportedError, explain

_Groups = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class Elsewhere:
    """What ranks of other pipeline stages hold of one gradient vector.

    Args:
        group: the process group of the pipeline ranks.
        counted: parameters on this rank that another of them holds as well, and counts.
    """

    group: dist.ProcessGroup
    counted: AbstractSet[nn.Parameter | Tensor] = frozenset()


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[nn.Parameter | Tensor], norm_type: float = 2.0, elsewhere: Elsewhere | None = None
) -> Tensor:
    """Return the norm of all gradients of ``parameters`` taken as one vector: a 0-d plain tensor, equal on all ranks.

    Args:
        parameters: those without a gradient are skipped.
        norm_type: any p > 0, or ``math.inf``.
        elsewhere: what other pipeline stages hold; their part is included.

    Which ranks must call: all ranks that share the parameters, with the same parameters in the same order.
    """
    norm_type = _checked(norm_type)
    if elsewhere is not None:
        return _norm_with(elsewhere, [p for p in parameters if p not in elsewhere.counted], norm_type)
    by_groups: dict[_Groups, list[Tensor]] = {}
    for gradient in _gradients(parameters):
        local, groups = _local_part(gradient)
        by_groups.setdefault(groups, []).append(local)
    parts = [_reduced(_norm_of(local, norm_type), groups, norm_type) for groups, local in by_groups.items()]
    return _norm_of(parts, norm_type) if parts else torch.zeros(())


def _norm_with(elsewhere: Elsewhere, parameters: Sequence[nn.Parameter | Tensor], norm_type: float) -> Tensor:
    own = gradient_norm(parameters, norm_type)
    gradients = _gradients(parameters)
    device = gradients[0].device if gradients else next((p.device for p in parameters), torch.device("cpu"))
    # A rank may hold no gradient at all; what travels has one dtype on all of them.
    whole = _reduced(own.to(device=device, dtype=torch.float64), (elsewhere.group,), norm_type)
    return whole.to(own.dtype) if gradients else whole.float()


@torch.no_grad()
def clip_gradients_by_norm(
    parameters: Iterable[nn.Parameter | Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    elsewhere: Elsewhere | None = None,
) -> Tensor:
    """Scale the gradients in place so that their common norm is at most ``max_norm``; return the norm before.

    The same rule as ``torch.nn.utils.clip_grad_norm_``, over every layout and over mixed plain and distributed
    parameters. Which ranks must call: all ranks that share the parameters.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, norm_type, elsewhere)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for local in _by_device_and_dtype(_locals(parameters)):
        multiply_all(local, scale.to(local[0].device))
    return norm


@torch.no_grad()
def clip_gradients_by_value(parameters: Iterable[nn.Parameter | Tensor], clip_value: float) -> None:
    """Clamp each element of the gradients to [-clip_value, clip_value], in place. Purely local."""
    for local in _by_device_and_dtype(_locals(parameters)):
        clamp_all(local, float(clip_value))


def gradient_norms(module: nn.Module, norm_type: float = 2.0, group_separator: str = "/") -> dict[str, float]:
    """Return the norm of each parameter's gradient and of all together, by name.

    Stands in for ``lightning.pytorch.utilities.grad_norm``, which cannot read sharded gradients; same keys.

    Which ranks must call: all ranks that share the parameters.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.grad is not None]
    kind = f"grad_{float(norm_type)}_norm"
    norms = {f"{kind}{group_separator}{name}": float(gradient_norm([p], norm_type)) for name, p in named}
    if norms:
        norms[f"{kind}_total"] = float(gradient_norm([p for _, p in named], norm_type))
    return norms


def _checked(norm_type: float) -> float:
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise UnsupportedError(
            explain(f"norm_type={norm_type}", "a gradient norm needs p > 0, or infinity", "use norm_type=2.0")
        )
    return norm_type


def _gradients(parameters: Iterable[nn.Parameter | Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _locals(parameters: Iterable[nn.Parameter | Tensor]) -> list[Tensor]:
    gradients = _gradients(parameters)
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


def _local_part(gradient: Tensor) -> tuple[Tensor, _Groups]:
    """Return this rank's part, and the groups over which the parts together are the gradient, each element once."""
    if not isinstance(gradient, DTensor):
        return gradient, ()
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise UnsupportedError(
            explain(
                f"a gradient with placements {gradient.placements}",
                "a norm needs reduced gradients",
                "finish the backward before clipping",
            )
        )
    mesh = gradient.device_mesh
    sharded = tuple(mesh.get_group(i) for i, p in enumerate(gradient.placements) if p.is_shard())
    return gradient.to_local(), sharded


def _norm_of(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    tensors = [tensor for tensor in tensors if tensor.numel() > 0] or [torch.zeros((), dtype=tensors[0].dtype)]
    return torch.nn.utils.get_total_norm(tensors, norm_type)


def _reduced(norm: Tensor, groups: _Groups, norm_type: float) -> Tensor:
    if not groups:
        return norm
    if math.isinf(norm_type):
        for group in groups:
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    power = norm.pow(norm_type)
    for group in groups:
        dist.all_reduce(power, group=group)
    return power.pow(1.0 / norm_type)


def _by_device_and_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
