"""Ring, Ulysses and hybrid attention give the results and every gradient of attention on one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_4d.parallel.context.attention import context_attention
from lightning_4d.parallel.context.groups import make_groups
from tests.parallel.context.attention import CASES, Case, Result, check, errors, parts, whole


def run_attention(case: Case, ulysses: int) -> Result:
    groups = make_groups([list(range(dist.get_world_size()))], ulysses)
    queries, keys = groups.layout(case.length), groups.layout(case.keys or case.length)
    q, k, v, grad = case.tensors()
    mine = [parts(queries, q), parts(keys, k), parts(keys, v)]
    for tensor in mine:
        tensor.requires_grad_()
    out = context_attention(
        *mine, groups, queries, keys, mask=case.make_mask(), is_causal=case.is_causal, scale=case.scale
    )
    out.backward(parts(queries, grad))
    layouts = (queries, keys, keys)
    return Result(
        whole(queries, out.detach()),
        [whole(layout, tensor.grad) for layout, tensor in zip(layouts, mine, strict=True)],
    )


def run_cases(ulysses: int, cases: list[Case]) -> dict[str, list[float]]:
    return errors(cases, lambda case: run_attention(case, ulysses))


def divisible(ulysses: int) -> list[Case]:
    return [case for case in CASES if case.heads % ulysses == 0]


@pytest.mark.parametrize(("world", "ulysses"), [(2, 1), (4, 1), (2, 2), (4, 4), (4, 2)])
def test_every_case(pool, world, ulysses):
    for found in pool.run(world, run_cases, ulysses, divisible(ulysses)):
        check(found)
