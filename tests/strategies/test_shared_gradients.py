"""Autograd gives one tensor to several parameters, or views of it; each parameter's gradient is its own all the same.

So it is for the terms of a sum, and, where a microbatch has one row, for a class token and positions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_4d import NDStrategy, ParallelLayout
from lightning_4d._torch_private import is_shared_gradient
from tests.harness import compare, full_tensors, reference, staged_tensors, train
from tests.modules import Block, ViT

LENGTH, DIM = 10, 16


class SumBlock(Block):
    """Sums of parameters of one shape: weights, biases, offsets that one row adds as they are; and a sum of one."""

    def __init__(self, views: bool) -> None:
        super().__init__(DIM, 2, fused_qkv=False, causal=False)
        self.views = views  # torch itself adds to shared views in place, so without further batches only
        self.weight, self.update = (nn.Parameter(0.1 * torch.randn(DIM, DIM)) for _ in range(2))
        if views:
            self.left, self.right = (nn.Parameter(torch.eye(DIM) + 0.1 * torch.randn(DIM, DIM)) for _ in range(2))
        self.bias, self.shift = (nn.Parameter(0.1 * torch.randn(DIM)) for _ in range(2))
        self.level = nn.Parameter(0.1 * torch.randn(DIM))  # its gradient is one number, seen as many
        self.offset, self.other = (nn.Parameter(0.1 * torch.randn(1, LENGTH, DIM)) for _ in range(2))

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = super().forward(x_BTC) * (1 + self.level.sum()) + self.offset + self.other
        x_BTC = F.linear(x_BTC, self.weight + self.update, self.bias - self.shift)
        return x_BTC @ (self.left.T + self.right.T) if self.views else x_BTC


class Sums(ViT):
    """A class token and positions that share a row of a gradient, and blocks of sums."""

    def __init__(self, views: bool = False, **kwargs: Any) -> None:
        super().__init__(dim=DIM, layers=4, **kwargs)
        self.positions = nn.Parameter(self.positions.detach()[None].clone())
        self.blocks = nn.Sequential(*(SumBlock(views) for _ in range(4)))
        self.update = nn.Parameter(0.1 * torch.randn_like(self.head.weight))

    def forward(self, patches_BPC: Tensor) -> Tensor:
        x_BPC = self.patch(patches_BPC)
        x_BTC = torch.cat((self.class_token.expand(len(x_BPC), -1, -1), x_BPC), dim=1) + self.positions
        return F.linear(self.norm(self.blocks(x_BTC))[:, 0], self.head.weight + self.update, self.head.bias)


ONE_ROW = {"module": {"batch_size": 1}, "trainer": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}}
MICROBATCHES = {"strategy": {"num_microbatches": 4}, "trainer": {"gradient_clip_val": 0.05}}
VIEWS = {"module": {"views": True}, "strategy": {"num_microbatches": 4}}
ZERO_BUBBLE = {"strategy": {"num_microbatches": 4, "pipeline_schedule": "zbv"}}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"data_parallel_shard_size": 2}, ONE_ROW),
    "cp": ({"context_parallel_size": 2}, ONE_ROW),
    "tp": ({"tensor_parallel_size": 2}, ONE_ROW),
    "dp.tp": ({"data_parallel_shard_size": 2, "tensor_parallel_size": 2}, ONE_ROW),
    "cp.tp": ({"context_parallel_size": 2, "tensor_parallel_size": 2}, ONE_ROW),
    "pp": ({"pipeline_parallel_size": 2}, MICROBATCHES),
    "pp, views": ({"pipeline_parallel_size": 2}, VIEWS),
    "pp.dp, views": ({"pipeline_parallel_size": 2, "data_parallel_shard_size": 2}, VIEWS),
    "pp, zero bubble": ({"pipeline_parallel_size": 2}, ZERO_BUBBLE),
    "pp.tp": ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, MICROBATCHES),
    "pp.tp, zero bubble": ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, ZERO_BUBBLE),
    "pp.dp, zero bubble": ({"pipeline_parallel_size": 2, "data_parallel_shard_size": 2}, ZERO_BUBBLE),
}


BY_DEFAULT = {"tp", "dp.tp", "pp, views", "pp, zero bubble", "pp.tp"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in CASES]
)
def test_equal_ddp(pool, name):
    sizes, case = CASES[name]
    sizes = {"data_parallel_shard_size": 1, **sizes}
    world = torch.Size(sizes.values()).numel()
    layout = ParallelLayout.resolve(world, **sizes)
    module, trainer = partial(Sums, **case.get("module", {})), case.get("trainer", {})
    expected = reference(pool, layout.data_parallel_size, module, **trainer)
    gather = staged_tensors if "pipeline_parallel_size" in sizes else full_tensors
    strategy = partial(NDStrategy, **sizes, **case.get("strategy", {}))
    for rank, mine in enumerate(pool.run(world, train, module, strategy, gather=gather, **trainer)):
        compare(mine, expected[layout.data_parallel_rank(rank)], rtol=1e-10, label=f"rank {rank} ")


def shared(function: Any, *shapes: tuple[int, ...]) -> list[bool]:
    """Whether each gradient was shared when autograd gave it, to tensors of these shapes."""
    found: dict[int, bool] = {}
    kept = []
    views = []
    for number, shape in enumerate(shapes):
        view = nn.Parameter(torch.randn(shape)).view(shape)

        def hook(gradient: Tensor, number: int = number) -> None:
            found[number] = is_shared_gradient(gradient)
            kept.append(gradient)  # as a parameter would

        view.register_hook(hook)
        views.append(view)
    function(*views).square().sum().backward()
    return [found[number] for number in range(len(shapes))]


def test_which_gradients_are_shared():
    x = torch.randn(3, 4)
    assert shared(lambda w, b: F.linear(x, w, b), (5, 4), (5,)) == [False, False]
    assert shared(lambda w: x @ w, (4, 4)) == [False]
    assert shared(lambda w: x @ w.T, (4, 4)) == [False]
    assert shared(lambda w: F.embedding(torch.tensor([1, 2]), w), (4, 4)) == [False]
    assert shared(lambda w, b: F.layer_norm(x, (4,), w, b), (4,), (4,)) == [False, False]
    assert shared(lambda w, b: F.conv2d(x[None, None], w, b), (2, 1, 2, 2), (2,)) == [False, False]
    assert any(shared(lambda a, b: a + b, (4, 4), (4, 4)))
    assert any(shared(lambda a, b: a + b.T, (4, 4), (4, 4)))
    assert any(shared(lambda a, b: torch.cat((a.expand(1, -1), x[:1])) + b, (1, 4), (2, 4)))
    assert any(shared(lambda a, b: b + torch.cat((a.expand(1, -1), x[:1])), (1, 4), (2, 4)))
    assert shared(lambda a: a.sum(), (4, 4)) == [True]  # its elements are one number in memory
