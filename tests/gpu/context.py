"""Ring, Ulysses and hybrid attention of several gloo ranks on one GPU, against attention on one process.

    python -m tests.gpu.context                # bf16 and fp32, with masks, on the GPU that is there
    python -m tests.gpu.context --tiny         # seconds on a CPU

gloo sends from CPU memory only, so what ranks exchange goes through it here; all else is the code that trains.
Prints one JSON line per case: the largest errors of the result and of the gradients, relative to the largest number,
and those of attention on one process, both against fp64 on the CPU. Exits with 1 if ours is more than twice as far.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor

from lightning_4d.parallel.context import ring
from lightning_4d.parallel.context.attention import context_attention
from lightning_4d.parallel.context.groups import make_groups
from lightning_4d.parallel.context.ring import take_runs


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    is_causal: bool
    masked: bool
    key_heads: int
    size: int
    length: int

    def tensors(self) -> list[Tensor]:
        """Queries, keys, values and the gradient of the result, in fp64 on the CPU, the same on all ranks."""
        generator = torch.Generator().manual_seed(0)
        heads = (8, self.key_heads, self.key_heads, 8)
        made = [torch.randn(2, h, self.length, self.size, generator=generator) for h in heads]
        return [tensor.to(self.dtype).double() for tensor in made]

    def mask(self) -> Tensor | None:
        """Documents of 100 positions."""
        document = torch.arange(self.length) // 100
        return torch.tril(document[:, None] == document) if self.masked else None


def cases(tiny: bool) -> list[Case]:
    length = 66 if tiny else 2050
    return [
        Case(dtype, is_causal, masked, key_heads, size, length)
        for dtype in (torch.bfloat16, torch.float32)
        for is_causal, masked in ((True, False), (False, False), (False, True))
        for key_heads in (8, 2)
        for size in (60, 128)
    ]


def attend(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """On this process alone."""
    *inputs, grad = (tensor.to(device, dtype) for tensor in case.tensors())
    for tensor in inputs:
        tensor.requires_grad_()
    mask = case.mask()
    out = F.scaled_dot_product_attention(
        *inputs, None if mask is None else mask.to(device), 0.0, case.is_causal, enable_gqa=case.key_heads != 8
    )
    out.backward(grad)
    return [out.detach(), *(tensor.grad for tensor in inputs)]  # type: ignore[misc]


def attend_together(case: Case, device: torch.device, ulysses: int) -> list[Tensor]:
    """This rank's part, gathered."""
    groups = make_groups([list(range(dist.get_world_size()))], ulysses)
    layout = groups.layout(case.length)
    runs = layout.runs[groups.rank]
    *inputs, grad = (take_runs(tensor, 2, runs).to(device, case.dtype) for tensor in case.tensors())
    for tensor in inputs:
        tensor.requires_grad_()
    mask = case.mask()
    out = context_attention(
        *inputs,  # type: ignore[arg-type]
        groups,
        layout,
        layout,
        mask=None if mask is None else mask.to(device),
        is_causal=case.is_causal,
    )
    out.backward(grad)
    found = []
    for part in (out.detach(), *(tensor.grad for tensor in inputs)):
        parts: list[Any] = [None] * groups.size
        dist.all_gather_object(parts, part.cpu())  # type: ignore[union-attr]
        padded = [F.pad(p, (0, 0, 0, layout.longest - p.shape[2])) for p in parts]
        found.append(take_runs(torch.cat(padded, 2), 2, layout.order))
    return found


class HopThroughCPU(ring.Hop):
    """A hop of a tensor on a GPU, by gloo."""

    def __init__(self, sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__(sent.cpu(), torch.empty_like(received, device="cpu"), group)
        self._device = received.device

    def wait(self) -> Tensor:
        return super().wait().to(self._device)


def exchange_through_cpu() -> None:
    """Let the ring and the all-to-all of this process go through CPU memory."""
    all_to_all = dist.all_to_all_single

    def staged(received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> None:
        arrived = torch.empty_like(received, device="cpu")
        all_to_all(arrived, sent.cpu(), *args, **kwargs)
        received.copy_(arrived)

    dist.all_to_all_single = staged  # type: ignore[assignment]
    ring.Hop = HopThroughCPU  # type: ignore[misc]


def errors(actual: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double().cpu() - e).abs().max() / e.abs().max()) for a, e in zip(actual, exact, strict=True)]


def run(rank: int, ranks: int, port: int, ulysses: int, tiny: bool) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exchange_through_cpu()
    wrong = 0
    for case in cases(tiny):
        exact = attend(case, torch.device("cpu"), torch.float64)
        ours = errors(attend_together(case, device, ulysses), exact)
        alone = errors(attend(case, device, case.dtype), exact)
        is_right = all(mine <= 2 * theirs + 1e-6 for mine, theirs in zip(ours, alone, strict=True))
        wrong += not is_right
        if rank == 0:
            line = {"case": str(case), "ulysses": ulysses, "ours": ours, "alone": alone, "right": is_right}
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()
    sys.exit(wrong > 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    for ulysses in (1, arguments.ranks):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        multiprocessing.spawn(run, (arguments.ranks, port, ulysses, arguments.tiny), arguments.ranks)


if __name__ == "__main__":
    main()
