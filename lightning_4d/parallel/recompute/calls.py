"""One call of a block in a forward, and the same call again in backward.

What autograd saves inside the block is replaced by empty places (`_Place`). The first place that backward looks into
calls the blocks of the segment again, and fills the places. Each call knows the one before it in its segment, never
the one after, and a place knows its call: so memory goes as soon as backward has used it, without a reference cycle.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from lightning_4d import _torch_private as private
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.recompute.arguments import Arguments, Outputs, tensors_in
from lightning_4d.parallel.recompute.module_state import BlockState
from lightning_4d.parallel.recompute.surroundings import Surroundings

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Given = tuple[tuple[Any, ...], dict[str, Any]]
Looks = tuple[torch.Size, torch.dtype, torch.device]


class _EndOfRecompute(Exception):
    """All that backward needs of a block is there: what its forward does after that need not run."""


class _Place:
    """Where a tensor that autograd wanted to save would be."""

    __slots__ = ("__weakref__", "call", "value")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.value: Tensor | None = None  # freed with the place, when autograd has used it


@dataclass
class Site:
    """One block, for all its calls: see `install`."""

    index: int
    block: Block
    state: BlockState
    replaying: Call | None = None  # the call that runs again just now


class Call:
    """One call of a block in a forward with gradients.

    Args:
        site: the block.
        arguments: its arguments.
        surroundings: the state of the world.
        previous: the call before in the same segment.
        stop: index after the last block that may join the segment.
        nested: recompute the segment's other blocks for their outputs only.
        contexts: contexts of the forward and of the recompute, for the policy that keeps some results.
    """

    def __init__(
        self,
        site: Site,
        arguments: Arguments,
        surroundings: Surroundings,
        previous: Call | None,
        stop: int,
        nested: bool,
        contexts: Contexts | None,
    ) -> None:
        self.site = site
        self.arguments = arguments
        self.surroundings = surroundings
        self.previous = previous
        self.stop = stop
        self.nested = nested
        self.contexts = contexts
        self.sealed = False  # backward has begun: no further block may join
        self.outputs: Outputs | None = None
        self.before: weakref.ref[Call] | None = None  # the first call of the segment before, for prefetching
        self._frozen = site.state.frozen()
        self._places: list[weakref.ref[_Place]] = []
        self._looks: list[Looks] = []
        self._restored: Given | None = None  # nested: the arguments, until the call's own recompute
        self._given: Given | None = None  # the arguments of the recompute that runs just now
        self._captured: Any = None  # what the block returned in a recompute

    # ------------------------------------------------------------------------------------------------------ forward

    def dropping(self, observe: Callable[[Tensor], None] | None) -> saved_tensors_hooks:
        """The hooks under which the block's forward saves nothing; ``observe`` sees what it would have saved."""

        def pack(tensor: Tensor) -> _Place:
            if observe is not None:
                observe(tensor)
            place = _Place(self)
            self._places.append(weakref.ref(place))
            self._looks.append((tensor.shape, tensor.dtype, tensor.device))
            return place

        return saved_tensors_hooks(pack, _look_into)

    # ---------------------------------------------------------------------------------------------------- recompute

    def recompute(self) -> None:
        """Fill the places of this call, and those of the calls before it in the segment unless nested."""
        chain = self._chain()
        for call in chain:
            call.sealed = True
        _gather_parameters([call.site.block.module for call in chain])
        self._prefetch(chain[0])
        produced: list[Tensor] = []
        for call in chain:
            is_last = call is self
            restored = call._restored or call.arguments.restore(call.site.block.name, produced)
            if self.nested and not is_last:
                output = call._run(restored, call._discarding(), keep_going=True)
            else:
                output = call._run(restored, call._filling(stop=is_last), keep_going=not is_last)
            if not is_last:
                produced = tensors_in(output)
                if self.nested:
                    produced = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in produced]
                    following = chain[chain.index(call) + 1]
                    following._restored = following.arguments.restore(following.site.block.name, produced)
        self._restored = None

    def _chain(self) -> list[Call]:
        """The calls to run again, in order: from the nearest one whose arguments are there."""
        chain: list[Call] = []
        call: Call | None = self
        while call is not None:
            chain.append(call)
            call = None if call._restored is not None else call.previous
        return chain[::-1]

    def _prefetch(self, head: Call) -> None:
        before = head.before() if head.before is not None else None
        if before is not None:
            before.arguments.prefetch()

    def _run(self, given: Given, hooks: saved_tensors_hooks, *, keep_going: bool) -> Any:
        args, kwargs = given
        site = self.site
        outer, site.replaying = site.replaying, self
        self._given = given  # for the pre-hook
        context = contextlib.nullcontext() if self.contexts is None else self.contexts[1]
        try:
            with (
                torch.enable_grad(),
                site.state.protected(self._frozen),
                self.surroundings.restored(cache_casts=keep_going is False),
                hooks,
                context,
            ):
                site.block.module(*args, **kwargs)
        except _EndOfRecompute:
            pass
        finally:
            site.replaying = outer
            self._given = None
            output, self._captured = self._captured, None
        return output

    def again(self) -> Given:
        """The arguments of the call that runs again, whatever other hooks made of them before."""
        assert self._given is not None
        return self._given

    def capture(self, output: Any) -> None:
        """Take what the block returned in its recompute, before other hooks change it."""
        self._captured = output

    def _filling(self, *, stop: bool) -> saved_tensors_hooks:
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            if count == len(self._places):
                raise self._differs(f"saves more than the {len(self._places)} tensors")
            looks = (tensor.shape, tensor.dtype, tensor.device)
            if looks != self._looks[count]:
                raise self._differs(f"saves {_describe(looks)} where {_describe(self._looks[count])} was saved")
            # Detached: a tensor that holds the node which saves it would never be freed.
            value = tensor.detach() if tensor.requires_grad else tensor
            place = self._places[count]()
            if place is not None:
                place.value = value
            count += 1
            if stop and count == len(self._places):
                raise _EndOfRecompute
            return value

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def _discarding(self) -> saved_tensors_hooks:
        def unpack(_: None) -> Tensor:
            raise UnsupportedError(
                explain(
                    f"block {self.site.block.name!r} differentiates inside its forward",
                    "nested=True runs it once without what that needs",
                    "use nested=False",
                )
            )

        return saved_tensors_hooks(lambda _: None, unpack)

    def check_filled(self, place: _Place) -> Tensor:
        """The tensor of a place after the recompute."""
        if place.value is None:
            raise self._differs("saves fewer tensors")
        return place.value

    def _differs(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            explain(
                f"the recompute of block {self.site.block.name!r} {what} than its forward"
                if "fewer" in what or "more" in what
                else f"the recompute of block {self.site.block.name!r} {what} in its forward",
                "a block must do the same when it is called twice with the same arguments and random state",
                "take what differs (a global, a counter, a cache) out of the block, or use policy='none'",
            )
        )


def _look_into(place: _Place) -> Tensor:
    if place.value is None:
        place.call.recompute()
    return place.call.check_filled(place)


def _describe(looks: Looks) -> str:
    shape, dtype, device = looks
    return f"{tuple(shape)} {dtype} on {device}"


def _gather_parameters(modules: Sequence[nn.Module]) -> None:
    """Let FSDP gather the segment's blocks as its backward would, once, in the order in which it will need them."""
    for module in reversed(modules):
        for part in _fsdp_modules(module):
            private.fsdp_begin_backward(part)


def _fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))
