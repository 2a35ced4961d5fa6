"""Hooks on the blocks of a module: they open and close what `calls` records, by the plan of a policy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from lightning_4d import _torch_private as private
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.blocks import Block, find_blocks
from lightning_4d.parallel.recompute.arguments import Arguments, Outputs, tensors_in
from lightning_4d.parallel.recompute.calls import Call, Contexts, Site
from lightning_4d.parallel.recompute.module_state import BlockState
from lightning_4d.parallel.recompute.offload import Offloader
from lightning_4d.parallel.recompute.plan import BlockBytes, Plan, Segment, extra_forwards, make_plan
from lightning_4d.parallel.recompute.policy import RecomputePolicy
from lightning_4d.parallel.recompute.sizes import Observer, Sizes
from lightning_4d.parallel.recompute.surroundings import Surroundings

_registry: weakref.WeakKeyDictionary[nn.Module, Recompute] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class StageRuns:
    """What pipeline stages mean for checkpointing.

    Args:
        runs: names of the blocks of each stage on this rank; blocks outside them are other ranks'.
        in_flight: how many microbatches wait for their backward at once.
    """

    runs: Sequence[Sequence[str]]
    in_flight: int


def install(
    root: nn.Module, policy: RecomputePolicy, blocks: str | Sequence[str] = "auto", stages: StageRuns | None = None
) -> Recompute:
    """Recompute the blocks of ``root`` in backward by ``policy``, instead of an earlier policy if there is one.

    May come before or after the module is sharded or its blocks are compiled. Which ranks must call: all that train
    the module, with equal arguments.

    Args:
        root: any module.
        policy: what to keep.
        blocks: as for :func:`lightning_4d.parallel.blocks.find_blocks`.
        stages: of a pipeline, if the module is divided into some; a segment never crosses from one to another.

    Raises:
        UnsupportedError: no blocks, blocks inside one another, or blocks compiled together with their hooks.
    """
    remove(root)
    found = find_blocks(root, blocks)
    chains = [len(list(g)) for _, g in groupby(found, key=lambda block: block.name.rpartition(".")[0])]
    if stages is not None:
        by_name = {block.name: block for block in found}
        runs = [[by_name[name] for name in run if name in by_name] for run in stages.runs]
        found, chains = [block for run in runs for block in run], [len(run) for run in runs if run]
    _refuse(found, root)
    recompute = Recompute(found, policy, chains, 1 if stages is None else stages.in_flight)
    _registry[root] = recompute
    return recompute


def installed(root: nn.Module) -> Recompute | None:
    """Return what :func:`install` made of ``root``, or None."""
    return _registry.get(root)


def remove(root: nn.Module) -> None:
    """Take the policy off again. A forward that still waits for its backward is not harmed. Idempotent."""
    recompute = _registry.pop(root, None)
    if recompute is not None:
        recompute.remove()


def recompute_plan(module: nn.Module) -> Mapping[str, float]:
    """Return how many more times each block's forward runs per training step under the installed policy, by name.

    1.0 is one more forward, 2.0 two (``nested``), 0.0 none. It counts floating-point operations of matrix products,
    convolutions and attention; ``selective`` keeps all of these. Policies that measure the first forward say 1.0 until
    then. Empty if ``module`` has no policy and no part of it has.
    """
    plan: dict[str, float] = {}
    for name, part in module.named_modules():
        recompute = installed(part)
        if recompute is not None:
            plan |= {f"{name}.{block}" if name else block: value for block, value in recompute.extra_forwards.items()}
    return plan


def _refuse(blocks: Sequence[Block], root: nn.Module) -> None:
    if not blocks:
        raise UnsupportedError(
            explain(
                f"activation checkpointing of {type(root).__name__}",
                "it works by repeated blocks in an nn.ModuleList or nn.Sequential, and there are none",
                "name the container by blocks='...', or leave activation checkpointing out",
            )
        )
    owners: dict[nn.Module, str] = {}
    for block in blocks:
        if block.module._compiled_call_impl is not None:
            raise UnsupportedError(
                explain(
                    f"block {block.name!r} was compiled by its method compile()",
                    "that takes the hooks of checkpointing into the graph",
                    "compile its forward alone: block.forward = torch.compile(block.forward), or compile_blocks=True",
                )
            )
        for part in block.module.modules():
            if part in owners and any(part is other.module for other in blocks):
                raise UnsupportedError(
                    explain(
                        f"blocks {owners[part]!r} and {block.name!r}",
                        "a block cannot lie inside another block",
                        "name one container only by blocks='...'",
                    )
                )
            owners.setdefault(part, block.name)


class Recompute:
    """A policy at work on the blocks of one module; made by :func:`install`."""

    def __init__(self, blocks: Sequence[Block], policy: RecomputePolicy, chains: list[int], in_flight: int) -> None:
        self.policy = policy
        self._in_flight = in_flight
        self._sites = [Site(i, block, BlockState(block.name, block.module)) for i, block in enumerate(blocks)]
        self._chains = chains
        self._sizes = Sizes([block.module for block in blocks])
        self._offloader = Offloader(policy.offload)
        self._running: _Running | None = None
        self._newest: weakref.ref[Call] | None = None
        self._newest_head: weakref.ref[Call] | None = None
        self._outputs: Outputs | None = None  # of the block before, while sizes are measured
        self._set_plan(make_plan(policy, self._chains, None, in_flight))
        self._handles = [handle for site in self._sites for handle in self._hook(site)]

    @property
    def plan(self) -> Plan:
        """The segments now, by block index."""
        return self._plan

    @property
    def sizes(self) -> Mapping[int, BlockBytes]:
        """Bytes measured so far, by block index; empty for policies that need none."""
        return self._sizes.measured

    @property
    def extra_forwards(self) -> dict[str, float]:
        """Extra forwards per training step, by block name within the module."""
        names = (site.block.name for site in self._sites)
        return dict(zip(names, extra_forwards(self._plan), strict=True))

    def remove(self) -> None:
        """Take all hooks off the module."""
        self.abandon()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def abandon(self) -> None:
        """Forget a forward that ended inside a block by something else than an ordinary exception."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _set_plan(self, plan: Plan) -> None:
        self._plan = plan
        self._segments = [segment for segment in plan for _ in range(segment.start, segment.stop)]

    def _hook(self, site: Site) -> list[RemovableHandle]:
        # Innermost: after FSDP and other pre-hooks have made the arguments, before post-hooks change the output.
        before = site.block.module.register_forward_pre_hook(_Hook(self._before, site), with_kwargs=True)
        after = site.block.module.register_forward_hook(
            _Hook(self._after, site), with_kwargs=True, prepend=True, always_call=True
        )
        return [before, after]

    # ------------------------------------------------------------------------------------------------------- forward

    def _before(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if site.replaying is not None:
            return site.replaying.again()
        if not torch.is_grad_enabled() or self._running is not None or self._is_replaying():
            return None
        self._measure_and_plan(site, args, kwargs)
        segment = self._segments[site.index]
        if segment.keep == "all":
            return None
        self._running = _Running(site, self._open(site, segment, args, kwargs), self._sizes.observer(site.index))
        return None

    def _is_replaying(self) -> bool:
        """Inside the recompute of another block, which called this one."""
        return any(site.replaying is not None for site in self._sites)

    def _open(self, site: Site, segment: Segment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        previous = self._joinable(site)
        if previous is not None:
            previous.arguments.check_between(previous.site.block.name, site.block.name)
        outputs = None if previous is None else previous.outputs
        newest = None if self._newest is None else self._newest()
        call = Call(
            site,
            Arguments(args, kwargs, outputs, self._offloader),
            Surroundings.now(_device(args, kwargs, site.block.module), newest.surroundings if newest else None),
            previous,
            segment.stop if previous is None else previous.stop,
            segment.nested,
            _selective_contexts() if segment.keep == "products" else None,
        )
        if previous is None:
            call.before, self._newest_head = self._newest_head, weakref.ref(call)
        self._newest = weakref.ref(call)
        return call

    def _joinable(self, site: Site) -> Call | None:
        """The call that this one continues: in the same segment, and in the same forward as far as can be told."""
        newest = None if self._newest is None else self._newest()
        if newest is None or newest.sealed or not newest.site.index < site.index < newest.stop:
            return None
        return newest

    def _after(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if site.replaying is not None:
            site.replaying.capture(output)
            return
        running = self._running
        if running is None or running.site is not site:
            return
        self._running = None
        running.close()
        call = running.call
        call.arguments.check_after_forward(site.block.name)
        outputs = Outputs(output)
        call.outputs = outputs if site.index + 1 < call.stop else None
        if running.observer is not None:
            self._outputs = outputs

    # ------------------------------------------------------------------------------------------------------- planning

    def _measure_and_plan(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.policy.needs_sizes:
            return
        if self._sizes.complete_at(site.index, (args, kwargs)):
            self._set_plan(make_plan(self.policy, self._chains, self._sizes.measured, self._in_flight))
        if self._sizes.wants(site.index):
            self._sizes.begin(site.index, (args, kwargs), self._outputs)


class _Hook:
    """A hook on one block. A copy of the module (an average of its weights) gets one that does nothing."""

    def __init__(self, function: Callable[..., Any], site: Site) -> None:
        self._function = function
        self._site = site

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            _refuse_compiled(self._site.block.name)  # pyright: ignore[reportArgumentType]  # torch types the decorator as a factory
            return None
        return self._function(self._site, *arguments)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


@torch.compiler.disable
def _refuse_compiled(name: str) -> None:
    """Raise when the code is run that was compiled from a module and the hooks on its blocks together."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            explain(
                f"block {name!r} is called in a compiled module",
                "a recompute in backward would run other code than the compiled forward",
                "compile the blocks instead: compile_blocks=True, or block.forward = torch.compile(block.forward)",
            )
        )


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass


class _Running:
    """A block's forward between its two hooks."""

    def __init__(self, site: Site, call: Call, observer: Observer | None) -> None:
        self.site = site
        self.call = call
        self.observer = observer
        self._watch = site.state.before_forward()
        self._stack = ExitStack()
        self._stack.enter_context(call.dropping(observer))
        if call.contexts is not None:
            self._stack.enter_context(call.contexts[0])

    def close(self) -> None:
        """End it."""
        self._stack.close()
        if self.observer is not None:
            self.observer.close()
        self.site.state.after_forward(self._watch)


def _device(args: Any, kwargs: Any, module: nn.Module) -> torch.device:
    tensors = tensors_in((args, kwargs)) or list(module.parameters())
    accelerated = (tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta"))
    return next(accelerated, torch.device("cpu"))


_PRODUCTS = {*flop_registry, private.CPU_FLASH_ATTENTION}  # the registry has no entry for it


def _selective_contexts() -> Contexts:
    return create_selective_checkpoint_contexts(_keep_products)


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = getattr(operation, "overloadpacket", operation) in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE
