"""The count on fake tensors against counts by hand and against torch's counter on a real step; no traces are left."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_4d.utilization import (
    CountError,
    StepFlops,
    count_step,
    gpt_parameters,
    looked_up_parameters,
    optimizer_flops,
    transformer_flops,
)
from lightning_4d.utilization.counter import masked_fraction

CPU = torch.device("cpu")
aten = torch.ops.aten


def count(module: nn.Module, *inputs: Tensor, **kwargs: Any) -> StepFlops:
    """Count `module(*inputs).sum()` and its backward."""

    def step(run: Any, backward: Any) -> Tensor:
        return module(*(run.tensor(x) for x in inputs)).sum()

    return count_step(module, step, CPU, **kwargs)


def counted_by_torch(module: nn.Module, *inputs: Tensor) -> int:
    """What torch's counter sees of a real forward and backward; it lacks the attention op of CPUs."""

    def forward(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return 4 * q[0] * q[1] * q[2] * k[2] * q[3]

    def backward(_: Any, q: Any, k: Any, v: Any, *__: Any, out_shape: Any = None, **___: Any) -> int:
        return 10 * q[0] * q[1] * q[2] * k[2] * q[3]

    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        module(*inputs).sum().backward()
    return counter.get_total_flops()


class Block(nn.Module):
    """Attention with grouped keys and values, and an MLP."""

    def __init__(self, dim: int = 32, heads: int = 4, groups: int = 2, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.groups, self.causal = heads, groups, causal
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim * groups // heads)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q = self.q(x).view(B, T, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x).view(B, T, 2, self.groups, -1).permute(2, 0, 3, 1, 4)
        repeat = self.heads // self.groups
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, layers: int = 3, dim: int = 32, vocab: int = 50, recompute: str = "none") -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)
        self.recompute = recompute

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.embedding(ids_BT)
        for block in self.blocks:
            if self.recompute == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


IDS = torch.zeros(2, 16, dtype=torch.long)


# ---------------------------------------------------------------------------------------------------- numbers by hand


def test_a_stack_of_linears():
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 5))
    flops = count(model, torch.zeros(3, 8))
    first, second = 2 * 3 * 8 * 24, 2 * 3 * 24 * 5
    assert flops.forward.total == first + second
    assert flops.backward.total == first + 2 * second  # the input needs no gradient
    assert flops.model("full") == counted_by_torch(model, torch.zeros(3, 8))


def test_a_gpt_is_its_formula_in_both_conventions():
    B, T, C, L, V = 2, 16, 32, 3, 50
    model = nn.Sequential(
        nn.Embedding(V, C), *(nn.TransformerEncoderLayer(C, 4, 4 * C, batch_first=True) for _ in range(L))
    )
    model.append(nn.Linear(C, V))
    flops = count(model, IDS)
    shape = {"parameters": gpt_parameters(L, C, V), "tokens": B * T, "layers": L, "attention_width": C, "length": T}
    assert flops.model("full") == 3 * flops.forward.total == transformer_flops(**shape)
    assert flops.attention_calls == {"full": L}
    assert flops.model("causal") == flops.model("full")  # not a causal model: nothing to halve

    causal = count(GPT(L, C, V), IDS)
    attention = 12 * L * C * T * B * T
    assert causal.training.attention == attention
    assert causal.model("full") - causal.model("causal") == attention / 2
    assert causal.attention_calls == {"causal": L}


def test_masked_fraction():
    assert masked_fraction(7, 7) == 0.5
    assert masked_fraction(2, 4) == 1 - 3 / 8
    assert masked_fraction(4, 2) == 1 - 7 / 8


def test_frozen_parts_have_no_weight_gradients():
    model = GPT(2)
    everything = count(model, IDS)
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    frozen = count(model, IDS)
    assert frozen.forward == everything.forward
    block = count(nn.Sequential(Block()), torch.zeros(2, 16, 32)).forward.total
    inputs = 2 * (2 * 16) * 32 * (32 + 32)  # of q and kv of the second block: no gradient goes further back
    assert everything.backward.total - frozen.backward.total == 2 * block + inputs


def test_low_rank_adapters_count_about_two_thirds():
    dim, rank, tokens = 32, 2, 6

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(dim, dim, bias=False).requires_grad_(False)
            self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = nn.Sequential(nn.Linear(dim, dim), Adapted())
    flops = count(model, torch.zeros(tokens, dim))
    full, low = 2 * tokens * dim * dim, 2 * tokens * dim * rank
    assert flops.model() == (2 * full) + (2 * full) + 3 * 2 * low


def test_a_part_without_gradients_counts_its_forward_once():
    teacher, student = nn.Linear(8, 8), nn.Linear(8, 8)

    class Distillation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = teacher, student

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x) - target

    flops = count(Distillation(), torch.zeros(4, 8))
    assert flops.forward.total == 2 * 2 * 4 * 8 * 8
    assert flops.backward.total == 2 * 4 * 8 * 8


# ------------------------------------------------------------------------------------------ against torch's counter


@pytest.mark.parametrize("recompute", ["none", "non-reentrant", "reentrant"])
def test_hardware_flops_are_what_torch_counts_in_a_real_step(recompute):
    model = GPT(recompute=recompute)
    flops = count(model, IDS)
    assert flops.hardware("full") == counted_by_torch(model, IDS)
    assert flops.model("full") == count(GPT(), IDS).model("full"), "recomputation is no model FLOPs"
    assert (flops.recompute.total > 0) == (recompute != "none")


def test_attention_is_seen_however_it_is_called():
    from torch.nn.functional import scaled_dot_product_attention as imported

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.proj(x)
            return imported(y, y, y, None, 0.0, True) + imported(y, y, y, attn_mask=torch.ones(5, 5).tril().bool())

    flops = count(Direct(), torch.zeros(2, 3, 5, 8))
    assert flops.attention_calls == {"causal": 1, "masked": 1}
    one = 4 * 2 * 3 * 5 * 5 * 8
    assert flops.forward.attention == 2 * one
    assert flops.forward.masked == one // 2
    multihead = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.zeros(2, 5, 8)
    inside = count_step(multihead, lambda run, _: multihead(*(run.tensor(x),) * 3, need_weights=False)[0].sum(), CPU)
    assert inside.attention_calls == {"full": 1}
    assert inside.forward.attention == 4 * 2 * 5 * 5 * 8


def test_convolutions_and_own_matmul_attention():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 2, 2), nn.Flatten())
    x = torch.zeros(2, 3, 8, 8)
    assert count(model, x).model() == counted_by_torch(model, x)

    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return torch.einsum("bts,bsd->btd", (q @ k.mT).softmax(-1), v)

    assert count(ByHand(), torch.zeros(2, 5, 8)).model() == counted_by_torch(ByHand(), torch.zeros(2, 5, 8))


def test_blocks_and_extra_forwards():
    model = GPT(3)
    blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    flops = count(model, IDS, blocks=blocks)
    head = 2 * 2 * 16 * 32 * 50
    assert len(set(flops.blocks.values())) == 1
    assert sum(block.total for block in flops.blocks.values()) + head == flops.forward.total
    one = flops.blocks["blocks.0"].of("causal")
    plain = flops.hardware("causal")
    assert flops.hardware("causal", {"blocks.0": 1.0, "blocks.2": 0.5}) == plain + 1.5 * one
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


def test_compiled_blocks_are_counted_uncompiled():
    model, plain = GPT(2), count(GPT(2), IDS)

    def never(*_: Any) -> Any:
        raise AssertionError("nothing may be compiled for a count")

    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=never)
    assert count(model, IDS) == plain


def test_the_dtype_of_most_products_is_found():
    model = GPT(1).to(torch.bfloat16)
    assert count(model, IDS).dtype is torch.bfloat16
    mixed = count(GPT(1), IDS, context=torch.autocast("cpu", torch.bfloat16))
    assert mixed.dtype is torch.bfloat16
    assert mixed.forward == count(GPT(1), IDS).forward
    assert count(GPT(1), IDS).small_fraction > 0.5


# ----------------------------------------------------------------------------------------------------------- refusals


class NeedsData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


class HiddenParameters(nn.Linear):
    """A layer in a list, which no optimizer and no strategy knows."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.hidden = [nn.Linear(*sizes)]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](super().forward(x))


class NeedsNumpy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.numpy().mean())


@pytest.mark.parametrize("cls", [NeedsData, NeedsNumpy, HiddenParameters])
def test_what_needs_data_is_refused_and_leaves_the_module_whole(cls):
    model = cls(4, 4)
    before = dict(model.named_parameters())
    with pytest.raises(CountError, match="does not run on fake tensors"):
        count(model, torch.ones(2, 4))
    assert all(p is before[name] for name, p in model.named_parameters())
    assert model(torch.ones(2, 4)).isfinite().all()
    assert all(p.grad is None for layer in getattr(model, "hidden", []) for p in layer.parameters())


@torch.library.custom_op("lightning_4d_tests::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    return x.clone()


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operation_without_a_formula_is_named():
    class Mysterious(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + mystery(x)

    with pytest.raises(CountError, match=r"lightning_4d_tests.mystery.*register_flop_formula"):
        count(Mysterious(4, 4), torch.ones(2, 4))


def test_a_step_that_computes_nothing_is_refused():
    with pytest.raises(CountError, match="no matrix product"):
        count(nn.LayerNorm(4), torch.ones(2, 4))


# ---------------------------------------------------------------------------------------------------------- no traces


class Record:
    """A user's own object."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.calls = 0


class Remembers(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("running", torch.zeros(4))
        self.plain = torch.zeros(4)
        self.outputs: list[Tensor] = []
        self.nested: dict[str, list[Tensor]] = {"loss": []}
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.record = Record()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.linear(x))) * random.random() * float(np.random.rand()) + torch.rand(4)
        self.calls += 1
        self.running += y.mean(0).detach()
        self.plain.add_(1)
        self.new = y
        for collection in (self.outputs, self.nested["loss"], self.recent, self.record.seen):
            collection.append(y)
        self.record.calls += 1
        return y


def test_a_count_leaves_no_trace():
    model = Remembers()
    model(torch.ones(3, 4))
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = dict(vars(model))
    count(model, torch.ones(3, 4))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert all(p is parameters[name] and p.grad is None for name, p in model.named_parameters())
    assert all(b is buffers[name] for name, b in model.named_buffers())
    torch.testing.assert_close(dict(model.state_dict()), values, rtol=0, atol=0)
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert len(model.outputs) == len(model.nested["loss"]) == len(model.recent) == len(model.record.seen) == 1
    assert (model.calls, model.record.calls) == (1, 1)
    torch.testing.assert_close(model.plain, torch.ones(4))
    assert "scaled_dot_product_attention" in str(F.scaled_dot_product_attention)
    assert not torch.is_inference_mode_enabled()


def test_tied_weights_stay_tied_and_lookups_are_told_apart():
    model = GPT(1)
    assert looked_up_parameters(model) == 50 * 32
    model.head.weight = model.embedding.weight
    assert looked_up_parameters(model) == 0
    count(model, IDS)
    assert model.head.weight is model.embedding.weight


def test_optimizer_flops_by_its_states():
    linear = nn.Linear(4, 4, bias=False)
    expected = {torch.optim.SGD: 2, torch.optim.AdamW: 12}
    for cls, per_element in expected.items():
        optimizer = cls(linear.parameters(), lr=0.1)
        linear(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert optimizer_flops(linear.parameters(), optimizer.state) == per_element * 16
