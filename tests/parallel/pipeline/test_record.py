"""What a record says of a step: who needs what, and what crosses the cuts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.blocks import find_blocks
from lightning_4d.parallel.pipeline.flow import Flow, Output
from lightning_4d.parallel.pipeline.plan import StagePlan
from lightning_4d.parallel.pipeline.record import Recorder, SameAsArgument, StepRecord


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask=None):
        self.seen = self.linear(x).mean()
        return self.linear(x), mask


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.condition = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, tokens, *, skip=False, seen=False):
        x, mask = self.embedding(tokens), torch.ones(4)
        first = None
        for layer in self.layers:
            x, mask = layer(x * self.condition, mask)
            first = x if first is None else first
        x = x + first if skip else x
        return self.head(x).sum() + (sum(layer.seen for layer in self.layers) if seen else 0)


def record(net: nn.Module, *args, **kwargs) -> StepRecord:
    recorder = Recorder(net, find_blocks(net), Flow(net.named_parameters(), net.named_buffers()))
    with recorder.recording():
        output = net(*args, **kwargs)
    return recorder.result(output)


PLAN = StagePlan(tuple(f"layers.{i}" for i in range(4)), (0, 1, 3), (0, 1, 2))
TOKENS = torch.zeros(2, 3, dtype=torch.long)


def test_parameters_by_stage():
    net = Net()
    found = record(net, TOKENS)
    assert found.order == PLAN.order
    stages = PLAN.parameter_stages(found, [name for name, _ in net.named_parameters()])
    assert stages["embedding.weight"] == {0, 2}  # tied to the head
    assert stages["condition"] == {0, 1, 2}
    assert stages["layers.1.linear.weight"] == {1}
    assert stages["unused"] == {0}


def test_what_crosses_the_cuts():
    net = Net()
    assert PLAN.carried(record(net, TOKENS)) == [(Output(0, 0),), (Output(2, 0),)]
    skipping = PLAN.carried(record(net, TOKENS, skip=True))
    assert skipping == [(Output(0, 0),), (Output(0, 0), Output(2, 0))]
    attributes = PLAN.carried(record(net, TOKENS, seen=True))
    assert attributes == [(Output(0, 0), Output(0, 2)), (Output(0, 2), Output(1, 2), Output(2, 0), Output(2, 2))]


def test_an_argument_that_is_handed_back_is_not_sent():
    leaves = record(Net(), TOKENS).blocks[1].leaves
    assert isinstance(leaves[1], SameAsArgument)


def test_a_parameter_used_twice_in_a_stage():
    found = record(Net(), TOKENS)
    assert found.uses_twice(range(1))  # the layer runs its linear twice
    assert not record(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(1, 4)).uses_twice(range(2))


@pytest.mark.parametrize(("change", "message"), [("twice", "more than once"), ("none", "does not call the block")])
def test_refused(change, message):
    net = Net()
    if change == "twice":
        net.forward = lambda x: net.layers[0](net.layers[0](net.embedding(x))[0])[0].sum()
    else:
        net.forward = lambda x: net.layers[0](net.embedding(x))[0].sum()
    with pytest.raises(UnsupportedError, match=message):
        record(net, TOKENS)


def test_nothing_is_left_on_the_module():
    net = Net()
    record(net, TOKENS)
    assert all("_call_impl" not in vars(module) for module in net.modules())
