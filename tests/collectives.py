"""Counts the collectives that this rank takes part in, whoever starts them: Python, DDP's reducer, FSDP2, DTensor."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PART, IGNORED = "tests::part", "tests::ignored"
NAMESPACE = "c10d::"  # every collective passes one of its operators exactly once, also those of DTensor
NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}


class CollectiveCounter:
    """Counts from `start` to `stop`, divided into parts by `part` and without what happens inside `ignored`.

    It is one profiler session from start to stop: sessions that begin inside an operator (an optimizer's step) and end
    outside crash torch 2.13. It takes tens of milliseconds, so a run's collectives can be counted but not its time.
    """

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        self.running = False

    def start(self) -> None:
        """Begin counting the first part."""
        self._profile.start()
        self.running = True

    def stop(self) -> list[Counter[str]]:
        """End counting; the counts of each part that has been closed by `part`, and last those of the open one."""
        self._profile.stop()
        self.running = False
        return _count(self._profile.events() or [])

    def part(self) -> None:
        """Close a part."""
        with record_function(PART):
            pass

    def ignored(self) -> AbstractContextManager[Any]:
        """Leave out what happens inside the `with`."""
        return record_function(IGNORED)


@contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """Collectives of this rank inside the `with`, by name ("all_gather", "reduce_scatter", ...); filled at its end."""
    counts: Counter[str] = Counter()
    counter = CollectiveCounter()
    counter.start()
    try:
        yield counts
    finally:
        counts.update(counter.stop()[-1])


def _count(events: Sequence[Any]) -> list[Counter[str]]:
    ends = sorted(event.time_range.start for event in events if event.name == PART)
    ignored = [event.time_range for event in events if event.name == IGNORED]
    parts: list[Counter[str]] = [Counter() for _ in range(len(ends) + 1)]
    for event in events:
        start = event.time_range.start
        if event.name.startswith(NAMESPACE) and not any(span.start <= start <= span.end for span in ignored):
            name = NAMES[
                event.name.removeprefix(NAMESPACE)
            ]  # an operator that it does not know is an error, not a zero
            parts[bisect(ends, start)][name] += 1
    return parts


FUNCTIONAL = {  # of the namespaces below; each calls one of c10d's, below the dispatcher's modes
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "wait_tensor": None,
    "_wrap_tensor_autograd": None,
}
NAMESPACES = {
    "c10d": NAMES,
    "_c10d_functional": FUNCTIONAL,
    "_c10d_functional_autograd": FUNCTIONAL,
}


class CollectiveBytes(TorchDispatchMode):
    """Counts the bytes of the collectives that this rank takes part in while it is entered, by name.

    The bytes of one are those of the larger of what it reads and writes: of an all-reduce its tensor, of an all-gather
    the gathered one, of a reduce-scatter the one before. Reducers of C++ that run in backward are not seen: for tensor
    parallelism, not for DDP.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it makes of it comes by here again
        result = func(*args, **(kwargs or {}))
        names = NAMESPACES.get(func.namespace)
        if names is not None and (name := names[func.overloadpacket.__name__]) is not None:
            self.counts[name] += 1
            self.bytes[name] += max(map(_bytes, (*args, result)))
        return result


def _bytes(argument: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, Tensor))
