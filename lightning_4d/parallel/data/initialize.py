"""Give every rank the same initial parameters, one block at a time.

A model built on the meta device is materialised here, and a model built for real is made equal to the one of
data-parallel rank 0, as ``DistributedDataParallel`` does, before it is sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_4d._torch_private import observe_meta_initialization
from lightning_4d.errors import UnsupportedError, explain


class MetaInitialization:
    """What the building of a model on the meta device did, and how to repeat it for real.

    Modules are materialised by calling their ``reset_parameters``. What other code initialised on the meta device is
    lost, and is refused by name.
    """

    def __init__(self) -> None:
        self._lost: dict[nn.Parameter, None] = {}
        self._initializer: dict[nn.Parameter, nn.Module] = {}
        self._real: dict[nn.Parameter, nn.Parameter] = {}

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Watch the model being built."""
        with observe_meta_initialization(self._note):
            yield

    def _note(self, parameter: nn.Parameter, module: nn.Module | None) -> None:
        if module is None:
            self._lost[parameter] = None
        else:
            self._initializer[parameter] = module

    def check(self, root: nn.Module) -> None:
        """Raise when ``root``, now built, holds meta parameters whose initialisation cannot be repeated.

        Raises:
            UnsupportedError: names the parameters.
        """
        names = [name for name, parameter in root.named_parameters() if parameter.is_meta and parameter in self._lost]
        modules = set(root.modules())
        self._initializer = {p: module for p, module in self._initializer.items() if module in modules}
        self._lost.clear()
        if names:
            raise UnsupportedError(
                explain(
                    f"{_some(names)} were initialised by custom code while on the meta device",
                    "a meta tensor holds no values: only what a module's reset_parameters() does can be repeated when "
                    "the model is materialised",
                    "move that initialisation into reset_parameters() of the modules, or build the model without "
                    "torch.device('meta')",
                )
            )

    def materialize(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        """Allocate the meta parameters and buffers that ``modules`` (not their children) hold, and initialise them.

        Each module that holds any calls its ``reset_parameters`` in the order given, drawing from the global random
        number generator, so equal seeds give equal values on every rank and under every layout. A tied parameter stays
        one parameter, with the values of the module that first made it.

        Raises:
            UnsupportedError: a module has meta tensors, but no ``reset_parameters``.
        """
        for module in modules:
            own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
            if any(tensor.is_meta for tensor in own):
                self._materialize(module, device)

    def real(self, parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
        """Return ``parameters`` with each materialised meta parameter replaced by what it became."""
        return {self._real.get(parameter, parameter) for parameter in parameters}

    def _materialize(self, module: nn.Module, device: torch.device) -> None:
        tied = self._allocate(module, device)
        _reset_function(module)()
        for name, parameter in tied.items():
            module._parameters[name] = parameter

    def _allocate(self, module: nn.Module, device: torch.device) -> dict[str, nn.Parameter]:
        """Return the parameters that another module initialises; a stand-in takes their place meanwhile."""
        tied = {}
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in self._real:
                self._real[parameter] = _empty(parameter, device)
            module._parameters[name] = self._real[parameter]
            if self._initializer.get(parameter, module) is not module:
                tied[name] = self._real[parameter]
                module._parameters[name] = _empty(parameter, device)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        return tied


def _empty(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    empty = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    vars(empty).update(vars(parameter))  # users mark parameters: `weight.no_weight_decay = True`
    return empty


def _reset_function(module: nn.Module) -> Callable[[], None]:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        cls = type(module).__name__
        raise UnsupportedError(
            explain(
                f"{cls} has parameters or buffers on the meta device, but no reset_parameters()",
                "a module built on the meta device is materialised by calling its reset_parameters()",
                f"define {cls}.reset_parameters(), or build the model without torch.device('meta')",
            )
        )
    return reset


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Overwrite ``tensors`` by those of global rank ``source``, in one message.

    Which ranks must call: all ranks of ``group``, with equal shapes and order.
    """
    tensors = list(tensors)
    if not tensors:
        return
    # As bytes, because not every backend broadcasts every dtype (bool, complex).
    views = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    flat = torch.cat(views)
    dist.broadcast(flat, source, group=group)
    for tensor, values in zip(tensors, flat.split([view.numel() for view in views]), strict=True):
        aligned = values.clone()  # after a bf16 tensor of odd size, an int64 one starts where it cannot be viewed
        tensor.detach().copy_(aligned.view(tensor.dtype).view(tensor.shape))


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more
