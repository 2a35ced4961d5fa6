"""Let all pipeline ranks know what the last stage found: the loss, logged values, results.

Numbers travel in one message of fixed size per step. What they are (names, options) travels only when it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Announcement:
    """One kind of message from the rank of the last stage to all pipeline ranks.

    Args:
        group: the pipeline ranks.
        source: the rank of the last stage within the group.
        device: where the group's backend communicates.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group = group
        self._source = source
        self._device = device
        self._description: Any = None
        self._dtypes: tuple[torch.dtype, ...] = ()

    def exchange(self, description: Any = None, numbers: Sequence[Tensor] = ()) -> tuple[Any, list[Tensor]]:
        """Return the source's ``description`` and 0-d ``numbers`` on every rank.

        Args:
            description: anything that can be pickled and compared; on the source.
            numbers: 0-d tensors; on the source. They travel as float64.

        Which ranks must call: all ranks of the group.
        """
        is_source = dist.get_rank(self._group) == self._source
        if is_source:
            dtypes = tuple(number.dtype for number in numbers)
            changed = description != self._description or dtypes != self._dtypes
            message = self._message(changed, numbers, len(self._dtypes))
        else:
            message = torch.empty(1 + len(self._dtypes), dtype=torch.float64, device=self._device)
        dist.broadcast(message, group=self._group, group_src=self._source)
        if message[0] != 0:
            box = [(description, dtypes)] if is_source else [None]  # pyright: ignore[reportPossiblyUnboundVariable]
            dist.broadcast_object_list(box, group=self._group, group_src=self._source, device=self._device)
            self._description, self._dtypes = box[0]  # pyright: ignore[reportGeneralTypeIssues]
            message = self._message(False, numbers, len(self._dtypes)) if is_source else self._empty()
            dist.broadcast(message, group=self._group, group_src=self._source)
        return self._description, [v.to(dtype) for v, dtype in zip(message[1:].unbind(), self._dtypes, strict=True)]

    def _empty(self) -> Tensor:
        return torch.empty(1 + len(self._dtypes), dtype=torch.float64, device=self._device)

    def _message(self, changed: bool, numbers: Sequence[Tensor], size: int) -> Tensor:
        flag = torch.full((), float(changed), dtype=torch.float64, device=self._device)
        if changed:
            return torch.cat([flag.reshape(1), flag.new_zeros(size)])
        values = [number.detach().to(device=self._device, dtype=torch.float64) for number in numbers]
        return torch.stack([flag, *values])
