"""Parameters in parts: DTensors for everyone who holds them, and what user code computes with inside a step.

Optimizers, clipping and checkpoints see a ``DTensor`` with the global shape. Inside a step, reading ``self.weight``
gives this rank's part as a `Sharded` tensor, or, where the parameter is whole, a plain tensor. That is done in the
module's dictionary of parameters, so modules keep their class, their forward and their hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_4d._torch_private import is_shared_gradient, strided_shard, strided_shard_parts
from lightning_4d.absent import is_absent
from lightning_4d.parallel.parts import mark_parameter
from lightning_4d.parallel.tensor.sharded import Runtime, Sharded


@dataclass(frozen=True)
class Split:
    """How a parameter is divided.

    Attributes:
        dim: the divided dim.
        parts: equal parts of that dim, each of which is divided by itself.
    """

    dim: int
    parts: int = 1

    def fits(self, shape: Iterable[int], size: int) -> bool:
        """Whether ``size`` ranks get equal shares."""
        return tuple(shape)[self.dim] % (self.parts * size) == 0

    @property
    def placement(self) -> Placement:
        """In the words of DTensor."""
        return Shard(self.dim) if self.parts == 1 else strided_shard(self.dim, self.parts)


class Activity:
    """Whether a step runs now, in any thread: backward of checkpointed code runs in threads of autograd."""

    def __init__(self, runtime: Runtime) -> None:
        self.depth = 0
        self._runtime = runtime

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self._runtime.newest_entered = None


class Views(dict[str, Any]):
    """A module's parameters by name; inside a step, reading one by name gives what to compute with.

    Iterating gives the parameters themselves, so ``module.parameters()`` is never affected.
    """

    def __init__(self, parameters: Mapping[str, Any], runtime: Runtime, activity: Activity, prefix: str) -> None:
        super().__init__(parameters)
        self.runtime = runtime
        self.activity = activity
        self.prefix = prefix

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if not self.activity.depth or not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
            return value  # on a mesh with the data axes it is not gathered now
        return view(value, self.runtime, self.prefix + name)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)  # a copy of the module has no strategy


def view(parameter: DTensor, runtime: Runtime, name: str) -> Tensor:
    """What user code computes with: this rank's part, or the whole."""
    split = split_of(parameter.placements[0])
    local = parameter.to_local()
    if local.requires_grad:
        local.register_hook(_own)
    made = local if split is None else Sharded(local, split.dim, split.parts, runtime, frozenset((name,)))
    return mark_parameter(made)


def _own(gradient: Tensor) -> Tensor | None:
    """Inside a DTensor, autograd takes a gradient for the parameter's own, and adds the next one to it in place."""
    return gradient.clone() if is_shared_gradient(gradient) else None


def split_of(placement: Placement) -> Split | None:
    """The inverse of `Split.placement`; None for a whole parameter."""
    parts = strided_shard_parts(placement)
    if parts is not None:
        return Split(placement.dim, parts)  # pyright: ignore[reportAttributeAccessIssue]
    return Split(placement.dim) if isinstance(placement, Shard) else None


class Distributor:
    """Replaces parameters by their parts, module by module, when their values are there.

    Args:
        root: the module whose parameters these are.
        splits: by parameter name; others stay whole.
        mesh: the tensor-parallel axis.
        runtime: for the views.
        activity: likewise.
    """

    def __init__(
        self, root: nn.Module, splits: Mapping[str, Split], mesh: DeviceMesh, runtime: Runtime, activity: Activity
    ) -> None:
        self._root = root
        self._mesh = mesh
        self._names = {module: name for name, module in root.named_modules()}
        self._runtime, self._activity = runtime, activity
        self._splits = self._by_owner(splits)
        self._done: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}  # by id; whole ones must go

    def _by_owner(self, splits: Mapping[str, Split]) -> dict[tuple[nn.Module, str], Split]:
        """The splits by module and name; a tied parameter has one wherever it is held."""
        owners = [(m, n, p) for m in self._root.modules() for n, p in m._parameters.items() if p is not None]
        by_parameter = {p: splits[name] for m, n, p in owners if (name := self._full_name(m, n)) in splits}
        return {(m, n): by_parameter[p] for m, n, p in owners if p in by_parameter}

    def _full_name(self, module: nn.Module, name: str) -> str:
        return f"{self._names[module]}.{name}" if self._names[module] else name

    @torch.no_grad()
    def __call__(self, modules: Iterable[nn.Module]) -> None:
        """Make what ``modules`` hold themselves equal on all ranks of the group, and keep this rank's parts.

        Which ranks must call: all ranks of the tensor-parallel group, with the same modules.
        """
        modules = list(modules)
        self._broadcast(modules)
        for module in modules:
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = self._distributed(module, name, parameter)
            if module._parameters and not isinstance(module._parameters, Views):
                prefix = f"{self._names[module]}." if self._names[module] else ""
                views = Views(module._parameters, self._runtime, self._activity, prefix)
                module.__dict__["_parameters"] = views

    def _broadcast(self, modules: Iterable[nn.Module]) -> None:
        """Values of the group's first rank, should the ranks have drawn different ones."""
        group = self._mesh.get_group()
        source = dist.get_process_group_ranks(group)[0]
        tensors: dict[Tensor, None] = {}
        for module in modules:
            own = (*module._parameters.values(), *module._buffers.values())
            tensors.update(dict.fromkeys(tensor for tensor in own if tensor is not None))
        for tensor in tensors:
            if isinstance(tensor, DTensor) or tensor.numel() == 0 or is_absent(tensor):
                continue
            data = tensor.detach().contiguous()
            dist.broadcast(data.view(-1).view(torch.uint8), source, group=group)
            tensor.detach().copy_(data)

    def _distributed(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if isinstance(parameter, DTensor) or is_absent(parameter):
            return parameter
        known, made = self._done.get(id(parameter), (None, None))
        if known is None or made is None or known() is not parameter:
            made = self._make(parameter, self._splits.get((module, name)))
            self._done[id(parameter)] = (weakref.ref(parameter), made)
            self._replace_tied(parameter, made)
        return made

    def _make(self, parameter: nn.Parameter, split: Split | None) -> nn.Parameter:
        local, placement = parameter.detach(), Replicate()
        if split is not None:
            local = self._runtime.group.cut(local, split.dim, split.parts).contiguous().clone()
            placement = split.placement
        distributed = DTensor.from_local(
            local, self._mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        made = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))  # users mark parameters: `weight.no_weight_decay = True`
        return made

    def _replace_tied(self, parameter: nn.Parameter, made: nn.Parameter) -> None:
        for module in self._root.modules():
            for name, held in list(module._parameters.items()):
                if held is parameter:
                    module._parameters[name] = made
