"""Which ranks talk over which link, with made-up node boundaries; what is said of axes that cross nodes."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch

from lightning_4d import NDStrategy
from lightning_4d.layout import AXES, ParallelLayout
from lightning_4d.parallel.blocks import find_blocks
from lightning_4d.parallel.tensor import find_plan
from lightning_4d.strategies import nd, placement
from lightning_4d.strategies.placement import SlowLinkWarning, crossings
from tests.modules import TinyGPT
from tests.strategies.scenarios import quiet, trainer_with

CASES = {
    # ranks of a node, and the axes that stay inside one
    ("pp2.dp2x2.cp2.tp2", 8): {"dp_shard", "cp", "tp"},
    ("pp2.dp2x2.cp2.tp2", 4): {"cp", "tp"},
    ("pp2.dp2x2.cp2.tp2", 2): {"tp"},
    ("pp2.dp2x2.cp2.tp2", 1): set(),
    ("pp2.dp2x2.cp2.tp2", 32): {"pp", "dp_replicate", "dp_shard", "cp", "tp"},
    ("dp4x8", 8): {"dp_shard"},
    ("dp4x6.tp2", 8): {"tp"},
    ("tp16", 8): set(),
    ("pp16.dp1x128.cp1.tp8", 8): {"tp"},
    ("pp16.dp1x8.cp16.tp8", 8): {"tp"},
    ("dp3x2", 3): set(),  # of three pairs one lies across
}


@pytest.mark.parametrize(("text", "node"), CASES)
def test_which_axes_stay_inside_a_node(text, node):
    layout = ParallelLayout.parse(text)
    inside = {axis for axis in AXES if layout.axis_sizes[axis] > 1 and not layout.axis_link(axis, node).crosses}
    assert inside == CASES[text, node]


@pytest.mark.parametrize(("text", "node"), [case for case in CASES if ParallelLayout.parse(case[0]).world_size < 100])
def test_links_are_those_of_the_ranks_themselves(text, node):
    """By the ranks of every group, one by one: the nodes they are on."""
    layout = ParallelLayout.parse(text)
    for axis in AXES:
        groups = {tuple(layout.group_ranks(axis, rank)) for rank in range(layout.world_size)}
        assert sorted(map(tuple, layout.groups(axis))) == sorted(groups)
        crossing = [group for group in groups if len({rank // node for rank in group}) > 1]
        assert layout.axis_link(axis, node) == (axis, len(groups), len(crossing))


def test_the_cost_is_that_of_the_plan():
    module = TinyGPT(layers=2)
    blocks = find_blocks(module)
    plan = find_plan(module, blocks, 2)
    said = crossings(ParallelLayout.parse("dp2.tp2"), 1, blocks, plan)
    width = module.head.in_features
    # two row-wise layers, once in forward and once in backward, in fp32
    assert f"{2 * 2 * width * 4:,} bytes for each token and block" in said["tp"]
    assert "Use tensor_parallel_size=1" in said["tp"]
    assert "50 GB/s between nodes instead of 450 GB/s" in said["tp"]
    held = sum(p.numel() * p.element_size() for p in blocks[0].module.parameters())
    assert f"{3 * held // 2:,} bytes for each step and block" in said["dp_shard"]
    assert crossings(ParallelLayout.parse("dp2.tp2"), 4, blocks, plan) == {}


def set_up(node: int, strategy: dict[str, int]) -> list[str]:
    """Train a step as if a node had `node` ranks; return what was said, and the node's size that was asked about."""
    quiet()
    asked = []

    def with_nodes(layout, per_node, *rest):
        asked.append(per_node)
        placement.say_what_crosses(layout, node, *rest)

    nd.say_what_crosses = with_nodes
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer_with(partial(NDStrategy, **strategy), max_steps=1, limit_val_batches=0)().fit(TinyGPT(layers=2))
    finally:
        nd.say_what_crosses = placement.say_what_crosses
    assert asked == [2]
    return [str(one.message) for one in caught if issubclass(one.category, SlowLinkWarning)]


def test_rank_0_warns_once_at_set_up(pool):
    first, second = pool.run(2, set_up, 1, {"tensor_parallel_size": 2})
    assert len(first) == 1
    assert "tensor parallelism (tp=2) crosses nodes of 1 ranks" in first[0]
    assert second == []
    assert pool.run(2, set_up, 2, {"tensor_parallel_size": 2}) == [[], []]
    assert pool.run(2, set_up, 1, {"data_parallel_shard_size": 2}) == [[], []]  # it overlaps: mentioned, no warning


def test_devices_give_the_bandwidths():
    said = crossings(ParallelLayout.parse("cp16"), 8, device=placement.device_facts("A100 SXM 80GB"))
    assert "25 GB/s between nodes instead of 300 GB/s" in said["cp"]
    assert placement._facts(torch.device("cpu")) is None
