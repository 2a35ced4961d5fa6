"""Each rule gives what the function gives on whole tensors: output, gradients, and no gather where none is meant."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.tensor import rules  # noqa: F401
from lightning_4d.parallel.tensor.group import TensorGroup
from lightning_4d.parallel.tensor.shapes import view_split
from lightning_4d.parallel.tensor.sharded import Runtime, Sharded, whole_values


def runtime() -> Runtime:
    return Runtime(TensorGroup(dist.group.WORLD, dist.get_world_size(), dist.get_rank()))


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(math.prod(sizes)), dtype=torch.float64)


def routed(x: Tensor, w: Tensor) -> Tensor:
    """Each expert takes the rows that chose it, as mixtures of experts do."""
    chosen = x.detach() > 0
    y = torch.zeros(x.shape, dtype=x.dtype)
    for expert in range(2):
        rows, columns = torch.where(chosen == expert)
        y = y.index_put((rows, columns), x[rows, columns] * (expert + w[0]))
    return y


def changed_between_gathers(x: Tensor, w: Tensor) -> Tensor:
    y = x.detach() * 1
    before = y.cumsum(1)
    y.mul_(3)
    return before + y.cumsum(1) + x


# name: the function of (x, plain), the divided dim of x, its parts, the sizes of x, those of the plain tensor
Case = tuple[Callable[[Any, Any], Any], int, int, tuple[int, ...], tuple[int, ...]]
CASES: dict[str, Case] = {
    "heads": (lambda x, w: x.view(2, 3, 4, 2).transpose(1, 2) * w, 2, 1, (2, 3, 8), (3, 1)),
    "qkv chunk": (lambda x, w: sum(t.view(2, 3, 4, 2).sum(3) for t in x.chunk(3, -1)), 2, 3, (2, 3, 24), (1,)),
    "qkv split": (lambda x, w: x.split(8, dim=2)[1] * x.split([8, 16], dim=2)[0], 2, 3, (2, 3, 24), (1,)),
    "qkv view": (lambda x, w: x.reshape(2, 3, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)[2], 2, 3, (2, 3, 24), (1,)),
    "qkv slices": (lambda x, w: x[..., :8] + x[..., 16:] * w, 2, 3, (2, 3, 24), (8,)),
    "merged heads": (lambda x, w: torch.bmm(x.reshape(8, 3, 2), w.expand(8, 2, 5)), 1, 1, (2, 4, 3, 2), (2, 5)),
    "broadcast": (lambda x, w: (x + w) * w.sum() - x.exp() / 2, 1, 1, (3, 4), (4,)),
    "plain first": (lambda x, w: w - x * 2 + torch.where(x > 0, x, w), 1, 1, (3, 4), (3, 4)),
    "in place": (lambda x, w: (x * 1).mul_(w).add_(x).clamp_(-1, 1), 1, 1, (3, 4), (4,)),
    "matmul left": (lambda x, w: x @ w, 0, 1, (4, 3), (3, 5)),
    "matmul sum": (lambda x, w: x @ w, 1, 1, (3, 4), (4, 5)),
    "matmul right": (lambda x, w: w @ x, 1, 1, (3, 4), (2, 3)),
    "tied head": (lambda x, w: w @ x.t(), 0, 1, (6, 3), (2, 5, 3)),
    "einsum": (lambda x, w: torch.einsum("bhtd,bhsd->bhts", x, w), 1, 1, (2, 4, 3, 2), (2, 4, 5, 2)),
    "einsum sum": (lambda x, w: torch.einsum("bth,hc->btc", x, w), 2, 1, (2, 3, 4), (4, 5)),
    "softmax": (lambda x, w: F.softmax(x + w, dim=-1), 1, 1, (2, 4, 3, 3), (3, 3)),
    "sum": (lambda x, w: x.sum() + x.mean(dim=(0, 1)).sum() + x.sum(0).pow(2).sum(), 1, 1, (3, 4), (1,)),
    "layer norm": (lambda x, w: F.layer_norm(x, (4,), w, w), 2, 1, (2, 3, 4), (4,)),
    "layer norm beside": (lambda x, w: F.layer_norm(x, (4,), w, w * 2), 1, 1, (2, 6, 4), (4,)),
    "rms norm": (lambda x, w: F.rms_norm(x, (4,), w), 2, 1, (2, 3, 4), (4,)),
    "head linear": (lambda x, w: F.linear(x, w, w[:, 0]), 2, 1, (2, 3, 4, 5), (6, 5)),
    "cat": (lambda x, w: torch.cat((x, w, x * 2), dim=-1), 1, 1, (3, 4, 2), (3, 4, 5)),
    "cat to an empty one": (lambda x, w: torch.cat((torch.tensor([]), x, x * 2), dim=-2), 1, 1, (3, 4, 2, 2), (1,)),
    "cat to an empty one only": (lambda x, w: torch.cat((torch.tensor([]), x), dim=0) * 2, 1, 1, (3, 4), (1,)),
    "stack": (lambda x, w: torch.stack((x, w), dim=1), 1, 1, (3, 4), (3, 4)),
    "repeat": (lambda x, w: x.repeat_interleave(3, dim=1)[:, :, None].expand(2, 12, 2, 5), 1, 1, (2, 4, 5), (1,)),
    "rotate": (lambda x, w: x * w + torch.cat((-x[..., 2:], x[..., :2]), -1), 2, 1, (2, 3, 4, 4), (3, 1, 4)),
    "index": (lambda x, w: x[:, None, ..., 0][torch.tensor([1, 0])] + x[1:, -1:, :, 1], 2, 1, (2, 3, 4, 2), (1,)),
    "numpy's names": (
        lambda x, w: x.mean(axis=1, keepdims=True) * w + x.sum(axis=-1, keepdims=True),
        2,
        1,
        (2, 3, 4, 2),
        (2,),
    ),
    "numpy's names of the divided dim": (
        lambda x, w: x.mean(axis=2) + x.sum(axis=(1, 2))[:, None],
        2,
        1,
        (2, 3, 4),
        (1,),
    ),
    "positional keepdim": (
        lambda x, w: torch.linalg.vector_norm(x, 2, 1, True) + x.var(1, True, True),
        2,
        1,
        (2, 3, 4),
        (1,),
    ),
    "input by name": (
        lambda x, w: torch.permute(input=x, dims=(1, 0, 2)) + torch.where(condition=x.mT > 0, input=w, other=x.mT).mT,
        2,
        1,
        (3, 3, 4),
        (4, 1),
    ),
    "moved dims": (lambda x, w: x.movedim(source=1, destination=0) + x.movedim((0, 1), (1, 0)), 2, 1, (3, 3, 4), (1,)),
    "reversed dims beside": (lambda x, w: x.flip(0, 1) + x.roll((1, 2), (0, 1)), 2, 1, (2, 3, 4), (1,)),
    "converted": (lambda x, w: x.to(w).type_as(w) + w.type_as(x).sum() + w.to(x)[0, 0], 1, 1, (3, 4), (2, 5)),
    "dropout of a transposed tensor": (
        lambda x, w: F.dropout(x.transpose(0, 1), 0.5) + F.dropout(x.mT, 0.5).transpose(1, 2).transpose(0, 1),
        1,
        1,
        (2, 4, 4),
        (1,),
    ),
    "unusual": (lambda x, w: torch.cumsum(x, 1).flip(1) @ w, 1, 1, (3, 4), (4, 2)),
    "reversed divided dim": (lambda x, w: x.flip(1, 0) + x.roll(1), 1, 1, (3, 4), (1,)),
    "places": (lambda x, w: (torch.where(x > 0)[1] * w[0]).sum() + x.sum(), 1, 1, (3, 4), (1,)),
    "places of a mask": (routed, 1, 1, (6, 4), (1,)),
    "changed between gathers": (changed_between_gathers, 1, 1, (3, 4), (1,)),
    "dimless max": (lambda x, w: x.max() * x.amax(0) + torch.logsumexp(x, 1, keepdim=True), 1, 1, (3, 4), (1,)),
}
GATHERED = {"unusual", "reversed divided dim", "places", "places of a mask", "changed between gathers", "dimless max"}


def run_case(name: str) -> None:
    function, dim, parts, sizes, plain = CASES[name]
    expected_x, expected_w = drawn(*sizes).requires_grad_(), drawn(*plain).requires_grad_()
    torch.manual_seed(0)
    expected = function(expected_x, expected_w)
    weight = torch.linspace(0.5, 2.0, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * weight).sum().backward()

    common = runtime()
    local = common.group.cut(drawn(*sizes), dim, parts).clone().requires_grad_()
    w = drawn(*plain).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        result = function(Sharded(local * 1, dim, parts, common), w * 1)
    assert result.shape == expected.shape
    assert bool(caught) == (name in GATHERED and dist.get_rank() == 0), [str(w.message) for w in caught]
    result = whole_values(result)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    (result * weight).sum().backward()
    assert local.grad is not None
    torch.testing.assert_close(local.grad, common.group.cut(expected_x.grad, dim, parts), rtol=1e-12, atol=1e-12)
    if expected_w.grad is not None:
        torch.testing.assert_close(w.grad, expected_w.grad, rtol=1e-12, atol=1e-12)


def run_all() -> list[str]:
    failed = []
    for name in CASES:
        try:
            run_case(name)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    return failed


def test_every_rule_on_two_ranks(pool):
    assert pool.run(2, run_all) == [[], []]


def attention_cases() -> list[str]:
    """Grouped keys, whole keys, masks, and nn.MultiheadAttention with all its masks, against whole tensors."""
    failed = []
    common = runtime()

    def check(name: str, function: Callable[..., Tensor], *tensors: tuple[Tensor, int | None]) -> None:
        whole = [tensor.clone().requires_grad_() for tensor, _ in tensors]
        torch.manual_seed(0)
        expected = function(*whole)
        expected.pow(2).sum().backward()
        locals_, given = [], []
        for tensor, dim in tensors:
            local = (tensor if dim is None else common.group.cut(tensor, dim)).clone().requires_grad_()
            locals_.append(local)
            given.append(local * 1 if dim is None else Sharded(local * 1, dim, 1, common))
        torch.manual_seed(0)
        result = whole_values(function(*given))
        result.pow(2).sum().backward()
        for label, mine, theirs in [("output", result, expected)] + [
            (str(i), local.grad, w.grad if dim is None else common.group.cut(w.grad, dim))
            for i, (local, w, (_, dim)) in enumerate(zip(locals_, whole, tensors, strict=True))
        ]:
            if mine is None or not torch.allclose(mine, theirs, rtol=1e-11, atol=1e-11):
                failed.append(f"{name}: {label}")

    q, k, v = drawn(2, 4, 5, 6), drawn(2, 2, 5, 6) * 0.5, drawn(2, 2, 5, 6) + 0.1
    sdpa = F.scaled_dot_product_attention
    check("causal", lambda a, b, c: sdpa(a, b, c, is_causal=True), (q, 1), (q * 0.3, 1), (q + 1, 1))
    check("grouped", lambda a, b, c: sdpa(a, b, c, enable_gqa=True), (q, 1), (k, 1), (v, 1))
    check("grouped whole", lambda a, b, c: sdpa(a, b, c, enable_gqa=True), (q, 1), (k, None), (v, None))
    one = (k[:, :1].contiguous(), v[:, :1].contiguous())
    check("one key", lambda a, b, c: sdpa(a, b, c, enable_gqa=True), (q, 1), (one[0], None), (one[1], None))
    check("whole", lambda a, b, c: sdpa(a, b, c), (q, 1), (q * 0.3, None), (q + 1, None))
    check("mask", lambda a, m: sdpa(a, a, a, attn_mask=m), (q, 1), (drawn(2, 4, 5, 5), None))
    check("one mask", lambda a, m: sdpa(a, a, a, attn_mask=m), (q, 1), (drawn(2, 1, 5, 5), None))
    seen = torch.ones(5, 5, dtype=torch.bool).tril(1)
    for p in (0.4, 1.0):
        drops = partial(sdpa, dropout_p=p)
        check(f"dropout {p}", drops, (q, 1), (q * 0.3, 1), (q + 1, 1))
        check(f"causal, dropout {p}", partial(drops, is_causal=True, scale=0.7), (q, 1), (q * 0.3, 1), (q + 1, 1))
        check(f"grouped, dropout {p}", partial(drops, enable_gqa=True), (q, 1), (k, 1), (v, 1))
        check(f"grouped whole, dropout {p}", partial(drops, enable_gqa=True), (q, 1), (k, None), (v, None))
        check(f"mask, dropout {p}", lambda a, m, f=drops: f(a, a, a, m), (q, 1), (drawn(2, 4, 5, 5), None))
        check(f"one query, dropout {p}", drops, (q[:1], 1), (q * 0.3, 1), (q + 1, 1))
        check(f"seen, dropout {p}", lambda a, f=drops: f(a, a, a, seen), (q, 1))
    return failed


def test_attention_on_two_ranks(pool):
    assert pool.run(2, attention_cases) == [[], []]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


def refused(function: Callable[[Sharded], Any]) -> str:
    common = runtime()
    x = Sharded(drawn(3, 4).narrow(1, 0, 2).clone().requires_grad_() * 1, 1, 1, common, frozenset({"up.weight"}))
    try:
        function(x)
    except UnsupportedError as error:
        return str(error)
    return "nothing was raised"


def refusals() -> list[str]:
    return [
        refused(lambda x: Doubled.apply(x) + 1),
        refused(lambda x: x.squeeze_(0)),
        refused(lambda x: x.register_hook(lambda g: g)),
        refused(lambda x: torch.autograd.grad(x.sum(), x)),
        refused(lambda x: x[:, ::2].mul_(2)),
        refused(lambda x: x.view(-1)[1:3].zero_()),
    ]


def test_what_a_gathered_copy_cannot_make_right_is_refused_by_name(pool):
    function, changed, hook, grad, view, view_of_view = pool.run(2, refusals)[0]
    assert view.startswith("mul_ changes a view")
    assert view_of_view.startswith("zero_ changes a view")
    assert "custom torch.autograd.Function" in function
    assert "test_rules.py" in function
    assert "torch.Tensor.squeeze_" in changed
    assert "up.weight" in changed
    assert "register_hook" in hook
    assert grad.startswith("grad got a tensor that is in parts")


@pytest.mark.parametrize(
    ("old", "new", "dim", "parts", "expected"),
    [
        ((2, 5, 24), (2, 5, 6, 4), 2, 1, (2, 1)),
        ((2, 5, 24), (2, 5, 3, 8), 2, 1, None),  # 3 heads over 2 ranks
        ((2, 5, 24), (2, 5, 3, 4, 2), 2, 3, (3, 1)),
        ((2, 5, 24), (10, 24), 2, 1, (1, 1)),
        ((2, 6, 4), (12, 4), 1, 1, (0, 2)),  # batch and sequence merged
        ((12, 4), (2, 6, 4), 0, 2, (1, 1)),
        ((2, 5, 4, 6), (2, 5, 24), 2, 1, (2, 1)),
        ((2, 5, 4, 6), (2, 120), 2, 1, (1, 5)),
    ],
)
def test_views(old, new, dim, parts, expected):
    assert view_split(old, new, dim, parts, 2) == expected


def test_rules_cover_the_operators_of_python():
    for name in ("add", "radd", "iadd", "mul", "matmul", "neg", "eq", "getitem"):
        from lightning_4d.parallel.tensor.sharded import RULES

        assert getattr(Tensor, f"__{name}__") in RULES, name
    assert nn.functional.cross_entropy in RULES
