"""Tensors in parts along two axes at once: a sequence of which each rank holds some features of some positions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.context import make_groups, whole
from lightning_4d.parallel.context.communication import Sharding, cut
from lightning_4d.parallel.context.groups import ContextGroups
from lightning_4d.parallel.context.tensor import guard_autograd_functions, wrap
from lightning_4d.parallel.tensor import rules  # noqa: F401
from lightning_4d.parallel.tensor.group import TensorGroup
from lightning_4d.parallel.tensor.group import cut as cut_features
from lightning_4d.parallel.tensor.sharded import Runtime, Sharded, whole_values
from tests.parallel.tensor.test_rules import CASES, drawn


def two_axes() -> tuple[ContextGroups, Runtime]:
    """Two ranks of each axis; tensor-parallel ranks are neighbours."""
    guard_autograd_functions()
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    runtime = Runtime(TensorGroup(pairs[rank // 2], 2, rank % 2))
    runtime.quiet = True
    return make_groups([[0, 2], [1, 3]], 1), runtime


def entered(x: Tensor, sequence: int, features: int, parts: int, groups: ContextGroups, runtime: Runtime) -> Tensor:
    sharded = Sharded(cut_features(x, features, parts, runtime.group, "test"), features, parts, runtime)
    sharding = Sharding(sequence, groups.layout(x.shape[sequence]), groups)
    return wrap(cut(sharded, sharding), sharding)


def wrong_cases() -> list[str]:
    """Every rule of tensor parallelism, with another dim as the sequence."""
    groups, runtime = two_axes()
    wrong = []
    for name, (function, features, parts, sizes, plain) in CASES.items():
        for sequence in range(len(sizes)):
            if sequence == features or sizes[sequence] < 2:
                continue
            expected = _run(function, sizes, plain, lambda x: x)

            def enter(x: Tensor, sequence: int = sequence, features: int = features, parts: int = parts) -> Tensor:
                return entered(x, sequence, features, parts, groups, runtime)

            actual = _run(function, sizes, plain, enter)
            dist.all_reduce(actual[2], group=groups.group)  # gradients of parameters are averaged
            actual[2] /= groups.size
            for what, mine, theirs in zip(("output", "gradient of x", "of w"), actual, expected, strict=True):
                if mine.shape != theirs.shape or not torch.allclose(mine, theirs, rtol=1e-11, atol=1e-11):
                    wrong.append(f"{name}, sequence in dim {sequence}: {what}")
    return wrong


def _run(
    function: Callable[..., Any], sizes: tuple[int, ...], plain: tuple[int, ...], enter: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    x, w = drawn(*sizes).requires_grad_(), torch.nn.Parameter(drawn(*plain))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = whole_values(whole(function(enter(x * 1), w)))
    (result * torch.linspace(0.5, 2.0, result.numel(), dtype=torch.float64).view(result.shape)).sum().backward()
    return [result.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in (x, w))]


def test_every_rule_of_tensor_parallelism_on_divided_sequences(pool):
    assert pool.run(4, wrong_cases) == [[]] * 4


def pooled_head() -> list[Tensor]:
    """Picked positions, which are gathered, meet a weight in parts."""
    groups, runtime = two_axes()
    whole_weight = drawn(6, 4)
    weight = Sharded(runtime.group.cut(whole_weight, 0), 0, 1, runtime)
    x = drawn(2, 6, 4)
    sharding = Sharding(1, groups.layout(6), groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = torch.nn.functional.linear(wrap(cut(x, sharding), sharding)[:, ::2], weight)
    return [whole_values(result), torch.nn.functional.linear(x[:, ::2], whole_weight)]


def test_a_gathered_view_meets_a_weight_in_parts(pool):
    for actual, expected in pool.run(4, pooled_head):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def changed_position() -> str:
    groups, runtime = two_axes()
    x = entered(drawn(2, 6, 4), 1, 2, 1, groups, runtime)
    try:
        x[:, 0].add_(1.0)
    except UnsupportedError as error:
        return str(error)
    return "nothing was raised"


def test_a_position_is_a_copy_that_cannot_be_changed(pool):
    for message in pool.run(4, changed_position):
        assert message.startswith("add_ changes a view")
