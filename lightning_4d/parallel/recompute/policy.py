"""Which activations to keep: the choices a user has, checked when they are made."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

from lightning_4d.errors import UnsupportedError, explain

POLICIES = ("none", "full", "sqrt", "every_k", "selective", "budget")


@dataclass(frozen=True)
class RecomputePolicy:
    """What a module's blocks keep between forward and backward.

    Args:
        kind: ``"none"`` keeps everything. ``"full"`` keeps each block's input and recomputes the block. ``"sqrt"``
            keeps the input of each *segment*, a run of blocks, and recomputes a segment from there. ``"every_k"``
            recomputes every k-th block and leaves the others. ``"selective"`` keeps the outputs of matrix products,
            convolutions and attention, and recomputes the cheap rest. ``"budget"`` recomputes as few blocks as fit
            ``budget_bytes``.
        segments: for ``"sqrt"``: how many segments; ``"auto"`` measures the first forward, which runs as ``"full"``,
            and takes the number with the lowest peak.
        nested: for ``"sqrt"``: a segment's recompute keeps block inputs only, and each block is then recomputed once
            more. Two extra forwards, less memory.
        every_k: for ``"every_k"``: 1 is every block, 2 every second.
        budget_bytes: for ``"budget"``: bytes that all blocks together may hold at the peak of one forward and backward.
        offload: hold kept block inputs in pinned CPU memory. Of effect for tensors on CUDA only.

    Raises:
        UnsupportedError: an unknown kind, a number below 1, or an option that belongs to another kind.
    """

    kind: str = "sqrt"
    segments: int | Literal["auto"] = "auto"
    nested: bool = False
    every_k: int | None = None
    budget_bytes: int | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        if self.kind not in POLICIES:
            near = difflib.get_close_matches(str(self.kind), POLICIES, n=1, cutoff=0.0)[0]
            raise UnsupportedError(explain(f"policy={self.kind!r}", f"a policy is one of {POLICIES}", f"use {near!r}"))
        _belongs("segments", self.segments, "auto", self.kind, "sqrt")
        _belongs("nested", self.nested, False, self.kind, "sqrt")
        _belongs("every_k", self.every_k, None, self.kind, "every_k")
        _belongs("budget_bytes", self.budget_bytes, None, self.kind, "budget")
        if self.kind == "every_k":
            _at_least_one("every_k", self.every_k, 2)
        if self.kind == "budget":
            _at_least_one("budget_bytes", self.budget_bytes, 2**30)
        if self.segments != "auto":
            _at_least_one("segments", self.segments, 4)

    @property
    def needs_sizes(self) -> bool:
        """Whether the plan depends on how many bytes blocks hold."""
        return self.kind == "budget" or (self.kind == "sqrt" and self.segments == "auto")


def _belongs(name: str, value: Any, default: Any, kind: str, owner: str) -> None:
    if kind != owner and value != default:
        raise UnsupportedError(
            explain(
                f"{name}={value!r} with policy={kind!r}", f"{name} is for policy={owner!r} only", f"leave {name} out"
            )
        )


def _at_least_one(name: str, value: Any, example: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedError(
            explain(f"{name}={value!r}", f"{name} is a whole number of at least 1", f"use {name}={example}")
        )
