"""Ranks that share a step's activations run the same operations, also where the user's code looks at its rank.

An operation on a divided activation communicates. Under ``if trainer.is_global_zero:`` one rank alone would wait for
the others, or take what they send for something else. So once code in a step has asked for its rank, the ranks compare
what they do next, and refuse when it is not the same. A step that does not ask compares nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_4d.errors import UnsupportedError, explain, user_line

_current: SameWay | None = None
_END = "the end of the step"


class SameWay:
    """Compares what the ranks of one group do, where their way may depend on the rank.

    Args:
        group: the ranks that run each step together.
        device: on which the group communicates.
        early: exceptions that end a step on purpose.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, early: tuple[type[BaseException], ...]) -> None:
        self._group, self._device, self._early = group, device, early
        self._name = ""
        self._asked = False

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Watch one step. Which ranks must call: all of the group.

        Raises:
            UnsupportedError: on all ranks of the group, that they went different ways.
        """
        global _current
        before, _current = _current, self
        self._name, self._asked = name, False
        try:
            yield
            self.compare(_END)
        except self._early:
            self.compare(_END)
            raise
        finally:
            _current = before

    def ask(self) -> None:
        """Note that the step has asked for its rank."""
        self._asked = True

    def compare(self, what: str) -> None:
        """Compare what comes next with the other ranks, if the step has asked for its rank since the last time."""
        if not self._asked:
            return
        self._asked = False
        what = what if what == _END else f"{what} at {user_line()[0]}"
        mine = torch.tensor([zlib.crc32(what.encode())], dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everyone, mine, group=self._group)
        if len({int(each) for each in everyone}) > 1:
            self._refuse(what)

    def _refuse(self, what: str) -> None:
        ways: list[Any] = [None] * self._group.size()
        dist.all_gather_object(ways, what, group=self._group)
        other = next(rank for rank, way in enumerate(ways) if way != ways[0])
        raise UnsupportedError(
            explain(
                f"{self._name} asked for its rank (trainer.is_global_zero, global_rank or local_rank), and then ranks "
                f"that work on the same samples went different ways: one to {ways[0]}, another to {ways[other]}",
                "what uses an activation that is divided among ranks, or a block, needs all of them",
                "compute the value before the `if`, and print or write it inside",
            )
        )


def asked_for_rank() -> None:
    """Say that code asks which rank it runs on. Outside of steps nothing happens."""
    if _current is not None:
        _current.ask()


def together(what: str) -> None:
    """Say that something follows which the ranks of the step have to do together.

    Which ranks must call: all that run the step together, if any does.

    Raises:
        UnsupportedError: see :meth:`SameWay.step`.
    """
    if _current is not None:
        _current.compare(what)
