"""Say once, naming the user's line, that an operation gathers a whole sequence."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from lightning_4d.errors import user_line

_said: set[tuple[str, str, int]] = set()


class GatherWarning(UserWarning):
    """An operation without a rule for divided sequences gathers them: right, and slower."""


def report_gather(operation: str) -> None:
    """Warn on global rank 0, once for each operation and line."""
    where, frame = user_line()
    line = (operation, frame.f_code.co_filename if frame else "", frame.f_lineno if frame else 0)
    if line in _said:
        return
    _said.add(line)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    warnings.warn_explicit(
        f"{operation} at {where} has no rule for a sequence that is divided among ranks: it gathers the whole tensor "
        "on every rank, which gives the right result and takes more time and memory.",
        GatherWarning,
        filename=line[1] or "<unknown>",
        lineno=line[2],
        module=frame.f_globals.get("__name__", "") if frame else "",
        registry={},
    )
