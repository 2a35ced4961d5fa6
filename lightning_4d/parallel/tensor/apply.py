"""`TensorParallel`: what a strategy holds on to of a module whose layers are divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.hooks import Hook, nothing
from lightning_4d.parallel.tensor import rules  # noqa: F401  (registers the rules)
from lightning_4d.parallel.tensor.boundary import Boundaries
from lightning_4d.parallel.tensor.group import TensorGroup, cut
from lightning_4d.parallel.tensor.parameters import Activity, Distributor
from lightning_4d.parallel.tensor.plan import TensorPlan
from lightning_4d.parallel.tensor.sharded import Runtime, Sharded, whole_values

_T = TypeVar("_T")
_RESULT = "_lightning_4d_tensor_parallel"  # the attribute of the root that holds what was made of it


class TensorParallel:
    """A module divided by a plan: distributes its parameters, and makes its steps see the parts.

    Args:
        root: the module.
        plan: which parameters are divided.
        mesh: the tensor-parallel axis, 1-D.
        blocks: the repeated layers.
        sequence_parallel: keep the residual stream in parts of the sequence.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: TensorPlan,
        mesh: DeviceMesh,
        blocks: Sequence[Block] = (),
        *,
        sequence_parallel: bool = False,
    ) -> None:
        self.root = root
        self.plan = plan
        self._blocks = blocks
        group = TensorGroup(mesh.get_group(), mesh.size(), mesh.get_local_rank())
        self.runtime = Runtime(group, sequence_parallel=sequence_parallel)
        self.activity = Activity(self.runtime)
        self._distribute = Distributor(root, plan.splits(root), mesh, self.runtime, self.activity)
        self._hook(root, blocks)
        object.__setattr__(root, _RESULT, self)

    def distribute(self, modules: Iterable[nn.Module]) -> None:
        """Keep this rank's parts of what ``modules`` hold themselves; their values must be final.

        Which ranks must call: all ranks of the tensor-parallel group, with the same modules.
        """
        self._distribute(modules)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return nothing, ()  # a copy of the root divides nothing

    def boundaries(self) -> Boundaries:
        """Return what lets parts of tensors cross the hooks that FSDP2 puts on the blocks."""
        return Boundaries(block.module for block in self._blocks)

    def part_of(self, tensor: Tensor, dim: int | None) -> Tensor:
        """Return this rank's part along ``dim`` of a tensor, whole or divided; the whole if None.

        Which ranks must call: all of the group.
        """
        if isinstance(tensor, Sharded):
            if dim is not None and tensor.split_dim == dim and tensor.parts == 1:
                return tensor.local
            tensor = tensor.gathered("it leaves a pipeline stage")
        return tensor if dim is None else cut(tensor, dim, 1, self.runtime.group, "it leaves a pipeline stage")

    def shown(self, part: Tensor, dim: int) -> Sharded:
        """Return the tensor of which ``part`` is this rank's along ``dim``."""
        return Sharded(part, dim, 1, self.runtime)

    def step(self, function: Callable[..., _T]) -> Callable[..., _T]:
        """Return ``function`` to be called as a step: its code reads parts, and what it returns is whole."""

        def run(*args: Any, **kwargs: Any) -> _T:
            with self.activity:
                return whole_values(function(*args, **kwargs))

        return run

    def backward(self) -> AbstractContextManager[None]:
        """A context for backward, in which checkpointed code runs again."""
        return self.activity

    def _hook(self, root: nn.Module, blocks: Sequence[Block]) -> None:
        """Let calls of the module from outside a step (a callback that samples) see parts too."""
        block_modules = {block.module for block in blocks}
        inside = {module for block in blocks for module in block.module.modules()} - block_modules
        for module in root.modules():
            if module not in inside:
                module.register_forward_pre_hook(Hook(self._enter), prepend=True)
                module.register_forward_hook(Hook(self._leave), always_call=True)

    def _enter(self, args: Any) -> None:
        self.activity.__enter__()

    def _leave(self, args: Any, output: Any) -> Any:
        self.activity.__exit__()
        if self.activity.depth == 0:
            whole = whole_values(output)
            return whole if whole is not output else None
        return None


def applied(root: nn.Module) -> TensorParallel | None:
    """Return what an earlier `TensorParallel` made of ``root``, or None."""
    return getattr(root, _RESULT, None)
