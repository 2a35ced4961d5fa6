"""Where sequences are divided: at the entry of the blocks. And where they are whole again: at the end of a step.

A block that gets a whole sequence divides it; what it returns is divided, and so are the next blocks' inputs. FSDP
sends a block's inputs and outputs through autograd functions of its own, which must see plain tensors: so its hooks
stand between one pair of ours that takes the parts out and another that shows them as wholes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_4d._torch_private import tree_flatten, tree_unflatten
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.context.communication import Sharding, cut, gather
from lightning_4d.parallel.context.find import find_sequence
from lightning_4d.parallel.context.groups import ContextGroups
from lightning_4d.parallel.context.tensor import SequenceTensor, guard_autograd_functions, whole, wrap
from lightning_4d.parallel.hooks import Hook, nothing
from lightning_4d.parallel.sequence import named_sequence_dim

_T = TypeVar("_T")
_Signature = tuple[type[nn.Module], tuple[int, ...]]


_RESULT = "_lightning_4d_context_parallel"  # the attribute of the root that holds what `install` made of it


def divided(root: nn.Module) -> ContextParallel | None:
    """Return what is installed on ``root``, or None."""
    return getattr(root, _RESULT, None)


class ContextParallel:
    """The blocks of a module, taught to divide sequences.

    Args:
        root: the module that holds them.
        blocks: the repeated layers.
        groups: the ranks that share sequences.
        sequence_dim: of the blocks' first floating tensor; "auto" finds it by one run without data.
    """

    def __init__(
        self, root: nn.Module, blocks: Sequence[Block], groups: ContextGroups, sequence_dim: int | str = "auto"
    ) -> None:
        self.groups = groups
        self._blocks = blocks
        self._sequence_dim = sequence_dim
        self._found: dict[_Signature, tuple[int, int]] = {}
        self._taken: dict[nn.Module, list[list[Sharding | None]]] = {block.module: [] for block in blocks}
        guard_autograd_functions()
        _refuse(root, blocks)
        object.__setattr__(root, _RESULT, self)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return nothing, ()  # a copy of the root divides nothing

    def install_inside(self) -> None:
        """Register the hooks that stand between FSDP's and the block: before the blocks are sharded."""
        for block in self._blocks:
            module = block.module
            # Before those of activation checkpointing, which keep what the block gets.
            module.register_forward_pre_hook(Hook(self._give_inputs, block), prepend=True, with_kwargs=True)
            module.register_forward_hook(Hook(self._take_output, block))

    def install_outside(self) -> None:
        """Register the hooks that stand around FSDP's: after the blocks are sharded."""
        for block in self._blocks:
            block.module.register_forward_pre_hook(Hook(self._take_inputs, block), prepend=True, with_kwargs=True)
            block.module.register_forward_hook(Hook(self._give_output, block))

    def run(self, step: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Call ``step``, and return its result whole. Which ranks must call: all of the groups."""
        for taken in self._taken.values():
            taken.clear()  # of a step that raised between two hooks
        return whole(step(*args, **kwargs))

    def local_length(self, length: int) -> int:
        """How many positions of a sequence of ``length`` this rank holds."""
        return self.groups.layout(length).lengths[self.groups.rank]

    def part_of(self, tensor: Tensor, dim: int | None) -> Tensor:
        """Return this rank's part along ``dim`` of a tensor, whole or divided; the whole if None.

        Which ranks must call: all of the group.
        """
        is_divided = isinstance(tensor, SequenceTensor)
        if dim is None:
            return gather(tensor.part, tensor.sharding) if is_divided else tensor
        wanted = Sharding(dim, self.groups.layout(tensor.shape[dim]), self.groups)
        if is_divided:
            if tensor.sharding.dim == dim and tensor.sharding.same_positions(wanted):
                return tensor.part
            tensor = gather(tensor.part, tensor.sharding)
        return cut(tensor, wanted)

    def shown(self, part: Tensor, dim: int, length: int) -> SequenceTensor:
        """Return the tensor, of ``length`` positions in ``dim``, of which ``part`` is this rank's."""
        return wrap(part, Sharding(dim, self.groups.layout(length), self.groups))

    # ---------------------------------------------------------------------------------------------------------- hooks

    def _take_inputs(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._take(block, (args, kwargs))

    def _give_inputs(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (args, kwargs), was_divided = self._give(block, (args, kwargs))
        return (args, kwargs) if was_divided else self._divide(block, args, kwargs)

    def _take_output(self, block: Block, args: Any, output: Any) -> Any:
        return self._take(block, output)

    def _give_output(self, block: Block, args: Any, output: Any) -> Any:
        return self._give(block, output)[0]

    def _take(self, block: Block, value: Any) -> Any:
        """Put parts in the place of wholes, and remember of which."""
        leaves, structure = tree_flatten(value)
        shardings = [leaf.sharding if isinstance(leaf, SequenceTensor) else None for leaf in leaves]
        self._taken[block.module].append(shardings)
        if not any(shardings):
            return value  # containers stay the caller's own
        leaves = [leaf.part if isinstance(leaf, SequenceTensor) else leaf for leaf in leaves]
        return tree_unflatten(leaves, structure)

    def _give(self, block: Block, value: Any) -> tuple[Any, bool]:
        """Show the parts as wholes again; and whether there were any."""
        shardings = self._taken[block.module].pop()
        if not any(shardings):
            return value, False
        leaves, structure = tree_flatten(value)
        leaves = [
            leaf if sharding is None else wrap(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
        return tree_unflatten(leaves, structure), True

    def _divide(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Divide the sequence of a block that got it whole; a single position stays as it is."""
        leaves, structure = tree_flatten((args, kwargs))
        index, dim = self._sequence_of(block, args, kwargs, leaves)
        length = leaves[index].shape[dim]
        if length < 2:
            return None
        sharding = Sharding(dim, self.groups.layout(length), self.groups)
        leaves[index] = wrap(cut(leaves[index], sharding), sharding)
        return tree_unflatten(leaves, structure)

    def _sequence_of(
        self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> tuple[int, int]:
        if isinstance(self._sequence_dim, int):
            named = named_sequence_dim(leaves, self._sequence_dim)
            if named is not None:
                return named
        dims = tuple(leaf.dim() if isinstance(leaf, Tensor) else -1 for leaf in leaves)
        signature = (type(block.module), dims)
        if signature not in self._found:
            self._found[signature] = find_sequence(block.name, block.module, args, kwargs)
        return self._found[signature]


def _refuse(root: nn.Module, blocks: Sequence[Block]) -> None:
    if not blocks:
        raise UnsupportedError(
            explain(
                f"{type(root).__name__} with context_parallel_size > 1",
                "sequences are divided at the entry of repeated blocks in an nn.ModuleList or nn.Sequential, and there "
                "are none",
                "name the container by blocks='...', or leave context_parallel_size at 1",
            )
        )
