"""Run a block on fake tensors as one rank of a group would, without processes, and see what it communicates.

The rules that run real steps run here too, so what a plan costs is found, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_4d.parallel.tensor import rules  # noqa: F401  (registers the rules)
from lightning_4d.parallel.tensor.group import Communication, TensorGroup
from lightning_4d.parallel.tensor.parameters import Split
from lightning_4d.parallel.tensor.sharded import Runtime, Sharded, function_name, whole_values


@dataclass
class Simulation:
    """What one call of a block did.

    Attributes:
        communications: in order.
        gathered: of each whole tensor that had to be put together, or input that was not in parts: the function that
            needed it, and the parameters that it came from.
        error: what kept the block from running, or None.
    """

    communications: list[Communication] = field(default_factory=list)
    gathered: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    error: str | None = None

    def count(self, *, backward: bool) -> dict[str, int]:
        """Number of collectives by kind, in forward or in backward."""
        counts: dict[str, int] = {}
        for communication in self.communications:
            if communication.backward == backward:
                counts[communication.kind] = counts.get(communication.kind, 0) + 1
        return counts


def simulate(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    splits: Mapping[str, Split],
    size: int,
    *,
    sequence_parallel: bool = False,
) -> Simulation:
    """Call ``module`` with divided parameters, and its backward. All tensors must be fake, in one mode, entered now.

    Args:
        module: with whole fake parameters.
        args: for its call.
        kwargs: likewise.
        splits: by parameter name within the module.
        size: the number of ranks.
        sequence_parallel: as in `Runtime`; inputs of at least 3 dims are then in parts of the sequence.
    """
    result = Simulation()
    group = TensorGroup(None, size, 0)
    group.listener = result.communications.append
    runtime = Runtime(group, sequence_parallel=sequence_parallel)
    runtime.quiet = True
    runtime.on_gather = lambda function, value: result.gathered.append((function_name(function), value.origin))
    tensors = _parameters(module, splits, runtime)
    prepare = _input(runtime)
    try:
        with torch.enable_grad():
            output = functional_call(module, tensors, _mapped(prepare, args), _mapped(prepare, dict(kwargs)))
            _note_parts(output, result, sequence_parallel)
            total = _total(whole_values(output) if not sequence_parallel else output)
            if total is not None:
                total.backward()
    except Exception as error:  # user code that needs values, or a rule's refusal
        result.error = f"{type(error).__name__}: {error}"
    return result


def _parameters(module: nn.Module, splits: Mapping[str, Split], runtime: Runtime) -> dict[str, Tensor]:
    """What the module computes with, by name; a tied parameter is one tensor under all of its names."""
    held = dict(module.named_parameters(remove_duplicate=False))
    divided = {held[name]: (name, split) for name, split in splits.items() if name in held}
    made: dict[nn.Parameter, Tensor] = {}
    for parameter in held.values():
        if parameter not in made:
            made[parameter] = _parameter(parameter, divided.get(parameter), runtime)
    return {name: made[parameter] for name, parameter in held.items()}


def _parameter(parameter: nn.Parameter, divided: tuple[str, Split] | None, runtime: Runtime) -> Tensor:
    whole = parameter.detach().requires_grad_(parameter.requires_grad)
    if divided is None:
        return whole
    name, split = divided
    local = runtime.group.cut(whole, split.dim, split.parts)
    return Sharded(local, split.dim, split.parts, runtime, frozenset((name,)))


def _input(runtime: Runtime) -> Callable[[Tensor], Tensor]:
    """Inputs that need gradients, as a block inside a model gets them."""

    def prepare(tensor: Tensor) -> Tensor:
        if type(tensor) is Sharded or not tensor.is_floating_point():
            return tensor
        if tensor.requires_grad or tensor.dim() < 2:
            return tensor.detach().requires_grad_(tensor.requires_grad)
        return tensor

    def hidden(tensor: Tensor) -> Tensor:
        tensor = prepare(tensor)
        if not tensor.requires_grad or not runtime.sequence_parallel or tensor.dim() < 3:
            return tensor * 1 if tensor.requires_grad else tensor
        dim = tensor.dim() - 2
        if tensor.shape[dim] % runtime.group.size:
            return tensor * 1
        return Sharded(runtime.group.cut(tensor * 1, dim), dim, 1, runtime)

    return hidden


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(function, item) for item in value)
    if type(value) is dict:
        return {key: _mapped(function, item) for key, item in value.items()}
    return value


def _note_parts(output: Any, result: Simulation, sequence_parallel: bool) -> None:
    """A block's output in parts would be gathered by the next block."""
    for value in output if isinstance(output, (list, tuple)) else (output,):
        if type(value) is Sharded and not (sequence_parallel and value.split_dim == value.dim() - 2):
            result.gathered.append(("the block's output", value.origin))


def _total(output: Any) -> Tensor | None:
    values = output if isinstance(output, (list, tuple)) else (output,)
    local = [value.local if type(value) is Sharded else value for value in values if isinstance(value, Tensor)]
    sums = [value.sum() for value in local if value.requires_grad]
    return torch.stack(sums).sum() if sums else None
