"""The one file that touches private names of torch: each with the version it was read in and the reason.

Everything else in the package uses public interfaces only, so that an upgrade of torch is checked here first.
Read in torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# Nested containers of any registered class (dicts, outputs of models): documented, but spelled private up to 2.13.
from torch.utils import _pytree as pytree  # noqa: F401
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten  # noqa: F401

# ----------------------------------------------------------------------------------------------------------------------
# torch.distributed.fsdp (FSDP2)
# ----------------------------------------------------------------------------------------------------------------------


def fsdp_initialize(root: FSDPModule) -> None:
    """Fix which module is the FSDP root now, instead of at the first forward.

    Reason: FSDP2 takes the first module that happens to run as the root (``FSDPState._lazy_init``). A callback that
    calls a submodule before the first step would make that submodule the root and break every later step.
    """
    root._get_fsdp_state()._lazy_init()  # pyright: ignore[reportPrivateUsage]


def fsdp_detach_forward_hooks(module: FSDPModule) -> None:
    """Remove the forward hooks that ``fully_shard`` put on ``module``.

    Reason: the root's group is gathered for a whole step (``register_fsdp_forward_method``). Its hooks on ``forward``
    would run once more inside the step, and record the root twice in the prefetch order.
    """
    state = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def fsdp_pre_backward(root: FSDPModule) -> Callable[[Tensor], Tensor]:
    """Return the root's pre-backward hook, to be registered on a loss.

    Reason: a loss that never left the step (manual optimization calls backward inside it) carries no hook of the
    root, so the root's gradients would never be reduced.
    """
    return root._get_fsdp_state()._pre_backward  # pyright: ignore[reportPrivateUsage]


def fsdp_finish_backward(root: FSDPModule) -> None:
    """Reduce gradients that a backward without the root's hook left on gathered parameters.

    Which ranks: all ranks of the data-parallel mesh, if any of them has such gradients.
    """
    with torch.no_grad():  # as inside a backward that builds no graph
        root._get_fsdp_state()._root_post_backward_final_callback()  # pyright: ignore[reportPrivateUsage]


def fsdp_begin_backward(module: FSDPModule) -> None:
    """Do now what FSDP does when a gradient first reaches ``module``: gather its parameters. Once per backward.

    Reason: activation checkpointing calls a module again before gradients reach it. Without this, FSDP would take that
    call for a forward, reshard after it (torch 2.11), and gather once more for the backward.
    """
    state = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    if state._training_state.name != "PRE_BACKWARD":
        state._pre_backward(None)  # pyright: ignore[reportArgumentType]  # it returns what it is given


def fsdp_has_unreduced_gradients(modules: Iterable[FSDPModule]) -> bool:
    """Whether autograd left gradients on gathered parameters that FSDP has not reduced."""
    return any(
        (unsharded := getattr(param, "_unsharded_param", None)) is not None and unsharded.grad is not None
        for param in fsdp_parameters(modules)
    )


def fsdp_groups(module: FSDPModule) -> list[Any]:
    """Return the communication groups (``FSDPParamGroup``) of one FSDP module; usually one, none without parameters."""
    state = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def fsdp_parameters(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """Iterate over the ``FSDPParam`` objects of ``modules``."""
    for module in modules:
        for group in fsdp_groups(module):
            yield from group.fsdp_params


def fsdp_gathered_parameters(modules: Iterable[FSDPModule]) -> list[Tensor]:
    """Return the gathered parameters that exist so far; each is one object for life, its memory comes and goes."""
    params = fsdp_parameters(modules)
    return [p for p in (getattr(param, "_unsharded_param", None) for param in params) if p is not None]


def fsdp_is_gathered(module: FSDPModule) -> bool:
    """Whether the module's own parameters are gathered (registered unsharded) right now."""
    return any(not group.is_sharded for group in fsdp_groups(module))


def fsdp_reset(root: FSDPModule) -> None:
    """Bring FSDP back to idle after a step that raised; a no-op where torch (2.11) cannot."""
    state = root._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()


def fsdp_mirror_requires_grad(modules: Iterable[FSDPModule]) -> None:
    """Copy ``requires_grad`` from sharded to gathered parameters.

    Reason: FSDP copies the flag when it gathers. ``toggle_optimizer`` changes it on the sharded ones inside a step,
    when the root is already gathered.
    """
    for param in fsdp_parameters(modules):
        unsharded = getattr(param, "_unsharded_param", None)
        if unsharded is not None and unsharded.requires_grad != param.sharded_param.requires_grad:
            unsharded.requires_grad_(param.sharded_param.requires_grad)


@torch.no_grad()
def fsdp_write_back(module: FSDPModule) -> None:
    """Keep what a step changed in place in the module's gathered parameters: copy this rank's part to its shard.

    Also keeps ``requires_grad``. Parameters gathered in a lower dtype are left alone. No communication.
    Reason: FSDP throws gathered copies away. What a step does to them (a moving average, a normalised weight, clamping)
    would be lost without a word. The shard must not have changed since it was gathered.
    """
    for group in fsdp_groups(module):
        if not group.is_unsharded:
            continue
        for param in group.fsdp_params:
            gathered, shard = param._unsharded_param, param.sharded_param.to_local()
            param.sharded_param.requires_grad_(gathered.requires_grad)
            if param.param_dtype is None and shard.numel() > 0:
                dim = param.fsdp_placement.dim
                start = param.padded_sharded_param_size[dim] * param.mesh_info.shard_mesh_rank
                values = gathered.detach()
                values = values.to_local() if isinstance(values, DTensor) else values  # divided over other axes too
                shard.copy_(values.narrow(dim, start, shard.shape[dim]))


def fsdp_clear_gradients(module: FSDPModule, owners: set[nn.Module]) -> None:
    """Drop the reduced gradients of those of the module's own parameters that one of ``owners`` holds."""
    for param in fsdp_parameters([module]):
        info = param._module_info
        if owners.intersection((info.module, *info.shared_modules)):
            param.sharded_param.grad = None


def fsdp_received_gradient(param: Any) -> bool:
    """Whether this rank's backward gave the FSDP parameter a gradient that is not reduced yet."""
    if param.unsharded_accumulated_grad is not None:
        return True
    unsharded = getattr(param, "_unsharded_param", None)
    return unsharded is not None and unsharded.grad is not None


def fsdp_before_reduce(module: FSDPModule, hook: Callable[[list[Any]], None], refuse_graph: Callable[[], None]) -> None:
    """Call ``hook(fsdp_params)`` each time before a group of ``module`` reduces its gradients.

    ``refuse_graph()`` is called instead of going on in a backward that builds a graph: FSDP2 frees the parameters that
    the second backward needs, and torch 2.13 then reads freed memory.

    Reason: FSDP2 reduces the parameters that got a gradient on *this* rank. If ranks differ, it mixes gradients of
    different parameters without a word when sizes happen to agree; this is the only place to notice in time.
    """
    for group in fsdp_groups(module):
        group.post_backward = _hooked_post_backward(group, group.post_backward, hook, refuse_graph)


def _hooked_post_backward(
    group: Any,
    post_backward: Callable[..., None],
    hook: Callable[[list[Any]], None],
    refuse_graph: Callable[[], None],
) -> Callable[..., None]:
    def hooked(*unused: Any) -> None:
        if torch.is_grad_enabled():  # backward of create_graph=True
            refuse_graph()
        if group.reduce_grads:
            _unify_gradient_dtypes(group.fsdp_params)
            hook(group.fsdp_params)
        post_backward(*unused)

    return hooked


def _unify_gradient_dtypes(params: list[Any]) -> None:
    """Bring gradients of parameters gathered in a lower dtype (see :func:`fsdp_gather_in`) to the group's dtype."""
    for param in params:
        if param.reduce_dtype is not None and hasattr(param, "_unsharded_param"):
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


def fsdp_gather_in(param: Any, dtype: torch.dtype | None) -> None:
    """Gather one parameter in ``dtype`` from now on, and reduce its gradient in its own; None: as it is stored.

    Reason: a ``MixedPrecisionPolicy`` holds for a whole module, but in a block under autocast only the weights of
    matrix products are cast. The parameter must be sharded at the time.
    """
    if param.param_dtype == dtype:
        return
    param.param_dtype = dtype
    param.reduce_dtype = None if dtype is None else param.orig_dtype
    param.all_gather_outputs = []
    if hasattr(param, "_unsharded_param"):
        del param._unsharded_param


def user_class(module: nn.Module) -> type:
    """Return the class that the user gave ``module``; ``fully_shard`` makes a subclass of it."""
    cls = type(module)
    return cls.__mro__[2] if issubclass(cls, FSDPModule) and cls.__mro__[1] is FSDPModule else cls


def fsdp_restore_class_name(module: nn.Module) -> None:
    """Give the class that ``fully_shard`` made (``FSDPGPT``) the user's name back (``GPT``).

    Reason: model summaries, logs and error messages name classes; sharding must not change what a user sees.
    """
    cls, original = type(module), type(module).__mro__[2]
    cls.__name__, cls.__qualname__, cls.__module__ = original.__name__, original.__qualname__, original.__module__


# ----------------------------------------------------------------------------------------------------------------------
# torch.distributed
# ----------------------------------------------------------------------------------------------------------------------


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten all axes of ``mesh`` into one named axis (``DeviceMesh._flatten``: no public spelling up to 2.13)."""
    return mesh._flatten(name)  # pyright: ignore[reportPrivateUsage]


def join_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the axes of both, which are axes of one mesh (``DeviceMesh._concatenate``).

    Reason: FSDP2 builds the mesh of parameters that are divided over other axes so, and optimizers want one mesh.
    """
    return DeviceMesh._concatenate([outer, inner])  # pyright: ignore[reportPrivateUsage]


def all_arrive(key: str, group: dist.ProcessGroup, patience: timedelta) -> bool:
    """Announce under ``key`` that this rank arrived, and return whether all ranks of ``group`` do within ``patience``.

    Uses the default group's key-value store (no public accessor up to 2.13): unlike a collective, waiting there for a
    rank that never comes can be given up.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    store.set(f"{key}/{dist.get_rank()}", "")
    try:
        store.wait([f"{key}/{rank}" for rank in dist.get_process_group_ranks(group)], patience)
    except (RuntimeError, dist.DistError):
        return False
    return True


def failed_ranks(key: str, world_size: int, grace: timedelta) -> int:
    """Announce under ``key`` that this rank failed, and return how many ranks announced it within ``grace``.

    Uses the default group's key-value store (no public accessor up to 2.13), since after a failure no collective can
    be trusted. Returns 1 when the store cannot be reached any more.
    """
    try:
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        count = store.add(key, 1)
        deadline = time.monotonic() + grace.total_seconds()
        while count < world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            count = store.add(key, 0)
        return count
    except (RuntimeError, ValueError, dist.DistError):
        return 1


# ----------------------------------------------------------------------------------------------------------------------
# torch.amp
# ----------------------------------------------------------------------------------------------------------------------


def share_overflow(scaler: torch.amp.GradScaler) -> None:
    """Let all ranks share whether any of them found an overflow in its part of the gradients. Idempotent.

    Reason: ``GradScaler`` looks at local gradients; ranks that disagree would skip different steps. The method wrapped
    (``_unscale_grads_``) serves both ``unscale_`` and optimizers that unscale themselves.

    Which ranks must call the scaler: all ranks.
    """
    if getattr(scaler, "_lightning_4d_shared", False):
        return
    unscale = scaler._unscale_grads_  # pyright: ignore[reportPrivateUsage]

    def unscale_and_share(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found = unscale(*args, **kwargs)
        if dist.is_initialized():
            for found_inf in found.values():
                dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return found

    scaler._unscale_grads_ = unscale_and_share  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
    scaler._lightning_4d_shared = True  # pyright: ignore[reportAttributeAccessIssue]


# ----------------------------------------------------------------------------------------------------------------------
# torch.overrides
# ----------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def observe_meta_initialization(report: Callable[[nn.Parameter, nn.Module | None], None]) -> Iterator[None]:
    """Call ``report(parameter, module)`` for each initialisation of a parameter on the meta device.

    ``module`` is the one whose ``reset_parameters`` does it; None for other code, which includes reading ``.data``.
    Reason: initialisation on the meta device is lost. ``reset_parameters`` can be repeated later, other code cannot,
    and must not be dropped silently. Only the frame walk is private (to CPython).
    """
    with _MetaInitializationObserver(report):
        yield


class _MetaInitializationObserver(torch.overrides.TorchFunctionMode):
    def __init__(self, report: Callable[[nn.Parameter, nn.Module | None], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        target = args[0] if args else (kwargs or {}).get("tensor")  # functions of nn.init come with a keyword
        if isinstance(target, nn.Parameter) and target.is_meta and _initializes(func):
            self._report(target, _resetting_module())
        return func(*args, **(kwargs or {}))


def _initializes(func: Callable[..., Any]) -> bool:
    if func is torch.Tensor.data.__get__:  # pyright: ignore[reportAttributeAccessIssue]
        return True
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.startswith("__") and name != "requires_grad_"


def _resetting_module() -> nn.Module | None:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in ("reset_parameters", "_reset_parameters"):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


# ----------------------------------------------------------------------------------------------------------------------
# torch: operations on many tensors at once (`torch._foreach_*`: documented, but spelled private up to 2.13)
# ----------------------------------------------------------------------------------------------------------------------


def multiply_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by a 0-d tensor on the same device, in place."""
    torch._foreach_mul_(tensors, factor)


def clamp_all(tensors: list[Tensor], bound: float) -> None:
    """Clamp each element to [-bound, bound], in place."""
    torch._foreach_clamp_min_(tensors, -bound)
    torch._foreach_clamp_max_(tensors, bound)


# ----------------------------------------------------------------------------------------------------------------------
# torch: fake tensors and dispatch modes
# ----------------------------------------------------------------------------------------------------------------------


def fake_tensor_mode() -> Any:
    """Return a mode in which tensors have shape, dtype and device, but no data; real tensors that meet them are faked.

    Reason: ``FakeTensorMode`` is the only way to run a step without memory or time, and has no public spelling.
    Static shapes, so that numbers derived from them are plain integers; data-dependent ones are symbols.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Without the log of operations that fail on fake tensors: inputs are being tried, and some do not fit.

    Reason: FakeTensorMode logs a traceback as an error before it raises (torch 2.13), to a logger of a private module.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def dispatch_mode(handle: Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """Return a context manager in which every operation below autograd runs as ``handle(mode, op, args, kwargs)``.

    ``handle`` runs outside the mode; ``with mode:`` enters it again. Higher-order operators are handed on too.
    Reason: ``TorchDispatchMode`` is what ``FlopCounterMode`` is made of, and has no public spelling.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handle(self, func, args, kwargs or {})

    return Mode()


def makes_constant(operation: Any) -> bool:
    """Whether a dispatched operation takes in a new real tensor: ``torch.tensor(2)``, whose value stays known."""
    return isinstance(operation, torch._ops.OpOverload) and operation.name().startswith("aten::lift")


# ----------------------------------------------------------------------------------------------------------------------
# torch.ops.aten: operations that torch's FLOP counter lacks, under names that are spelled private
# ----------------------------------------------------------------------------------------------------------------------

CPU_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
GROUPED_MM = torch.ops.aten._grouped_mm


# ----------------------------------------------------------------------------------------------------------------------
# torch.distributed.tensor
# ----------------------------------------------------------------------------------------------------------------------


HAS_STRIDED_SHARDS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether DTensor understands :func:`strided_shard` beside the shards of other axes; torch 2.11 refuses to make it."""


def strided_shard(dim: int, parts: int) -> Any:
    """Return the placement of a tensor whose ``dim`` consists of equal parts, each sharded by itself.

    ``_StridedShard``: rank r of n holds the r-th n-th of each part. Reason: a fused projection (queries, keys and
    values in one weight) is divided by heads, and DTensor has no public placement for it.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def strided_shard_parts(placement: Any) -> int | None:
    """The number of parts of a placement made by :func:`strided_shard`, or None for another placement."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


# ----------------------------------------------------------------------------------------------------------------------
# torch: tensor subclasses
# ----------------------------------------------------------------------------------------------------------------------


def make_wrapper(cls: type[Any], sizes: list[int], like: Tensor) -> Any:
    """Return a tensor of class ``cls`` with ``sizes`` and no memory, of the dtype, device and gradient of ``like``.

    Reason: ``Tensor._make_wrapper_subclass`` is how tensors that stand for others are made (DTensor too), and has no
    public spelling up to 2.13.
    """
    return Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
        cls, sizes, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
    )


without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context in which ``__torch_function__`` of subclasses is not called. Its public relatives are for modes (2.13)."""


def nn_builtins(names: str) -> list[Any]:
    """Return the functions of these names, separated by blanks, that ``torch.nn.functional`` itself calls (2.13)."""
    space = torch._C._nn  # pyright: ignore[reportAttributeAccessIssue]
    return [getattr(space, name) for name in names.split() if hasattr(space, name)]


# ----------------------------------------------------------------------------------------------------------------------
# torch.ops.aten: attention that returns its log-sum-exp, and its backward (the public function gives no log-sum-exp)
# ----------------------------------------------------------------------------------------------------------------------

CUDA_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
CUDA_FLASH_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
CUDA_EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention
CUDA_EFFICIENT_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward
CUDA_CUDNN_ATTENTION = torch.ops.aten._scaled_dot_product_cudnn_attention
CUDA_CUDNN_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward

# ----------------------------------------------------------------------------------------------------------------------
# torch.Tensor subclasses and autograd functions
# ----------------------------------------------------------------------------------------------------------------------


def wrapper_tensor(cls: type[Any], shape: Sequence[int], like: Tensor) -> Any:
    """Make a tensor of class ``cls`` that has ``shape``, dtype and device of ``like``, and no memory.

    Reason: ``Tensor._make_wrapper_subclass`` is how tensor subclasses that wrap others are made; no public spelling.
    It takes no part in autograd: the tensor that it wraps does.
    """
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)  # pyright: ignore[reportAttributeAccessIssue]


_CHECKPOINT_FUNCTIONS = ("_NoopSaveInputs",)  # of torch.utils.checkpoint: only hands its arguments back


def intercept_autograd_functions(
    wrapper: type[Tensor],
    unwrap: Callable[[type, tuple[Any, ...]], tuple[Any, ...]],
    refuse: Callable[[type], None],
) -> None:
    """Call ``unwrap(function, args)`` before each ``Function.apply`` of autograd that has a ``wrapper`` as an argument.

    Reason: an autograd function called with a wrapper makes a graph in which the wrapped tensor is missing: gradients
    before it would silently be None; so would those of one that returns a wrapper, which is why ``refuse(function)`` is
    called then. ``apply`` is reached through ``super()`` of the private base class, so that also
    an ``f = MyFunction.apply`` of long ago comes through here. Idempotent.
    """
    base: Any = torch.autograd.function._SingleLevelFunction
    if "apply" in vars(base):
        return

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, wrapper) for arg in args) and cls.__name__ not in _CHECKPOINT_FUNCTIONS:
            args = unwrap(cls, args)
        result = super(base, cls).apply(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if any(isinstance(item, wrapper) for item in (result if isinstance(result, tuple) else (result,))):
            refuse(cls)
        return result

    base.apply = classmethod(apply)


READ_NUMBER: Any = torch.ops.aten._local_scalar_dense.default
"""The operation behind ``tensor.item()``, as a dispatch mode sees it (2.13).

Reason: it has no public name, and what stands for a tensor without memory has to answer it.
"""

NN_FUNCTIONS: Any = torch._C._nn  # pyright: ignore[reportAttributeAccessIssue]
"""Where the functions of ``torch.nn.functional`` that are written in C++ are, under their names there.

Reason: ``__torch_function__`` names the function itself, and for some of them that is this one.
"""

# ----------------------------------------------------------------------------------------------------------------------
# torch.distributed.pipelining
# ----------------------------------------------------------------------------------------------------------------------


def pipeline_schedule_class(name: str) -> Any:
    """Return torch's schedule class by its short name (``torch.distributed.pipelining.schedules.get_schedule_class``).

    Reason: public, but exported by no documented module. Imported late: it takes a second.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    return get_schedule_class(name)


def pipeline_actions(
    name: str, ranks: int, stages: int, microbatches: int, stages_of: Callable[[int], list[int]], *, single: bool
) -> dict[int, list[Any]]:
    """Return the compute actions of a schedule by rank, without a process group; None is a pause.

    Reason: a schedule makes the lists of all ranks in its constructor, from nothing but numbers.
    """
    own = [_StageNumbers(index, 0, ranks, stages) for index in stages_of(0)]
    cls = pipeline_schedule_class(name)
    schedule = cls(own[0] if single else own, n_microbatches=microbatches, loss_fn=lambda output, _: output)
    order = schedule.pipeline_order
    order = order if order is not None else schedule._get_pipeline_order()
    return {rank: _numbered_from_zero(actions) for rank, actions in order.items()}


def _numbered_from_zero(actions: list[Any]) -> list[Any]:
    """Number the forwards of 1F1B's last rank from 0: torch (2.11 to 2.13) lists them from 1, and runs them from 0."""
    forwards = [a.microbatch_index for a in actions if a is not None and a.computation_type.value == "F"]
    if not forwards or min(forwards) == 0:
        return actions
    return [
        a._replace(microbatch_index=a.microbatch_index - 1) if a is not None and a.computation_type.value == "F" else a
        for a in actions
    ]


class _StageNumbers:
    """What a schedule's constructor asks of a stage."""

    def __init__(self, index: int, rank: int, ranks: int, stages: int) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, ranks, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod = nn.Module()
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] = {}


def run_schedule(schedule: Any, microbatches: int, *, backward: bool) -> None:
    """Run one step of torch's schedule; what its stages take and give is theirs.

    Reason: the public ``step`` splits a batch by itself, into equal parts of tensors only.
    """
    before = schedule._has_backward
    schedule._has_backward = backward
    # An error in the user's step would be preceded by a hundred lines that draw the schedule.
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    if logger.level != logging.CRITICAL:  # to set it takes a millisecond, since all loggers are looked at
        logger.setLevel(logging.CRITICAL)
    try:
        schedule._step_microbatches(
            [()] * microbatches, [{}] * microbatches, [None] * microbatches, None, return_outputs=False
        )
    finally:
        schedule._has_backward = before
        schedule._internal_losses.clear()


def backward_of_inputs(
    outputs: list[Tensor], gradients: list[Tensor | None], inputs: list[Any], weights: Iterable[Tensor]
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """Compute the gradients of ``inputs`` only, and what :func:`backward_of_weights` needs (``stage_backward_input``).

    Reason: the halves of a backward that zero-bubble schedules place at different times; no public spelling.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(outputs, gradients, inputs, iter(weights))  # pyright: ignore[reportArgumentType]


def backward_of_weights(weights: Iterable[Tensor], groups: list[dict[str, Any]]) -> None:
    """Compute the gradients of ``weights`` after :func:`backward_of_inputs` (``stage_backward_weight``)."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(weights), groups)  # pyright: ignore[reportArgumentType]


# ----------------------------------------------------------------------------------------------------------------------
# torch.autograd
# ----------------------------------------------------------------------------------------------------------------------


def is_shared_gradient(gradient: Tensor) -> bool:
    """Whether other tensors use a gradient's memory, or its elements share it. Of what a hook gets, or of ``.grad``.

    Reason: autograd gives one tensor, or views of it, to several inputs (of a sum, say). Where it keeps that as
    ``.grad``, it adds the next one in place, unless it counts another reference to it; it counts none in a DTensor, nor
    those of other views. No public spelling of ``_use_count``, ``_base`` and the count of a storage. Unshared, a
    gradient has two references, autograd's and the caller's, and its storage has two, its own and the Python object
    asked for here; a view (a linear layer's weight gets a transposed product) has a base besides, which no one else
    holds.
    """
    if any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)):
        return True  # one number seen as many, as the gradient of a sum's input is
    base: Any = gradient._base
    storage = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    if gradient._use_count() > 2:  # pyright: ignore[reportAttributeAccessIssue]
        return True
    return storage > 2 if base is None else storage > 3 or base._use_count() > 2


@contextlib.contextmanager
def own_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """What gets its first gradient inside does not share it, so that others may be added to it in place.

    Around every backward but the last of a sum. Reason: as :func:`is_shared_gradient`; besides,
    ``stage_backward_weight`` adds in place to what ``torch.autograd.grad`` gave.
    """
    without = [leaf for leaf in leaves if leaf.grad is None]
    yield
    for leaf in without:
        if leaf.grad is not None and is_shared_gradient(leaf.grad):
            leaf.grad = leaf.grad.clone()


# ----------------------------------------------------------------------------------------------------------------------
# torch.nn
# ----------------------------------------------------------------------------------------------------------------------


def replace_call(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``module(...)`` run ``call`` instead of its hooks and forward; return what it ran before.

    Reason: hooks can neither skip a forward nor each other, and special methods cannot be replaced on an instance.
    ``nn.Module.__call__`` goes through the instance's ``_call_impl`` (or ``_compiled_call_impl``, if compiled whole).
    """
    before = module._compiled_call_impl if module._compiled_call_impl is not None else module._call_impl
    if module._compiled_call_impl is not None:
        vars(module)[_COMPILED_CALL] = module._compiled_call_impl
        module._compiled_call_impl = None
    vars(module)[_CALL] = call
    return before


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Return what ``module(...)`` runs by its class: hooks and forward, whatever :func:`replace_call` put there."""
    return functools.partial(type(module)._call_impl, module)


def restore_call(module: nn.Module) -> None:
    """Undo :func:`replace_call`; idempotent."""
    vars(module).pop(_CALL, None)
    if _COMPILED_CALL in vars(module):
        module._compiled_call_impl = vars(module).pop(_COMPILED_CALL)


_CALL, _COMPILED_CALL = "_call_impl", "_lightning_4d_compiled_call"


def storage_key(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common, also fake ones (the address of their storage object)."""
    return storage_id(tensor.untyped_storage())


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return what tells a storage from all others that exist: the address of its object, also where it has no data.

    Reason: ``_cdata``; ``data_ptr()`` is 0 for all fake tensors.
    """
    return storage._cdata


@contextlib.contextmanager
def storage_resizes(seen: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Call ``seen(storage, bytes before)`` after each resize of a storage, on any thread.

    Reason: FSDP2 frees and fills gathered parameters by ``UntypedStorage.resize_``, which no dispatch mode sees.
    """
    plain = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        result = plain(self, size)
        seen(self, before)
        return result

    torch.UntypedStorage.resize_ = resize
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain


# ----------------------------------------------------------------------------------------------------------------------
# torch.distributed: a process group of one process, and what collectives look like below autograd
# ----------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Be rank ``rank`` of ``world_size`` ranks of which no other exists: collectives return at once, values are wrong.

    Reason: the only way to set up one rank of a large job on one machine; torch (2.11 to 2.13) keeps it among its test
    tools. ``fake_collectives`` teaches fake tensors what the collectives return.
    """
    import torch.distributed._tools.fake_collectives  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# c10d operators by the collective that they are; which argument holds the tensor whose bytes count, the whole one.
_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}


def collective_of(operation: Any, arguments: Sequence[Any]) -> tuple[str, tuple[int, ...], int] | None:
    """Return what a dispatched operation communicates: the collective, the global ranks, the bytes; None for others.

    Bytes are those of the whole tensor: of what an all-gather returns, of what a reduce-scatter takes. A message from
    rank to rank counts on both sides. Barriers count as none.
    Reason: collectives pass the dispatcher as operators of ``torch.ops.c10d``, which has no public description (2.13).
    """
    if not isinstance(operation, torch._ops.OpOverload) or operation.namespace != "c10d":
        return None
    name = operation.name().removeprefix("c10d::").partition(".")[0]
    if "barrier" in name:
        return None
    kind, position = _COLLECTIVES[name]  # one that is not known is an error, not a zero
    group = next(_group_of(argument) for argument in arguments if isinstance(argument, torch.ScriptObject))
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = [leaf for leaf in tree_leaves(arguments[position]) if isinstance(leaf, Tensor)]
    return kind, ranks, sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _group_of(argument: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(argument)  # pyright: ignore[reportAttributeAccessIssue]


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no data: one of :func:`fake_tensor_mode` (``FakeTensor`` is private up to 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
