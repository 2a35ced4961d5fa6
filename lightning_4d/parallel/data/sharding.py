"""Shard a module by FSDP2, and run a user's steps on it.

One mechanism for all sizes of the data axes: sharded (FSDP), sharded inside and replicated between groups of ranks
(HSDP), replicated only (shard = 1), and a single process, where nothing is wrapped at all. `DataParallel` is what a
trainer holds on to: it runs the steps, and keeps gradients and parameters consistent around them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_4d import _torch_private as private
from lightning_4d.absent import Released, is_absent
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.mesh import Mesh
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.data.buffers import Buffers
from lightning_4d.parallel.data.initialize import MetaInitialization, broadcast
from lightning_4d.parallel.data.low_precision import LowPrecisionGather
from lightning_4d.parallel.data.participation import Participation
from lightning_4d.parallel.data.placement import shard_placement
from lightning_4d.parallel.data.replicated import ReplicatedParameters

_T = TypeVar("_T")
_STEP = "_lightning_4d_step"  # the method on the root that FSDP treats as a forward
_RESULT = "_lightning_4d_data_parallel"  # the attribute of the root that holds what `shard` made of it


@dataclass(frozen=True)
class DataParallelOptions:
    """How to shard.

    Args:
        reshard_after_forward: free a block's gathered parameters after its forward and gather them again in backward.
            ``"auto"``: where that frees anything, that is when the shard size is above 1.
        compile_blocks: compile each block's ``forward`` by ``torch.compile``.
    """

    reshard_after_forward: bool | str = "auto"
    compile_blocks: bool = False


def sharded(root: nn.Module) -> DataParallel | None:
    """Return what an earlier :func:`shard` made of ``root``, or None."""
    return getattr(root, _RESULT, None)


def shard(
    root: nn.Module,
    blocks: Sequence[Block],
    mesh: Mesh,
    device: torch.device,
    options: DataParallelOptions,
    initialization: MetaInitialization,
    released: Released | None = None,
    distribute: Callable[[Iterable[nn.Module]], None] | None = None,
) -> DataParallel:
    """Move ``root`` to ``device``, equal on all ranks, and shard it over the data axes of ``mesh``, block by block.

    Values come from data-parallel rank 0, or from ``reset_parameters`` for what is on the meta device. Beyond its own
    shards, no rank holds more than one block and what lies outside the blocks on ``device``. Parameters change
    identity, names do not. What other pipeline ranks hold (``released``) is initialised and let go.
    ``distribute(modules)``, if given, is called when the values of what these modules hold themselves are final, and
    may replace parameters by DTensors on a mesh of other axes.

    Which ranks must call: all ranks of the data-parallel group, with the same module.

    Raises:
        UnsupportedError: the module cannot be initialised or sharded exactly, or a parameter has a gradient hook; names
            the parameters.
    """
    initialization.check(root)
    if mesh.parameter_size > 1 or distribute is not None:
        _refuse_hooks(root)
        _refuse_captured(root)
    names = {id(parameter): (weakref.ref(parameter), name) for name, parameter in root.named_parameters()}
    blocks = _independent(root, blocks)
    block_modules = {block.module for block in blocks}
    inside = {module for block in blocks for module in block.module.modules()}
    for module in root.modules():  # parents first: the order in which one process initialises
        if module in block_modules or module not in inside:
            modules = list(module.modules()) if module in block_modules else [module]
            initialization.materialize(modules, device)
            if released is not None:
                released.release(modules)
            _prepare(modules, mesh, device)
            if distribute is not None:
                distribute(modules)
    blocks = [block for block in blocks if not all(map(is_absent, block.module.parameters()))]
    if options.compile_blocks:
        for block in blocks:
            _compile_forward(block.module)
    result = DataParallel(root, mesh, device, names)
    if mesh.parameter_size > 1:
        result.wrap(blocks, options)
    object.__setattr__(root, _RESULT, result)
    return result


def _refuse_captured(root: nn.Module) -> None:
    """Refuse parameters that a module also holds in a plain attribute or list: those would stay the unsharded ones."""
    registered = set(root.parameters())
    for module in root.modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            held = list(value.values()) if isinstance(value, dict) else value
            held = held if isinstance(held, (list, tuple)) else [held]
            if any(isinstance(item, nn.Parameter) and item in registered for item in held):
                raise UnsupportedError(
                    explain(
                        f"the attribute {attribute!r} of {type(module).__name__} holds parameters that are registered",
                        "sharding replaces parameters, and those in other places would stay as they were",
                        "collect them where they are used, as in configure_optimizers(), or use nn.ParameterList",
                    )
                )


def _refuse_hooks(root: nn.Module) -> None:
    """Refuse gradient hooks on parameters: sharding replaces the parameters, and the hooks would never run."""
    for name, parameter in root.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(parameter, kind, None):
                raise UnsupportedError(
                    explain(
                        f"a gradient hook on the parameter {name!r}, registered before the strategy's set-up",
                        "sharding replaces parameters, and gradients exist whole only inside a reduction",
                        "change gradients in on_after_backward() or on_before_optimizer_step()",
                    )
                )


def _independent(root: nn.Module, blocks: Sequence[Block]) -> list[Block]:
    """Leave out blocks that share a parameter with another block only: no group of their own could hold it."""
    inside = {module for block in blocks for module in block.module.modules()}
    outside = {p for module in root.modules() if module not in inside for p in module.parameters(recurse=False)}
    owners = Counter(p for block in blocks for p in block.module.parameters() if p not in outside)
    return [block for block in blocks if all(owners[p] <= 1 for p in block.module.parameters())]


def _prepare(modules: Iterable[nn.Module], mesh: Mesh, device: torch.device) -> None:
    """Put what ``modules`` hold themselves on ``device``, contiguous, and equal to data-parallel rank 0's."""
    tensors: dict[Tensor, None] = {}
    for module in modules:
        tensors.update(dict.fromkeys(p for p in module.parameters(recurse=False) if not is_absent(p)))
        tensors.update(dict.fromkeys(module.buffers(recurse=False)))
    tensors = {tensor: None for tensor in tensors if not isinstance(tensor, DTensor)}  # tied, and distributed before
    for tensor in tensors:
        tensor.data = tensor.data.to(device).contiguous()
    if mesh.parameter_size > 1:
        broadcast(tensors, mesh.parameter_source, mesh.parameter_group)


def _present_parameters(root: nn.Module) -> list[Tensor]:
    """Return the parameters that this rank holds. For every step: ``root.parameters()`` takes milliseconds."""
    found: dict[int, Tensor] = {}  # by id: to hash a tensor calls Python
    seen: set[nn.Module] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            for parameter in module._parameters.values():
                if parameter is not None and not is_absent(parameter):
                    found[id(parameter)] = parameter
            waiting += [child for child in module._modules.values() if child is not None]
    return list(found.values())


def _compile_forward(module: nn.Module) -> None:
    if "forward" in vars(module):
        return  # compiled at an earlier set-up
    # Not `module.compile()`: that would take the hooks of FSDP and of checkpointing into the graph.
    module.forward = torch.compile(module.forward)


class DataParallel:
    """A module made data-parallel by :func:`shard`: runs its steps, and finishes gradients.

    With one data-parallel rank every method is a plain call or does nothing.

    Args:
        root: the module, prepared: on its device and equal on all ranks.
        mesh: the mesh of the job.
        device: the device of the parameters.
        original_names: each parameter as it was before it was sharded, and its name, by its ``id``.
    """

    def __init__(
        self,
        root: nn.Module,
        mesh: Mesh,
        device: torch.device,
        original_names: dict[int, tuple[weakref.ref[nn.Parameter], str]],
    ) -> None:
        self.root = root
        self.mesh = mesh
        self._original_names = original_names
        self.converted_to: str | None = None  # the precision that all parameters were converted to before sharding
        self.units: list[FSDPModule] = []  # blocks in order, the root last
        self._attributes: dict[str, dict[str, Any]] = {}  # of parameters that the user marked, by name
        self._device = device
        self._replicated: ReplicatedParameters | None = None
        self._participation: Participation | None = None
        self._buffers: Buffers | None = None
        self._low_precision: LowPrecisionGather | None = None
        self._in_training_step = False
        self._backward_pending = False  # between a training step and its backward
        self._depth = 0  # of steps
        self._calls = 0  # of modules that hold the root's parameters, running now
        self._synchronise = True
        self._manual = False
        self._gathers: list[FSDPModule] | None = None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        # A copy of the root is another module: it has not been sharded.
        return _nothing, ()

    # ------------------------------------------------------------------------------------------------------- set-up

    def wrap(self, blocks: Sequence[Block], options: DataParallelOptions) -> None:
        """Shard the blocks, then what is left, and hook into the places where gathered parameters are needed."""
        whole = _whole_parameters(self.root, blocks, self.mesh.shard_size)
        absent = {parameter for parameter in self.root.parameters() if is_absent(parameter)}
        self._attributes = {name: dict(vars(p)) for name, p in self.root.named_parameters() if vars(p)}
        inside = {module for block in blocks for module in block.module.modules()}
        outside = {m: list(m.parameters(recurse=False)) for m in self.root.modules() if m not in inside}
        shared = {p for parameters in outside.values() for p in parameters}
        for block in blocks:
            self._fully_shard(block.module, whole | shared | absent, options)
        owners = [module for module, parameters in outside.items() if parameters and module is not self.root]
        self._fully_shard(self.root, whole | absent, options)
        mesh, group = self.mesh.parameter_sharding, self.mesh.parameter_group
        self._replicated = ReplicatedParameters(self.root, whole, mesh, group)
        self._buffers = Buffers(self.root, self.mesh, self._device)
        self._hook_root([self.root, *owners])
        self._participation = Participation(self.units, group, self._device)

    def _fully_shard(self, module: nn.Module, ignored: set[nn.Parameter], options: DataParallelOptions) -> None:
        reshard = options.reshard_after_forward
        if reshard == "auto":
            reshard = self.mesh.shards_parameters
        fully_shard(
            module,
            mesh=self.mesh.parameter_sharding,
            # The root is needed from the start of the step to the end of its backward.
            reshard_after_forward=cast("bool", reshard) and module is not self.root,
            ignored_params=ignored,
            shard_placement_fn=lambda p: shard_placement(p, self.mesh.shard_size),
        )
        private.fsdp_restore_class_name(module)
        self.units.append(cast("FSDPModule", module))

    def _hook_root(self, owners: Sequence[nn.Module]) -> None:
        """Gather the root's group for a step, and for calls from outside one (a callback that samples)."""
        root = self._fsdp_root
        private.fsdp_detach_forward_hooks(root)
        private.fsdp_initialize(root)
        setattr(root, _STEP, self._call)
        register_fsdp_forward_method(self.root, _STEP)
        for module in owners:
            module.register_forward_pre_hook(self._before_use, prepend=True)
            module.register_forward_hook(self._after_use, always_call=True)
        for unit in self.units[:-1]:
            cast("nn.Module", unit).register_forward_pre_hook(self._note_gather, prepend=True)

    @property
    def _fsdp_root(self) -> FSDPModule:
        return self.units[-1]

    def gather_in(self, dtype: torch.dtype | None) -> None:
        """Gather weights in the dtype that autocast casts them to, where that changes no number; None: never."""
        if not self.units or dtype is None:
            self._gather_as_stored()
            self._low_precision = None
        elif self._low_precision is None:
            group = self.mesh.parameter_group
            self._low_precision = LowPrecisionGather(self.units, dtype, group, self._device)

    @property
    def gathers_in_low_precision(self) -> bool:
        """Whether training steps gather some weights in autocast's dtype: known after the first optimizer step."""
        return self._low_precision is not None and bool(self._low_precision.chosen_names)

    def _gather_as_stored(self) -> None:
        if self._low_precision is not None and not self._in_training_step and not self._backward_pending:
            self._low_precision.activate(False)

    # -------------------------------------------------------------------------------------------------------- steps

    def run(self, step: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Call ``step(*args, **kwargs)`` with the parameters outside the blocks gathered.

        Under ``torch.no_grad`` and manual optimization they are sharded again afterwards; else the backward does that.

        Which ranks must call: all data-parallel ranks, with steps that call the same blocks in the same order.

        Raises:
            UnsupportedError: the step used a sharded parameter outside its block's own call.
        """
        if not self.units or self._depth:
            return step(*args, **kwargs)
        assert self._replicated is not None
        self._gather_as_stored()
        self._depth += 1
        try:
            self._replicated.gather()
            with _mixed_tensors_named():
                output = getattr(self.root, _STEP)(step, *args, **kwargs)
        finally:
            self._depth -= 1
        if self._manual or not torch.is_grad_enabled():
            self.settle()
        return output

    def _call(self, step: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        output = step(*args, **kwargs)
        self._keep_changes()  # before FSDP shards the root again, as it does here after a manual backward
        return output

    def run_training_step(self, step: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Like :meth:`run`, and keep buffers that training changes equal over the ranks."""
        if self._buffers is None:
            return self.run(step, *args, **kwargs)
        self._buffers.before_training_step()
        with self._training_precision():
            output = self.run(step, *args, **kwargs)
        self._backward_pending = not self._manual
        self._buffers.after_training_step(self._synchronise)
        return output

    @contextlib.contextmanager
    def _training_precision(self) -> Iterator[None]:
        if self._low_precision is None:
            yield
            return
        self.settle()
        self._low_precision.activate(True)
        self._in_training_step = True
        try:
            with self._low_precision.observe():
                yield
        finally:
            self._in_training_step = False

    def synchronize_buffers(self) -> None:
        """Make changed buffers those of data-parallel rank 0. Which ranks must call: all of the data-parallel group."""
        if self._buffers is not None:
            self._buffers.synchronize()

    @contextlib.contextmanager
    def record_gathers(self) -> Iterator[list[FSDPModule]]:
        """Record which blocks gather their parameters, in order; see :meth:`replay_gathers`."""
        self._gathers = []
        try:
            yield self._gathers
        finally:
            self._gathers = None

    def replay_gathers(self, gathers: Sequence[FSDPModule]) -> None:
        """Take part in the gathering of one evaluation step of the other ranks, without running it.

        For a rank that has fewer batches than others. ``gathers`` is a record of a step of its own.
        """
        if not self.units:
            return
        reshard = self.mesh.shards_parameters
        self._fsdp_root.unshard()
        for unit in gathers:
            unit.unshard()
            if reshard:
                unit.reshard()
        self.settle()
        self.note_gathers(gathers)

    def note_gathers(self, gathers: Sequence[FSDPModule]) -> None:
        """Note which blocks an evaluation step gathered, for :meth:`compare_gathers`."""
        if self._participation is not None:
            self._participation.note_calls([self.units.index(unit) for unit in gathers])

    def compare_gathers(self) -> None:
        """Compare over the data-parallel ranks which blocks were gathered since the last comparison.

        Blocks of one shape that are gathered together by mistake would mix their weights without a word; in training,
        the backward is compared instead. Which ranks must call: all data-parallel ranks.

        Raises:
            UnsupportedError: ranks called different blocks, or in another order.
        """
        if self._participation is not None and self.mesh.shards_parameters:
            self._participation.compare_calls()

    def original_name(self, parameter: nn.Parameter) -> str | None:
        """Return the name that ``parameter`` had before the module was sharded, or None if it was not the module's."""
        reference, name = self._original_names.get(id(parameter), (None, None))
        # The id of a parameter that is gone may be another's now.
        return name if reference is not None and reference() is parameter else None

    # ----------------------------------------------------------------------------------------------------- gradients

    def begin_schedule(self) -> None:
        """Let backwards inside the step leave whole gradients on gathered parameters, which stay gathered."""
        for unit in self.units:
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
        if self.units:
            self._fsdp_root.set_is_last_backward(False)

    def end_schedule(self) -> None:
        """Let the backward that is running now reduce gradients and shard parameters again."""
        for unit in self.units:
            unit.set_requires_gradient_sync(self._synchronise, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
        if self.units:
            self._fsdp_root.set_is_last_backward(True)

    def gradient_leaves(self) -> list[Tensor]:
        """Return the tensors on which autograd leaves gradients: gathered parameters, or the parameters themselves."""
        if not self.units:
            return _present_parameters(self.root)
        assert self._replicated is not None
        return [*private.fsdp_gathered_parameters(self.units), *self._replicated.plain]

    def before_backward(self, loss: Tensor) -> None:
        """Let the backward of ``loss`` reduce the gradients of the root's group, wherever the loss was made."""
        if not self.units:
            return
        self._keep_changes()
        if loss.requires_grad:
            loss.register_hook(private.fsdp_pre_backward(self._fsdp_root))

    def after_backward(self) -> None:
        """Finish what a backward left. Which ranks must call: all data-parallel ranks, after each backward."""
        self._backward_pending = False
        if self._replicated is None or self._participation is None:
            return
        self._replicated.reshard()  # as FSDP's backward does with the other parameters
        if self._synchronise:
            self._replicated.reduce_gradients()
            self._participation.after_backward()

    @contextlib.contextmanager
    def no_gradient_sync(self) -> Iterator[None]:
        """Keep gradients local inside the context: the accumulation steps before the last one."""
        if not self.units:
            yield
            return
        self._set_synchronise(False)
        try:
            yield
        finally:
            self._set_synchronise(True)

    def _set_synchronise(self, synchronise: bool) -> None:
        self._synchronise = synchronise
        for unit in self.units:
            unit.set_requires_gradient_sync(synchronise, recurse=False)

    def reduce_manual_gradients(self) -> None:
        """Under manual optimization, reduce gradients of a backward that went past :meth:`before_backward`.

        That is a plain ``loss.backward()``. Under automatic optimization gradients that are not reduced are those of
        an accumulation in progress. Which ranks must call: all data-parallel ranks, before gradients are used.
        """
        if not self.units or not self._manual:
            return
        assert self._replicated is not None
        if private.fsdp_has_unreduced_gradients(self.units):
            private.fsdp_finish_backward(self._fsdp_root)
        if self._replicated.has_unreduced_gradients:
            self._replicated.reduce_gradients()

    def watch_optimizer(self, optimizer: Optimizer, *, manual: bool) -> None:
        """Keep gathered copies fresh after ``optimizer`` steps; under manual optimization also finish gradients."""
        if not self.units:
            return
        self._manual = manual
        if manual:
            optimizer.register_step_pre_hook(lambda *_: self._before_manual_step())
            self._clear_gradients_by_module()
        optimizer.register_step_post_hook(lambda *_: self._after_optimizer_step())

    def _before_manual_step(self) -> None:
        self._keep_changes()
        self.reduce_manual_gradients()

    def _keep_changes(self) -> None:
        """Keep what a step changed in place in gathered parameters outside the blocks."""
        private.fsdp_write_back(self._fsdp_root)

    def _clear_gradients_by_module(self) -> None:
        """Let ``zero_grad()`` of modules outside the blocks reach the parameters that are gathered just then."""
        inside = {m for unit in self.units[:-1] for m in cast("nn.Module", unit).modules()}
        for module in self.root.modules():
            if module not in inside and "zero_grad" not in vars(module):
                object.__setattr__(module, "zero_grad", self._zero_grad_of(module))

    def _zero_grad_of(self, module: nn.Module) -> Callable[..., None]:
        def zero_grad(set_to_none: bool = True) -> None:
            type(module).zero_grad(module, set_to_none)
            private.fsdp_clear_gradients(self._fsdp_root, set(module.modules()))

        return zero_grad

    def _after_optimizer_step(self) -> None:
        self.settle()
        if self._depth:  # manual optimization: the step goes on, and may use any parameter
            self._gather_root()
        elif self._low_precision is not None:
            self._low_precision.choose()

    def mirror_requires_grad(self) -> None:
        """Apply ``requires_grad`` of the parameters that optimizers see to the gathered ones in use."""
        private.fsdp_mirror_requires_grad(self.units)
        if self._replicated is not None:
            self._replicated.mirror_requires_grad()

    # ------------------------------------------------------------------------------------------------------ parameters

    def settle(self) -> None:
        """Let the module hold sharded parameters again, so that no gathered copy can be stale or written to."""
        for unit in self.units:
            if private.fsdp_is_gathered(unit):
                unit.reshard()
        if self._replicated is not None:
            self._replicated.reshard()
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        """Give sharded parameters the attributes of the user's, such as ``weight.no_weight_decay = True``.

        Not once for all: ``module.to()`` swaps DTensors with all that they have.
        """
        for name, attributes in self._attributes.items():
            vars(self.root.get_parameter(name)).update(attributes)

    def recover(self) -> None:
        """Bring FSDP back to idle after a step that raised."""
        self._depth = self._calls = 0
        self._in_training_step = self._backward_pending = False
        if self.units:
            self._set_synchronise(True)
            private.fsdp_reset(self._fsdp_root)
            self.settle()

    def _gather_root(self) -> None:
        assert self._replicated is not None
        if self._depth == 0:
            self._gather_as_stored()
        if not private.fsdp_is_gathered(self._fsdp_root):
            self._fsdp_root.unshard()
        self._replicated.gather()

    def _before_use(self, module: nn.Module, args: Any) -> None:
        self._calls += 1
        self._gather_root()

    def _after_use(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls -= 1
        if self._calls == self._depth == 0 and not torch.is_grad_enabled():
            self.settle()

    def _note_gather(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0:
            self._gather_as_stored()
        if self._gathers is not None:
            self._gathers.append(cast("FSDPModule", module))


def _nothing() -> None:
    return None


def _whole_parameters(root: nn.Module, blocks: Sequence[Block], shard_size: int) -> set[nn.Parameter]:
    """Parameters that FSDP2 cannot put into their group.

    0-d, of another dtype than most of the group, or divided over another axis so that no dim is left to shard.
    """
    remaining = dict.fromkeys(parameter for parameter in root.parameters() if not is_absent(parameter))
    whole: set[nn.Parameter] = set()
    for module in (*(block.module for block in blocks), root):
        group = [p for p in module.parameters() if p in remaining]
        sizes: Counter[torch.dtype] = Counter()
        for parameter in group:
            del remaining[parameter]
            if parameter.requires_grad:
                sizes[parameter.dtype] += parameter.numel()
        dtype = sizes.most_common(1)[0][0] if sizes else None
        whole.update(p for p in group if p.ndim == 0 or (p.requires_grad and p.dtype != dtype))
        whole.update(p for p in group if p.ndim > 0 and shard_placement(p, shard_size) is None)
    return whole


@contextlib.contextmanager
def _mixed_tensors_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise UnsupportedError(
            explain(
                "the step used a parameter of a block without calling the block itself",
                "a block's parameters are gathered only while its own forward runs",
                "call the block as a module, or give blocks= the container whose layers are called",
            )
        ) from error
