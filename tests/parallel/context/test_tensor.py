"""Whatever code does with a SequenceTensor gives the result and the gradients of the whole tensor, or raises."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.context import GatherWarning, SequenceTensor, make_groups, report, whole
from lightning_4d.parallel.context.communication import Sharding, cut
from lightning_4d.parallel.context.tensor import guard_autograd_functions, wrap

B, C, HEADS = 3, 8, 2


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 3 * grads[0]  # unlike autograd's, so that a replay by autograd would show


early_bound = Double.apply


def labels(x: Tensor) -> Tensor:
    """With ignored ones: none in the first quarter of the positions, so that a rank may have none at all."""
    y = torch.randint(C, x.shape[:2], generator=torch.Generator().manual_seed(3))
    y[:, : x.shape[1] // 4] = -100
    y[1, x.shape[1] // 2 :] = -100
    return y


def heads_of(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


def written_out(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (heads_of(F.linear(x, m)) for m in w.chunk(3))
    T = x.shape[1]
    scores = q @ k.transpose(-2, -1) / 2
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(x.shape)


def attention(x: Tensor, w: Tensor, **kwargs: Any) -> Tensor:
    q, k, v = (heads_of(F.linear(x, m)) for m in w.chunk(3))
    return F.scaled_dot_product_attention(q, k, v, **kwargs).transpose(1, 2).flatten(2)


def rope(x: Tensor, w: Tensor) -> Tensor:
    T, D = x.shape[1], x.shape[-1]
    angle = torch.arange(T, dtype=x.dtype)[:, None] * 0.1 ** torch.arange(D // 2, dtype=x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def chunked_loss(x: Tensor, w: Tensor) -> Tensor:
    y = labels(x)
    total = sum(
        F.cross_entropy(F.linear(h, w[:C]).flatten(0, 1), t.flatten(), reduction="sum")
        for h, t in zip(x.split(5, dim=1), y.split(5, dim=1), strict=True)
    )
    return total / (y != -100).sum()


def add_in_place(x: Tensor, w: Tensor) -> Tensor:
    x = x * 1
    x += x.mean(dim=1, keepdim=True)
    x.mul_(2).add_(w[0])
    return x


def set_items(x: Tensor, w: Tensor) -> Tensor:
    x = x * 1
    x[x > 1] = 0.5
    x[:, 1] = w[0]
    x[1, 2:4] = x[0, 0:2].detach()
    return x


def set_with_positions_first(x: Tensor, w: Tensor) -> Tensor:
    x = x.transpose(0, 1) * 1
    x[1:3] = w[0]
    x.cumsum_(0)
    return x.transpose(0, 1)


def fill_masked(x: Tensor, w: Tensor) -> Tensor:
    x = x * 1
    mask = torch.arange(x.shape[1]) % 3 == 1
    x.masked_fill_(mask[None, :, None], 0.25)
    return x * w[0]


def write_out(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.empty_like(x)
        torch.mul(x, 3, out=out)
    return out + x


def into_plain(x: Tensor, w: Tensor) -> Tensor:
    buffer = torch.zeros(x.shape, dtype=x.dtype)
    buffer[:, :3] = x[:, :3]
    return buffer.add_(x)


def einsums(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (F.linear(x, m).view(x.shape[0], x.shape[1], HEADS, -1) for m in w.chunk(3))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def linear_attention(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (heads_of(F.linear(x, m)) for m in w.chunk(3))
    return q @ (k.transpose(-2, -1) @ v)


def shifted_loss(x: Tensor, w: Tensor) -> Tensor:
    logits = F.linear(x, w[:C])
    return F.cross_entropy(logits[:, :-1].reshape(-1, C), labels(x)[:, 1:].reshape(-1))


def hf_loss(x: Tensor, w: Tensor) -> Tensor:
    logits = F.linear(x, w[:C]).float().double()
    target = F.pad(labels(x), (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, C), target.view(-1), ignore_index=-100, reduction="mean")


def condition(x: Tensor, w: Tensor) -> Tensor:
    scale, shift = F.linear(torch.tanh(w[:3]), w[: 2 * C]).chunk(2, dim=-1)
    return x * scale[:, None] + shift[:, None]


def conv(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), w[:C].unsqueeze(-1).expand(-1, -1, 3), padding=1).transpose(1, 2)


def accuracy(x: Tensor, w: Tensor) -> Tensor:
    predicted = F.linear(x, w[:C]).argmax(-1)
    y = labels(x)
    return ((predicted == y) & (y != -100)).double().sum() / (y != -100).sum() + 0 * x.sum()


def routed(x: Tensor, w: Tensor) -> Tensor:
    """Each expert takes the positions that chose it."""
    flat = x.flatten(0, 1)
    chosen = flat.detach().argmax(-1) % 3
    y = torch.zeros_like(flat)
    for expert in range(3):
        (rows,) = torch.where(chosen == expert)
        y = y.index_add(0, rows, flat[rows] * w[expert])
    return y.view(x.shape)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    # On parts: no gather.
    "arithmetic": lambda x, w: 2 - x * w[0] / 3 + (-x) ** 2,
    "activations": lambda x, w: F.gelu(x) + F.silu(x).clamp(-0.5, 1) + torch.tanh(x).relu(),
    "norms": lambda x, w: F.layer_norm(x, (C,), w[0], w[1]) + F.rms_norm(x, (C,), w[2]),
    "rms norm written out": lambda x, w: w[0] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "position table": lambda x, w: x + torch.sin(torch.arange(x.shape[1], dtype=x.dtype))[:, None] * w[0],
    "rope by local length": rope,
    "condition of all positions": condition,
    "transposes": lambda x, w: x.transpose(0, 1).permute(2, 0, 1).mT.movedim(0, -1).swapaxes(0, 1) * 2,
    "views": lambda x, w: x.view(B, x.size(1), 2, -1).flatten(2).unsqueeze(1).squeeze(1).unflatten(-1, (4, 2)),
    "merged dims": lambda x, w: F.linear(x.flatten(0, 1), w).view(B, -1, 3 * C).view(-1, 3, C) * 2,
    "merged with features": lambda x, w: x.reshape(B, -1) * 2,
    "expand": lambda x, w: x.unsqueeze(2).expand(-1, -1, 3, -1).reshape(B, -1, 3 * C),
    "repeat": lambda x, w: x.repeat(1, 1, 2) + x.repeat_interleave(2, dim=-1),
    "split features": lambda x, w: torch.stack(x.chunk(2, dim=-1), dim=1) + x.split([4, 4], -1)[0].unsqueeze(1),
    "unbind": lambda x, w: torch.cat(x.unflatten(-1, (2, 4)).unbind(2), dim=-1),
    "slices": lambda x, w: x[:, 2:-1] * x[:, 2:-1, :1] + x[..., 1:2, None].squeeze(-1)[:, 2:-1],
    "slice of a slice": lambda x, w: x[:, 1:][:, :-2].narrow(1, 1, 2) * 3,
    "one position": lambda x, w: x[:, 0] * x[:, -1] + x.select(1, 3),
    "class token": lambda x, w: F.linear(F.layer_norm(x, (C,))[:, 0], w),
    "mean over positions": lambda x, w: x.mean(dim=1) + x.sum(1) + x.mean() + x.sum((0, 1)),
    "statistics of features": lambda x, w: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + x.amax(-1, True),
    "sorted features": lambda x, w: x.topk(3, dim=-1)[0] + x.sort(-1).values[..., :3] + F.normalize(x, dim=-1)[..., :3],
    "joined features": lambda x, w: torch.cat([x, x * 2, torch.ones(B, x.shape[1], 2, dtype=x.dtype)], dim=-1),
    "gather of features": lambda x, w: x.gather(-1, x.argsort(-1)),
    "where": lambda x, w: torch.where(x > 0, x, w[0]).masked_fill(torch.arange(x.shape[1])[:, None] < 2, 0.0),
    "likes": lambda x, w: torch.ones_like(x) * x + torch.zeros_like(x, dtype=torch.float64) + x.new_ones(C),
    "conversion": lambda x, w: x.float().to(torch.float64).type_as(w) + w[:1].type_as(x),
    "linear": lambda x, w: F.linear(x, w, w[:, 0]),
    "addmm": lambda x, w: torch.addmm(w[:, 0], x.view(-1, C), w.T).view(B, -1, 3 * C),
    "matmul": lambda x, w: x @ w.T + torch.matmul(x, w[:1].T),
    "columns": lambda x, w: w @ x.transpose(1, 2),
    "attention": attention,
    "causal attention": lambda x, w: attention(x, w, is_causal=True),
    "attention with padding": lambda x, w: attention(x, w, attn_mask=(labels(x) != -100)[:, None, None] | (torch.arange(x.shape[1]) == 0)),  # noqa: E501
    "attention with bias": lambda x, w: attention(x, w, attn_mask=torch.arange(x.shape[1])[:, None].to(x) * -0.1),
    "attention to a whole": lambda x, w: F.scaled_dot_product_attention(heads_of(x), heads_of(w[None, :8].tanh() * torch.ones(B, 1, 1)), heads_of(w[None, 8:16] * torch.ones(B, 1, 1))),  # noqa: E501
    "attention of 3 dims": lambda x, w: F.scaled_dot_product_attention(x, F.linear(x, w[:C]), x, is_causal=True),
    "linear attention": linear_attention,
    "cross entropy": lambda x, w: F.cross_entropy(F.linear(x, w[:C]).flatten(0, 1), labels(x).flatten()),
    "cross entropy of 3 dims": lambda x, w: F.cross_entropy(F.linear(x, w[:C]).transpose(1, 2), labels(x)),
    "weighted": lambda x, w: F.cross_entropy(x.flatten(0, 1), labels(x).flatten(), weight=torch.arange(1.0, C + 1).double()),  # noqa: E501
    "smoothed": lambda x, w: F.cross_entropy(x.flatten(0, 1), labels(x).flatten(), label_smoothing=0.1),
    "smoothed and weighted": lambda x, w: F.cross_entropy(x.flatten(0, 1), labels(x).flatten(), label_smoothing=0.1, weight=torch.arange(1.0, C + 1).double()),  # noqa: E501
    "sum of losses": lambda x, w: F.cross_entropy(x.transpose(1, 2), labels(x), reduction="sum"),
    "each loss": lambda x, w: F.cross_entropy(x.transpose(1, 2), labels(x), reduction="none").sum() / 7,
    "probabilities": lambda x, w: F.cross_entropy(x.flatten(0, 1), torch.full((B * x.shape[1], C), 1 / C).double()),
    "nll": lambda x, w: F.nll_loss(x.log_softmax(-1).flatten(0, 1), labels(x).flatten()),
    "mse": lambda x, w: F.mse_loss(x, torch.ones(x.shape, dtype=x.dtype)) + F.l1_loss(x, w[0].expand(x.shape), reduction="sum"),  # noqa: E501
    "shifted loss": shifted_loss,
    "loss as Hugging Face": hf_loss,
    "chunked loss": chunked_loss,
    "accuracy": accuracy,
    "in place": add_in_place,
    "masked fill in place": fill_masked,
    "dropout": lambda x, w: F.dropout(x, 0.4) + F.dropout(x.transpose(1, 2), 0.3).transpose(1, 2),
    "keywords in any order": lambda x, w: x.narrow(length=2, dim=1, start=3) * torch.select(x, index=1, dim=2)[:, 3:5, None],  # noqa: E501
    "input by name": lambda x, w: torch.transpose(input=x, dim0=1, dim1=2).mT + torch.where(condition=x > 0, input=x, other=w[0]),  # noqa: E501
    "numpy's names": lambda x, w: x.mean(axis=-1, keepdims=True) + x.sort(axis=2).values + x.softmax(axis=-1),
    "positional keepdim": lambda x, w: x.var(-1, True, True) + x.std(0, True) + torch.linalg.norm(x, 2, -1, True),
    "special functions": lambda x, w: torch.special.softmax(x, -1) + torch.special.logsumexp(x, -1, keepdim=True),
    "weights of norms by computation": lambda x, w: F.layer_norm(x, (C,), 1 + w[0] * w[1], w[2].exp()) + F.rms_norm(x, (C,), x.mean((0, 1))),  # noqa: E501
    "einsum with one position": lambda x, w: torch.einsum("btc,btc->bt", x, x.mean(1, keepdim=True) * w[0]),
    # By a gather.
    "written out attention": written_out,
    "einsum": einsums,
    "convolution": conv,
    "mixing positions": lambda x, w: F.linear(x.transpose(1, 2), torch.arange(x.shape[1] ** 2.0).sin().view(x.shape[1], -1).double()).transpose(1, 2),  # noqa: E501
    "sorted positions": lambda x, w: x.sort(axis=1).values + x.argsort(axis=1) + x.renorm(2, -1, 0.5),
    "places": routed,
    "weighted squares": lambda x, w: F.mse_loss(x, x.detach() * 2, weight=w[0].detach().abs().expand(x.shape)),
    "softmax over positions": lambda x, w: F.softmax(x, dim=1) + x.cumsum(1) + x.amax(1, keepdim=True) + x.roll(1, 1),
    "differences": lambda x, w: x[:, 1:] - x[:, :-1],
    "joined positions": lambda x, w: torch.cat([w[None, :1].expand(B, -1, -1), x], dim=1) * 2,
    "every other position": lambda x, w: x[:, ::2] * 2,
    "picked": lambda x, w: x[torch.arange(B), torch.tensor([1, 4, 2])] + x[labels(x) != -100].sum(),
    "batch norm": lambda x, w: F.batch_norm(x.transpose(1, 2), None, None, training=True),
    "set items": set_items,
    "set items with positions first": set_with_positions_first,
    "out=": write_out,
    "into a plain tensor": into_plain,
    "autograd function": lambda x, w: Double.apply(x) + early_bound(x * 2),
    "attention dropout": lambda x, w: attention(x, w, dropout_p=0.3),
    "learned bias": lambda x, w: attention(x, w, attn_mask=w[:1, :1].expand(x.shape[1], x.shape[1]) * torch.arange(x.shape[1])),  # noqa: E501
    "random": lambda x, w: x + torch.rand_like(x) * w[0],
}  # fmt: skip
FIRST_GATHERED = "written out attention"
ON_PARTS = list(FUNCTIONS)[: list(FUNCTIONS).index(FIRST_GATHERED)]


def entered(x: Tensor, ulysses: int, cache: dict[int, Any] = {}) -> SequenceTensor:  # noqa: B006
    if ulysses not in cache:
        guard_autograd_functions()
        cache[ulysses] = make_groups([list(range(dist.get_world_size()))], ulysses)
    groups = cache[ulysses]
    sharding = Sharding(1, groups.layout(x.shape[1]), groups)
    return wrap(cut(x, sharding), sharding)


def run_one(name: str, length: int, ulysses: int | None) -> tuple[list[Tensor], int]:
    """The result, and the gradients of the input and of a parameter; and how many gathers were reported."""
    report._said.clear()
    torch.manual_seed(0)
    x = torch.randn(B, length, C, dtype=torch.float64, requires_grad=True)
    w = nn.Parameter(torch.randn(3 * C, C, dtype=torch.float64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = FUNCTIONS[name](x if ulysses is None else entered(x, ulysses), w)
        result = whole(result)
    assert type(result) is Tensor or result.as_subclass(torch.Tensor) is not None
    result = result.as_subclass(torch.Tensor)
    (result * torch.randn(result.shape, dtype=result.dtype)).sum().backward()
    grad_w = torch.zeros_like(w) if w.grad is None else w.grad
    if ulysses is not None:
        dist.all_reduce(grad_w)
        grad_w /= dist.get_world_size()
    gathers = sum(issubclass(warning.category, GatherWarning) for warning in caught)
    return [result.detach(), x.grad, grad_w], gathers


def compare_all(names: list[str], length: int, ulysses: int) -> dict[str, Any]:
    wrong: dict[str, Any] = {}
    for name in names:
        try:
            (mine, gathers), (theirs, _) = run_one(name, length, ulysses), run_one(name, length, None)
            errors = [
                float((a - b).abs().max() / b.abs().max().clamp_min(1)) for a, b in zip(mine, theirs, strict=True)
            ]
            expect_gather = name not in ON_PARTS and dist.get_rank() == 0
            if max(errors) > 1e-12 or not all(e == e for e in errors) or (gathers > 0) != expect_gather:
                wrong[name] = (errors, gathers)
        except Exception as error:
            import traceback

            wrong[name] = f"{type(error).__name__}: {error} {traceback.format_exc()[-600:]}"
            raise RuntimeError(f"{name}: {wrong[name]}") from error
    return wrong


@pytest.mark.parametrize(("world", "length", "ulysses"), [(2, 12, 1), (2, 11, 2), (4, 9, 1)])
def test_every_function(pool, world, length, ulysses):
    names = [name for name in FUNCTIONS if ulysses == 1 or name != "attention of 3 dims"]  # of 3 heads there
    for wrong in pool.run(world, compare_all, names, length, ulysses):
        assert not wrong


# ---------------------------------------------------------------------------- what a gather cannot make right, raises


def change_a_view(x: Tensor) -> None:
    x[:, ::2].mul_(2)


def change_a_view_of_a_view(x: Tensor) -> None:
    view = x.unfold(1, 2, 2)[0]
    view[0] = 1.0


def change_an_item_of_a_view(x: Tensor) -> None:
    x[:, ::2][0, 0] += 1


def below_python(x: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        x + 1


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a changed view": (change_a_view, "mul_ changes a view"),
    "a changed view of a view": (change_a_view_of_a_view, "changes a view"),
    "a changed item of a view": (change_an_item_of_a_view, "changes a view"),
    "a changed position": (lambda x: x[:, 0].add_(1.0), "add_ changes a view"),
    "gradients": (lambda x: torch.autograd.grad(x.sum(), x), "grad on a tensor"),
    "hooks": (lambda x: x.register_hook(print), "register_hook"),
    "retain_grad": (lambda x: x.retain_grad(), "retain_grad"),
    "memory": (lambda x: x.data_ptr(), "data_ptr"),
    "new shape in place": (lambda x: x.unsqueeze_(0), "unsqueeze_"),
    "transposed in place": (lambda x: x.t_(), "t_ on"),
    "backward": (lambda x: x.backward(torch.ones(x.shape)), "backward"),
    "below Python": (below_python, "from code below Python"),
}


def messages() -> dict[str, str]:
    found = {}
    for name, (function, _) in REFUSED.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                function(entered(torch.randn(B, 8, C, dtype=torch.float64, requires_grad=True) * 1, 1))
                found[name] = "nothing was raised"
            except UnsupportedError as error:
                found[name] = str(error)
    return found


def test_refusals_name_the_operation_and_the_line(pool):
    for found in pool.run(2, messages):
        for name, (_, text) in REFUSED.items():
            assert text in found[name], f"{name}: {found[name]}"
            assert "test_tensor.py:" in found[name], f"{name}: {found[name]}"


def warned_lines() -> list[tuple[str, int]]:
    report._said.clear()
    x = entered(torch.randn(B, 8, C), 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x.cumsum(1)
        x.cumprod(1)
    return [(str(warning.message), warning.lineno) for warning in caught]


def test_a_gather_is_reported_once_with_its_line(pool):
    first, second = pool.run(2, warned_lines)
    assert [text.split()[0] for text, _ in first] == ["cumsum", "cumprod"]
    assert "test_tensor.py" in first[0][0]
    assert first[1][1] == first[0][1] + 1
    assert second == []


# ------------------------------------------------------------------------------ the tests above notice what is broken


def broken(fault: str) -> dict[str, Any]:
    from lightning_4d.parallel.context import communication, ring
    from lightning_4d.parallel.context import tensor as tensor_module
    from lightning_4d.parallel.context.rules import align, loss

    if fault == "gather without a factor":
        communication._Gather.backward = staticmethod(lambda ctx, g: (communication.take_part(g, ctx.sharding), None))
    elif fault == "mean of means":
        loss._count_indices = lambda labels, *_: torch.tensor(labels.numel())
    elif fault == "no write back":
        tensor_module._write_back = lambda *_: None
    elif fault == "plain tensors are not cut":
        align.cut = lambda value, sharding: value.narrow(sharding.dim, 0, sharding.local_size)
    elif fault == "condition without its gradient":
        align.use_whole = lambda value, groups: value.detach()
    elif fault == "merge without log-sum-exp":
        ring.merge = lambda out, lse, part, part_lse: (out.add_(part / 2), lse.copy_(torch.logaddexp(lse, part_lse)))
    elif fault == "dropout of the part":
        from lightning_4d.parallel.context.rules import elementwise

        elementwise.take_part = lambda noise, sharding: F.dropout(
            torch.ones_like(noise.narrow(sharding.dim, 0, sharding.local_size)), 0.4
        )
    return compare_all(list(FUNCTIONS), 12, 1)


FAULTS = {
    "gather without a factor": "convolution",
    "mean of means": "cross entropy",
    "no write back": "set items",
    "plain tensors are not cut": "position table",
    "condition without its gradient": "condition of all positions",
    "merge without log-sum-exp": "attention",
    "dropout of the part": "dropout",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(pool, fault):
    for wrong in pool.run(2, broken, fault):
        assert FAULTS[fault] in wrong
