"""What context parallelism costs: processor time of attention, bytes on the wire, time of the sequence-sharded tensor.

    python -m tests.benchmarks context [--quick | --long]

Attention is causal, forward and backward, on 2 gloo ranks with one thread each. Its work is processor time of all
ranks, copies and communication threads included, over that of the same attention on one process, while another does
the same beside it. The tensor is timed on one rank, where it holds the whole sequence: what differs from plain tensors
is its own work alone.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor

from examples import train_gpt
from lightning_4d.parallel.blocks import find_blocks
from lightning_4d.parallel.context import ContextParallel, make_groups
from lightning_4d.parallel.context.attention import context_attention
from lightning_4d.parallel.context.communication import Sharding
from lightning_4d.parallel.context.ring import take_runs
from lightning_4d.parallel.context.tensor import wrap
from tests.benchmarks.report import machine

PAGE = Path(__file__).parents[2] / "docs" / "context.md"
RANKS, HEADS, SIZE = 2, 4, 64
START, END = "<!-- bench:context -->", "<!-- /bench -->"


def main(options: Sequence[str] = ()) -> None:
    """Measure and write the tables; with --quick measure little and write nothing, with --long take minutes more."""
    quick = "--quick" in options
    torch.set_num_threads(1)
    lengths = {2048: 1} if quick else {8192: 3, 16384: 2}
    lines = attention_table(lengths | ({32768: 1} if "--long" in options else {}))
    lines += ["", *tensor_table(length=512 if quick else 4096, repeats=3 if quick else 9)]
    print("\n".join(lines))
    if not quick:
        head, rest = PAGE.read_text().split(START, 1)
        PAGE.write_text(f"{head}{START}\n{machine()}:\n\n" + "\n".join(lines) + f"\n{END}{rest.split(END, 1)[1]}")


# ---------------------------------------------------------------------------------------------------------- attention


def attention_table(lengths: Mapping[int, int]) -> list[str]:
    """Work over one process's, and bytes that a rank sends, by length (with its repeats) and method."""
    lines = [
        "| T | one process, s | ring: work | Ulysses: work | ring: MiB sent by a rank (formula) | Ulysses: likewise |",
        "|---|---|---|---|---|---|",
    ]
    for length, repeats in lengths.items():
        alone, ring, ulysses = measure(length, repeats)
        ring_formula, ulysses_formula = expected_bytes(length)
        line = (
            f"| {length} | {alone:.2f} | {ring[0] / alone:.3f} | {ulysses[0] / alone:.3f} | "
            f"{ring[1] / 2**20:.2f} ({ring_formula / 2**20:.2f}) | "
            f"{ulysses[1] / 2**20:.2f} ({ulysses_formula / 2**20:.2f}) |"
        )
        print(line, flush=True)
        lines.append(line)
    return lines


def expected_bytes(length: int) -> tuple[int, int]:
    """Bytes that each rank sends, forward and backward, in fp32 with as many key heads as query heads.

    Ring: keys and values make ranks - 1 hops forward; in backward they and their gradients do. Ulysses: queries, keys,
    values and results, each way, all but the part that stays.
    """
    part = length // RANKS * HEADS * SIZE * 4
    return 3 * 2 * part * (RANKS - 1), 8 * part * (RANKS - 1) // RANKS


def measure(length: int, repeats: int) -> tuple[float, tuple[float, int], tuple[float, int]]:
    """Processor seconds on one process; of all ranks, and bytes per rank, for ring and Ulysses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    multiprocessing.spawn(_rank, (port, length, repeats, results), RANKS)
    found = sorted(results.get() for _ in range(RANKS))
    alone = statistics.mean(each[1] for each in found)
    ring, ulysses = ((sum(each[i][0] for each in found), found[0][i][1]) for i in (2, 3))
    return alone, ring, ulysses


def _rank(rank: int, port: int, length: int, repeats: int, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, HEADS, length, SIZE, generator=generator) for _ in range(4)]
    alone: list[float] = []
    found: dict[int, list[float]] = {1: [], RANKS: []}
    sent: dict[int, int] = {}
    for _ in range(repeats):  # in turn, so that what else the machine does meets all of them alike
        alone.append(_processor_time(lambda: _attend(tensors)))  # on both, so that cores are as busy as below
        dist.barrier()
        for ulysses in found:
            parts, attend = _divided(tensors, ulysses, length)
            with _counted() as count:
                found[ulysses].append(_processor_time(lambda parts=parts, attend=attend: _attend(parts, attend)))
            sent[ulysses] = count[0]
            dist.barrier()
    mean = statistics.mean
    results.put((rank, mean(alone), *((mean(found[u]), sent[u]) for u in (1, RANKS))))
    dist.destroy_process_group()


def _divided(tensors: list[Tensor], ulysses: int, length: int) -> tuple[list[Tensor], Callable[..., Tensor]]:
    groups = make_groups([list(range(RANKS))], ulysses)
    layout = groups.layout(length)
    parts = [take_runs(tensor, 2, layout.runs[groups.rank]).contiguous() for tensor in tensors]
    return parts, lambda q, k, v: context_attention(q, k, v, groups, layout, layout, is_causal=True)


def _alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attend(tensors: list[Tensor], attend: Callable[..., Tensor] = _alone) -> None:
    q, k, v, grad = (tensor.detach() for tensor in tensors)
    attend(*(tensor.requires_grad_() for tensor in (q, k, v))).backward(grad)


def _processor_time(function: Callable[[], None]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the bytes that this rank sends to others."""
    count = [0]
    send, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def counting_send(operations: list[Any]) -> Any:
        count[0] += sum(o.tensor.nbytes for o in operations if o.op is dist.isend)
        return send(operations)

    def counting_all_to_all(received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
        count[0] += sent.nbytes * (RANKS - 1) // RANKS
        return all_to_all(received, sent, *args, **kwargs)

    dist.batch_isend_irecv, dist.all_to_all_single = counting_send, counting_all_to_all  # type: ignore[assignment]
    try:
        yield count
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single = send, all_to_all


# ------------------------------------------------------------------------------------------------------------- tensor


def tensor_table(length: int, repeats: int) -> list[str]:
    """Microseconds that the tensor adds to an operation, and its share of a step of the example GPT."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        added = operations_overhead(2000)
        plain, share = step_times(length, repeats)
    finally:
        dist.destroy_process_group()
    lines = ["| operation | µs added |", "|---|---|"]
    lines += [f"| {name} | {microseconds:.1f} |" for name, microseconds in added.items()]
    return [
        *lines,
        "",
        f"A step of the example GPT (4 blocks) at T = {length}: {plain:.3f} s plain, {share:+.1%} with the tensor.",
    ]


def operations_overhead(count: int) -> dict[str, float]:
    """By operation, on tensors so small that only the calls cost."""
    groups = make_groups([[0]], 1)
    x = torch.randn(1, 4, 8)
    divided = wrap(x, Sharding(1, groups.layout(4), groups))
    weight, table = torch.randn(8, 8), torch.randn(4, 8)
    operations: dict[str, Callable[[Tensor], Any]] = {
        "x.shape": lambda x: x.shape,
        "x + x": lambda x: x + x,
        "x * table": lambda x: x * table,
        "F.linear": lambda x: F.linear(x, weight),
        "view": lambda x: x.view(1, 4, 2, 4),
        "transpose": lambda x: x.transpose(1, 2),
        "x[..., :4]": lambda x: x[..., :4],
        "F.layer_norm": lambda x: F.layer_norm(x, (8,)),
        "chunk": lambda x: x.chunk(2, dim=-1),
        "cat": lambda x: torch.cat((x, x), dim=-1),
    }
    return {name: 1e6 * (_wall(f, divided, count) - _wall(f, x, count)) for name, f in operations.items()}


def _wall(function: Callable[[Tensor], Any], x: Tensor, count: int) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count // 5):
            function(x)
        times.append((time.perf_counter() - start) / (count // 5))
    return min(times)


def step_times(length: int, repeats: int) -> tuple[float, float]:
    """Seconds of forward and backward on one rank, and the share that the tensor, with all of the sequence, adds."""
    models = []
    for divide in (False, True):
        torch.manual_seed(0)
        model = train_gpt.GPT()
        if divide:
            context = ContextParallel(model, find_blocks(model), make_groups([[0]], 1))
            context.install_inside()
            context.install_outside()
        models.append(model)
    tokens = torch.randint(256, (1, length))
    pairs: list[list[float]] = []
    for _ in range(repeats + 1):
        pair = []
        for model in models:
            start = time.process_time()
            train_gpt.cross_entropy(model(tokens), tokens).backward()
            pair.append(time.process_time() - start)
        pairs.append(pair)
    pairs = pairs[1:]  # the first one warms up, and finds the sequence
    return min(plain for plain, _ in pairs), statistics.median(divided / plain for plain, divided in pairs) - 1
