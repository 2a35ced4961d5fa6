"""Notice when data-parallel ranks use different parameters in one backward.

FSDP2 reduces the parameters that got a gradient on *this* rank. When ranks differ, it waits for ever, or, where sizes
happen to agree, adds gradients of different parameters. Plain DDP refuses such a step, and so does this.

A model whose backward always uses the same parameters pays nothing after its first step. One that changes (several
optimizers, layers dropped in lockstep) is compared once per backward.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lightning_4d import _torch_private as private
from lightning_4d.errors import UnsupportedError, explain

# How long a rank that uses parameters in a new way waits for the others to do so. They are in the same backward, so it
# is the time that one rank may need longer for it than another, with compiling.
PATIENCE = timedelta(minutes=5)
_instances = itertools.count()  # made in the same order on all ranks


class Participation:
    """Compares, over the data-parallel ranks, which parameters of each FSDP group got a gradient.

    Args:
        units: the FSDP modules, in the same order on all ranks.
        group: process group of all data-parallel ranks; another one than FSDP's own.
        device: where the group's backend communicates.
    """

    def __init__(self, units: Sequence[FSDPModule], group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._key = f"lightning_4d/participation/{next(_instances)}"
        self._comparisons = 0
        self._device = device
        self._agreed_groups: set[tuple[int, tuple[bool, ...]]] = set()
        self._agreed_backwards: set[tuple[tuple[int, tuple[bool, ...]], ...]] = set()
        self._backward: list[tuple[int, tuple[bool, ...]]] = []
        self._calls = hashlib.blake2b(digest_size=7)
        for index, unit in enumerate(units):
            before_reduce = functools.partial(self._before_reduce, index)
            private.fsdp_before_reduce(unit, before_reduce, _refuse_graph)

    def _before_reduce(self, index: int, params: Sequence[Any]) -> None:
        used = tuple(private.fsdp_received_gradient(p) for p in params if p.sharded_param.requires_grad)
        if not any(used):
            return  # FSDP calls this once more at the end of the backward; nothing is reduced then
        self._backward.append((index, used))
        if (index, used) not in self._agreed_groups:
            self._compare((index, used), params, used)
            self._agreed_groups.add((index, used))

    def after_backward(self) -> None:
        """Compare the whole backward unless it used what every backward before it used.

        Which ranks must call: all data-parallel ranks, after each backward that reduced gradients.
        """
        backward = tuple(self._backward)
        self._backward.clear()
        if len(self._agreed_backwards) == 1 and backward in self._agreed_backwards:
            return
        self._compare(backward)
        self._agreed_backwards.add(backward)

    def note_calls(self, calls: Sequence[int]) -> None:
        """Note which blocks, by index, were called in a step without a backward."""
        self._calls.update(repr(tuple(calls)).encode())

    def compare_calls(self) -> None:
        """Compare the calls noted since the last time. Which ranks must call: all data-parallel ranks."""
        digest = self._calls.hexdigest()
        self._calls = hashlib.blake2b(digest_size=7)
        if not self._agree(digest):
            raise UnsupportedError(
                explain(
                    "the data-parallel ranks called different blocks, or in another order, in an evaluation",
                    "a block's parameters are gathered from all ranks together when it is called",
                    "let every rank call the same blocks, or name other blocks= (a container whose layers all run)",
                )
            )

    def _agree(self, mine: object) -> bool:
        digest = _digest(mine)
        here = torch.tensor([digest], dtype=torch.int64, device=self._device)
        everywhere = torch.empty(dist.get_world_size(self._group), dtype=torch.int64, device=self._device)
        dist.all_gather(list(everywhere.split(1)), here, group=self._group)
        return bool((everywhere == digest).all())

    def _compare(self, mine: object, params: Sequence[Any] = (), used: Sequence[bool] = ()) -> None:
        if self._all_compare() and self._agree(mine):
            return
        trainable = [p for p in params if p.sharded_param.requires_grad]
        unused = [p._param_fqn for p, is_used in zip(trainable, used, strict=True) if not is_used]
        named = f" (without a gradient here: {', '.join(map(str, unused[:5]))})" if unused else ""
        raise UnsupportedError(
            explain(
                f"the data-parallel ranks used different parameters in one backward{named}",
                "sharded gradients are reduced together, so every rank must use the same parameters in each backward",
                "let every rank use them, for example by adding 0.0 * parameter.sum() of the unused ones to the loss",
            )
        )

    def _all_compare(self) -> bool:
        """Whether all ranks compare now. In the first backward they do; later, a rank that sees nothing new does not.

        Waiting for such a rank in a collective would never end.
        """
        self._comparisons += 1
        if not self._agreed_backwards:
            return True
        return private.all_arrive(f"{self._key}/{self._comparisons}", self._group, PATIENCE)


def _refuse_graph() -> None:
    raise UnsupportedError(
        explain(
            "a backward with create_graph=True (a gradient penalty, a Hessian)",
            "sharded parameters are freed after the first backward, and gradients of gradients need them",
            "use one data-parallel rank or plain DDP for this module",
        )
    )


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")
