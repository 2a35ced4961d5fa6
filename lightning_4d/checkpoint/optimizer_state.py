"""Optimizer states by parameter name, whatever the layout.

Names instead of positions make a state independent of the order and sharding of parameters; only states that exist are
written and read, so a parameter that never got a gradient has none and needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_4d.errors import CheckpointError, explain

Names = Mapping[nn.Parameter, str]


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the name of each parameter of ``module``; a tied one has its first name."""
    return {parameter: name for name, parameter in module.named_parameters()}


def named_optimizer_state(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """Return ``{"state": {name: {key: value}}, "param_groups": [{"params": [name], ...}]}``, tensors as they are.

    Raises:
        CheckpointError: a parameter without a name, or a state that is neither sharded like its parameter nor a scalar.
    """
    groups = [
        {**group, "params": [_name(parameter, names) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {
        _name(parameter, names): _checked(values, parameter, names)
        for parameter, values in optimizer.state.items()
        if isinstance(parameter, nn.Parameter)
    }
    return {"state": state, "param_groups": groups}


def gathered_optimizer_state(optimizer: Optimizer, names: Names, *, keep: bool) -> dict[str, Any]:
    """Return an ordinary ``optimizer.state_dict()`` with whole tensors on the CPU; empty where ``keep`` is false.

    Which ranks must call: all ranks that share the parameters.
    """
    named = named_optimizer_state(optimizer, names)
    state = {
        name: {key: gathered(value, keep=keep) for key, value in values.items()}
        for name, values in named["state"].items()
    }
    return positional({"state": state, "param_groups": named["param_groups"]}) if keep else {}


def positional(named: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a state by name into torch's ordinary form, by position in the parameter groups."""
    order: dict[str, int] = {}
    for group in named["param_groups"]:
        for name in group["params"]:
            order.setdefault(name, len(order))
    groups = [{**group, "params": [order[name] for name in group["params"]]} for group in named["param_groups"]]
    state = {order[name]: values for name, values in named.get("state", {}).items() if name in order}
    return {"state": state, "param_groups": groups}


def gathered(value: Any, *, keep: bool) -> Any:
    """Return a whole CPU copy of a tensor, or of all tensors in dicts, lists and tuples; other values unchanged.

    Where ``keep`` is false, None stands for tensors: this rank only takes part.

    Which ranks must call: all ranks of the distributed tensors' meshes.
    """
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.detach().cpu() if keep else None
    return _map_items(value, lambda item: gathered(item, keep=keep))


def without_distributed_tensors(value: Any) -> Any:
    """Replace each DTensor in nested dicts, lists and tuples by the whole tensor, on the CPU; the rest as it is.

    For states outside the model and the optimizers, such as an averaged copy that a callback keeps.

    Which ranks must call: all ranks of the distributed tensors' meshes.
    """
    if isinstance(value, DTensor):
        return value.full_tensor().detach().cpu()
    return _map_items(value, without_distributed_tensors)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def _map_items(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to the items of a plain container that holds tensors; return anything else itself."""
    if type(value) not in (dict, list, tuple) or not any(True for _ in tensors_in(value)):
        return value
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    return type(value)(function(item) for item in value)


def like(value: Any, parameter: Tensor) -> Any:
    """Distribute a whole tensor as ``parameter`` is, if it has the parameter's shape. No communication."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    whole = value.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def load_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any], names: Names) -> None:
    """Load a state by name or by position (see :func:`positional`) whose tensors are already distributed.

    Raises:
        CheckpointError: the parameter groups do not match.
    """
    current = [[_name(parameter, names) for parameter in group["params"]] for group in optimizer.param_groups]
    groups = by_name(saved, current)["param_groups"]
    _check_groups(current, [group["params"] for group in groups])
    state = by_name(saved, current)["state"]
    order = [name for group in current for name in group]
    hyper_parameters = [dict(group) for group in groups]
    positions = iter(range(len(order)))
    for group, present in zip(hyper_parameters, current, strict=True):
        group["params"] = [next(positions) for _ in present]
    by_position = {index: state[name] for index, name in enumerate(order) if name in state}
    optimizer.load_state_dict({"state": by_position, "param_groups": hyper_parameters})


def by_name(saved: Mapping[str, Any], current: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """Return ``saved`` keyed by name; positions take the names that ``current`` parameter groups have there."""
    groups = saved["param_groups"]
    if all(isinstance(p, str) for group in groups for p in group["params"]):
        return saved
    positions = [p for group in groups for p in group["params"]]
    order = [name for group in current for name in group]
    if len(positions) != len(order):
        raise CheckpointError(
            explain(
                f"an optimizer state of {len(positions)} parameters for an optimizer with {len(order)}",
                "a state stored by position needs the same parameters in the same order",
                "build the optimizer as it was when the checkpoint was written",
            )
        )
    translate = dict(zip(positions, order, strict=True))
    return {
        "state": {translate[position]: values for position, values in saved["state"].items()},
        "param_groups": [{**group, "params": [translate[p] for p in group["params"]]} for group in groups],
    }


def _check_groups(current: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> None:
    if [sorted(group) for group in current] == [sorted(group) for group in saved]:
        return
    here = {name for group in current for name in group}
    there = {name for group in saved for name in group}
    difference = sorted(here ^ there)[:5]
    what = f"they differ in {difference}" if difference else "the same parameters are grouped otherwise"
    raise CheckpointError(
        explain(
            f"optimizer parameter groups of {[len(g) for g in saved]} parameters in the checkpoint and "
            f"{[len(g) for g in current]} here; {what}",
            "an optimizer resumes with the groups it was saved with",
            "build the same groups, or load the weights only",
        )
    )


def _name(parameter: nn.Parameter, names: Names) -> str:
    if parameter not in names:
        raise CheckpointError(
            explain(
                f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that the module does not",
                "states are stored by parameter name",
                "build optimizers in configure_optimizers() from self.parameters()",
            )
        )
    return names[parameter]


def _checked(values: Mapping[str, Any], parameter: nn.Parameter, names: Names) -> dict[str, Any]:
    for key, value in values.items():
        plain = [t for t in tensors_in(value) if not isinstance(t, DTensor) and t.numel() > 1]
        if isinstance(parameter, DTensor) and plain:
            raise CheckpointError(
                explain(
                    f"state {key!r} of {names[parameter]!r} holds a plain tensor of shape {tuple(plain[0].shape)}",
                    "a state of a sharded parameter must be a DTensor or a scalar, or ranks would overwrite each other",
                    "use an optimizer that keeps its state by torch.zeros_like(parameter)",
                )
            )
    return dict(values)


def empty_state(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised state of global shape ``size``, distributed as ``parameter`` where it has its shape."""
    if isinstance(parameter, DTensor) and size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(size, dtype=dtype, device=parameter.device if size == parameter.shape else "cpu")
