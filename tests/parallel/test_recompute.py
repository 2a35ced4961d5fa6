"""Recomputed blocks give the same gradients bit for bit, leave no trace, and refuse by name what they cannot repeat."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.recompute import RecomputePolicy, install, installed, recompute_plan, remove
from lightning_4d.parallel.recompute import calls as calls_module
from lightning_4d.parallel.recompute.surroundings import RandomState
from tests.modules import Block

POLICIES = {
    "none": RecomputePolicy("none"),
    "full": RecomputePolicy("full"),
    "sqrt": RecomputePolicy("sqrt"),
    "sqrt-2": RecomputePolicy("sqrt", segments=2),
    "sqrt-1": RecomputePolicy("sqrt", segments=1),
    "nested": RecomputePolicy("sqrt", nested=True),
    "nested-1": RecomputePolicy("sqrt", nested=True, segments=1),
    "every_k": RecomputePolicy("every_k", every_k=2),
    "selective": RecomputePolicy("selective"),
    "budget": RecomputePolicy("budget", budget_bytes=120_000),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
segments = pytest.mark.parametrize("policy", [POLICIES["sqrt-1"], POLICIES["nested-1"]], ids=["sqrt", "nested"])


class Stack(nn.Module):
    """Blocks called in a loop by `loop(self, x)`; a scalar comes out."""

    def __init__(self, blocks: Sequence[nn.Module], loop: Callable[[Any, Tensor], Tensor], dim: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.full((dim,), 1.5))
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self, self.stem(x)).square().mean()


def plain(stack: Stack, x: Tensor) -> Tensor:
    for block in stack.blocks:
        x = block(x)
    return x


def transformer(count: int = 5, loop: Callable[[Any, Tensor], Tensor] = plain) -> Stack:
    return Stack([Block(8, 2, dropout=0.5) for _ in range(count)], loop)


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def steps(make: Callable[[], nn.Module], policy: RecomputePolicy | None, count: int = 3, **options: Any) -> list[Any]:
    """Loss, gradients, buffers and the state of the random generators after each of some steps."""
    torch.manual_seed(0)
    random.seed(0)
    module = make()
    if policy is not None:
        install(module, policy, **options)
    data = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(count):
        module.zero_grad()
        loss = module(torch.randn(3, 6, 4, generator=data))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        seen.append((loss.detach(), gradients, buffers, torch.rand(1), random.random()))
    return seen


def check(make: Callable[[], nn.Module], policy: RecomputePolicy, **options: Any) -> None:
    torch.testing.assert_close(steps(make, policy, **options), steps(make, None), rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------- same numbers


@every_policy
def test_gradients_are_equal_bit_for_bit_with_dropout(policy):
    check(transformer, policy)


@dataclass
class Options:
    scale: Tensor
    name: str


class Picky(nn.Module):
    """Takes all kinds of arguments and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, state: Any, index: int, *, mask: Tensor | None, cache: list[Tensor], options: Options) -> Any:
        x, residual = state
        cache.append(x)
        x = self.dropout(self.linear(x)).tanh() * options.scale * len(cache)
        if mask is not None:
            x = x * mask
        return (x, residual + x * index)


def picky(stack: Stack, x: Tensor) -> Tensor:
    state, cache = (x, x * 2), []
    for index, block in enumerate(stack.blocks):
        mask = (torch.arange(8) > index) if index % 2 else None
        options = Options(stack.scale * index, str(index))
        state = block(state, index, mask=mask, cache=cache, options=options)
    return state[0] + state[1] + sum(cache)


@every_policy
def test_arguments_that_differ_by_block(policy):
    check(lambda: Stack([Picky() for _ in range(5)], picky), policy)


def add_between(stack: Stack, x: Tensor) -> Tensor:
    hidden = []
    for block in stack.blocks:
        x = block(x)
        hidden.append(x)
        x = x * stack.scale  # autograd saves tensors between the blocks
        x = torch.nn.functional.dropout(x, 0.5)
    return x + torch.stack(hidden).sum(0)


def in_place_between(stack: Stack, x: Tensor) -> Tensor:
    for block in stack.blocks:
        x = block(x)
        x.add_(1.0)
    return x


class Noisy(nn.Module):
    """Draws from numpy: a single normal number leaves the second of its pair for the next draw."""

    def __init__(self, draws: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.draws):
            x = self.linear(x).sin() * np.random.randn()
        return x


@pytest.mark.parametrize("draws", [(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 0, 1), (2, 1, 0, 3)])
@pytest.mark.parametrize("name", ["full", "sqrt-1", "nested-1"])
def test_random_numbers_of_numpy(name, draws):
    def make() -> nn.Module:
        np.random.seed(0)
        return Stack([Noisy(count) for count in draws], lambda s, x: plain(s, x) * np.random.randn())

    check(make, POLICIES[name])


def layer_drop(stack: Stack, x: Tensor) -> Tensor:
    for block in stack.blocks:
        if random.random() < 0.6:
            x = block(x)
    return x


def twice(stack: Stack, x: Tensor) -> Tensor:
    for block in stack.blocks:
        x = block(block(x))
    return plain(stack, x)


def backwards(stack: Stack, x: Tensor) -> Tensor:
    for block in reversed(stack.blocks):
        x = block(x)
    return x


def parallel_branches(stack: Stack, x: Tensor) -> Tensor:
    return sum((block(x) for block in stack.blocks), torch.zeros(()))


@pytest.mark.parametrize(
    "loop", [add_between, in_place_between, layer_drop, twice, backwards, parallel_branches], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ["sqrt", "sqrt-1", "nested-1", "selective"])
def test_any_code_between_blocks(loop, name):
    check(lambda: transformer(4, loop), POLICIES[name])


class Stateful(nn.Module):
    """Running statistics, a counter, a list, and random numbers of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros(()))
        self.counter = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.counter += 1
        self.seen.append(self.counter)
        self.auxiliary = x.mean()
        return self.norm(self.linear(x) * random.random()) + x


@every_policy
def test_a_recompute_leaves_no_trace(policy):
    def make() -> nn.Module:
        return Stack([Stateful() for _ in range(4)], plain)

    check(make, policy)
    module = make()
    install(module, policy)
    for _ in range(3):
        module(torch.randn(3, 6, 4)).backward()
    assert [block.counter for block in module.blocks] == [3] * 4
    assert [block.seen for block in module.blocks] == [[1, 2, 3]] * 4


@segments
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_and_default_dtype_are_restored(policy, dtype):
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, dtype=torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).float() + torch.ones(8) * x  # of the default dtype

    def loop(stack: Stack, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            x = plain(stack, x.float())
        torch.set_default_dtype(torch.float64)
        return x

    check(lambda: Stack([Casting() for _ in range(4)], loop), policy)


def test_two_chains_and_frozen_blocks():
    class EncoderDecoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = transformer(3)
            self.decoder = transformer(4)
            self.encoder.blocks[0].requires_grad_(False)
            self.encoder.stem.requires_grad_(False)
            self.decoder.blocks[2].requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            memory = plain(self.encoder, self.encoder.stem(x))
            return plain(self.decoder, self.decoder.stem(x) + memory).square().mean()

    for policy in POLICIES.values():
        check(EncoderDecoder, policy)


@pytest.mark.parametrize("name", ["full", "nested-1", "selective"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_blocks_whose_forward_is_compiled(name, when):
    def run(policy: RecomputePolicy | None) -> list[Any]:
        torch._dynamo.reset()

        def make() -> nn.Module:
            module = Stack([Block(8, 2) for _ in range(4)], plain)
            if policy is not None and when == "after":
                install(module, policy)
            for block in module.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager")
            if policy is not None and when == "before":
                install(module, policy)
            return module

        return steps(make, None, 2)

    torch.testing.assert_close(run(POLICIES[name]), run(None), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_around_the_blocks_is_refused():
    torch._dynamo.reset()
    module = Stack([Block(8, 2) for _ in range(3)], plain)
    install(module, POLICIES["full"])
    compiled = torch.compile(module, backend="aot_eager")
    with pytest.raises(UnsupportedError, match=r"block 'blocks.0' is called in a compiled module"):
        compiled(torch.randn(3, 6, 4))
    with torch.no_grad():
        compiled(torch.randn(3, 6, 4))


def test_backward_twice_and_twice_differentiable():
    def run(policy: RecomputePolicy | None) -> list[Tensor]:
        torch.manual_seed(0)
        module = Stack([Picky2() for _ in range(4)], plain)
        if policy is not None:
            install(module, policy)
        x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
        loss = module(x)
        loss.backward(retain_graph=True)
        loss.backward()
        (gradient,) = torch.autograd.grad(module(x), x, create_graph=True)
        gradient.square().sum().backward()
        return [p.grad for p in module.parameters()]

    class Picky2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).tanh() * x

    for name in ("full", "sqrt-1", "nested-1"):
        torch.testing.assert_close(run(POLICIES[name]), run(None), rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------- faults turn it red


@segments
def test_fault_random_state_is_not_restored(policy, monkeypatch):
    monkeypatch.setattr(RandomState, "restore", lambda self: None)
    with pytest.raises(AssertionError, match=r"not equal|not close"):
        check(transformer, policy)


@segments
def test_fault_a_block_of_the_segment_is_skipped(policy, monkeypatch):
    whole = calls_module.Call._chain
    skipped = []

    def lacking(call: Any) -> list[Any]:
        chain = whole(call)
        if len(chain) > 2:
            skipped.append(chain[1].site.block.name)
            chain[1].arguments.restore = lambda *_: (((torch.zeros(3, 6, 8, requires_grad=True)),), {})
        return chain

    monkeypatch.setattr(calls_module.Call, "_chain", lacking)
    with pytest.raises(AssertionError, match=r"not equal|not close"):
        check(transformer, policy)
    assert skipped


# ----------------------------------------------------------------------------------------------------------- refusals


def refusal(stack: Stack, policy: RecomputePolicy, steps_: int = 1) -> str:
    install(stack, policy)
    with pytest.raises(UnsupportedError) as error:
        take_steps(stack, steps_)
    return str(error.value)


def take_steps(stack: Stack, count: int) -> None:
    for _ in range(count):
        stack(torch.randn(3, 6, 4)).backward()


class Adds(nn.Module):
    """Autograd saves the weight, but not the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sin()


def test_input_changed_between_blocks_is_refused_by_place():
    def loop(stack: Stack, x: Tensor) -> Tensor:
        x = x * 1.0
        for block in stack.blocks:
            y = block(x)
            x.add_(1.0)
            x = y
        return x

    message = refusal(Stack([Adds() for _ in range(3)], loop), POLICIES["sqrt-1"])
    assert "args[0] of block 'blocks.0'" in message
    assert "the code between 'blocks.0' and 'blocks.1'" in message


def test_input_changed_after_the_blocks_is_refused():
    def loop(stack: Stack, x: Tensor) -> Tensor:
        first = x * 1.0
        y = plain(stack, first)
        first.zero_()
        return y

    assert "'blocks.0' is changed in place by code after the block" in refusal(
        Stack([Adds() for _ in range(3)], loop), POLICIES["sqrt-1"]
    )


def test_block_that_changes_its_input_is_refused():
    class Changes(Adds):
        def forward(self, x: Tensor) -> Tensor:
            x += self.weight
            return x

    message = refusal(Stack([Changes() for _ in range(3)], lambda s, x: plain(s, x * 1.0)), POLICIES["full"])
    assert "args[0] of block 'blocks.0' is changed in place by the block itself" in message


def test_cache_object_that_is_updated_is_refused():
    class Cache:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

    class Caching(Adds):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.keys.append(x)
            return x + self.weight.sin() * len(cache.keys)

    def loop(stack: Stack, x: Tensor) -> Tensor:
        cache = Cache()
        for block in stack.blocks:
            x = block(x, cache=cache) if block is stack.blocks[0] else block(x, cache)
        return x

    message = refusal(Stack([Caching() for _ in range(3)], loop), POLICIES["sqrt-1"])
    assert "kwargs['cache'] of block 'blocks.0' is a Cache that was changed" in message


def test_parameters_changed_before_backward_are_refused():
    def loop(stack: Stack, x: Tensor) -> Tensor:
        x = plain(stack, x)
        with torch.no_grad():
            stack.blocks[1].weight += 1
        return x

    assert "parameters of block 'blocks.1' changed" in refusal(
        Stack([Adds() for _ in range(3)], loop), POLICIES["sqrt-1"]
    )


def test_block_that_does_not_repeat_is_refused():
    calls = []

    class Moody(Adds):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            for _ in range(5 - len(calls)):
                x = x * self.weight
            return x

    message = refusal(Stack([Moody(), Moody()], plain), POLICIES["full"])
    assert "block 'blocks.1'" in message
    assert "in its forward" in message or "than its forward" in message


def test_what_cannot_be_installed():
    with pytest.raises(UnsupportedError, match="repeated blocks"):
        install(nn.Linear(2, 2), POLICIES["full"])
    module = transformer()
    module.blocks[2].compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"block 'blocks.2' was compiled"):
        install(module, POLICIES["full"])
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nested = nn.ModuleDict({"all": nn.Sequential(inner, nn.Linear(2, 2))})
    with pytest.raises(UnsupportedError, match="cannot lie inside another"):
        install(nested, POLICIES["full"], blocks=["all", "all.0"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "squrt"}, "use 'sqrt'"),
        ({"kind": "full", "nested": True}, "nested is for policy='sqrt' only"),
        ({"kind": "every_k"}, "use every_k=2"),
        ({"kind": "budget", "budget_bytes": 0}, "budget_bytes=0"),
        ({"kind": "sqrt", "segments": 0}, "segments=0"),
    ],
)
def test_options_that_do_not_fit(arguments, message):
    with pytest.raises(UnsupportedError, match=message):
        RecomputePolicy(**arguments)


def test_budget_too_small_names_the_least():
    message = refusal(transformer(), RecomputePolicy("budget", budget_bytes=1000), steps_=2)
    assert "budget_bytes=1000: the 5 blocks hold at least" in message


# ----------------------------------------------------------------------------------------------- the module is intact


@every_policy
def test_names_stay_and_removal_restores_the_module(policy):
    module = transformer()
    names, hooks = list(module.state_dict()), [dict(m._forward_hooks) for m in module.modules()]
    install(module, policy)
    assert list(module.state_dict()) == names
    assert [name for name, _ in module.named_modules()] == [name for name, _ in transformer().named_modules()]
    module(torch.randn(3, 6, 4)).backward()
    remove(module)
    assert installed(module) is None
    assert [dict(m._forward_hooks) for m in module.modules()] == hooks
    assert not any(m._forward_pre_hooks for m in module.modules())
    assert not recompute_plan(module)


def test_policies_may_change_and_a_copy_has_none():
    module = transformer()
    install(module, POLICIES["full"])
    install(module, POLICIES["every_k"])
    assert list(recompute_plan(module).values()) == [0, 1, 0, 1, 0]
    twin = copy.deepcopy(module)
    twin(torch.randn(3, 6, 4)).backward()
    assert not recompute_plan(twin)
    assert recompute_plan(nn.ModuleDict({"inner": module})) == {f"inner.blocks.{i}": i % 2 for i in range(5)}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_untouched(context, monkeypatch):
    monkeypatch.setattr(calls_module.Call, "__init__", lambda *_: pytest.fail("a call was recorded"))
    module = transformer()
    install(module, POLICIES["sqrt-1"])
    with context():
        module(torch.randn(3, 6, 4))


def test_a_forward_that_raises_is_followed_by_good_ones():
    class Failing(Adds):
        fail = True

        def forward(self, x: Tensor) -> Tensor:
            if Failing.fail:
                raise ValueError("on purpose")
            return super().forward(x)

    module = Stack([Adds(), Failing(), Adds()], plain)
    install(module, POLICIES["sqrt-1"])
    with pytest.raises(ValueError, match="on purpose"):
        module(torch.randn(3, 6, 4))
    Failing.fail = False
    torch.manual_seed(0)
    module(torch.randn(3, 6, 4)).backward()


def test_training_mode_of_the_forward_holds_in_the_recompute():
    def loop(stack: Stack, x: Tensor) -> Tensor:
        stack.train()
        x = plain(stack, x)
        stack.eval()
        return x

    check(lambda: transformer(4, loop), POLICIES["sqrt-1"])


def note_input(alive: weakref.WeakSet[Tensor], module: nn.Module, args: tuple[Tensor, ...]) -> None:
    alive.add(args[0])


@segments
def test_nothing_is_held_after_backward_nor_without_it(policy):
    module = transformer()
    install(module, policy)
    gc.collect()
    gc.disable()  # no reference cycle may keep memory until Python looks for it
    try:
        for backward in (True, False):
            x = torch.randn(3, 6, 4)
            alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
            handle = module.blocks[1].register_forward_pre_hook(partial(note_input, alive))
            loss = module(x)
            handle.remove()
            if backward:
                loss.backward()
            del loss, x
            assert not list(alive)
            assert installed(module)._newest() is None
    finally:
        gc.enable()


def test_a_plan_says_how_often_blocks_run_again():
    counts = dict.fromkeys(range(6), 0)

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            counts[numbers[self]] += 1
            return self.linear(x).tanh()

    for policy in POLICIES.values():
        if policy.kind == "selective":
            continue  # every block runs again, but none of its matrix products
        module = Stack([Counted() for _ in range(6)], plain)
        numbers = {block: i for i, block in enumerate(module.blocks)}
        install(module, policy)
        module(torch.randn(3, 6, 4)).backward()
        module(torch.randn(3, 6, 4)).backward()
        counts.update(dict.fromkeys(counts, 0))
        module(torch.randn(3, 6, 4)).backward()
        assert [count - 1 for count in counts.values()] == list(recompute_plan(module).values())
