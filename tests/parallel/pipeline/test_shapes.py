"""Records at new lengths follow from records at others, or are not predicted at all."""

from __future__ import annotations

import torch
from torch import nn

from lightning_4d.parallel.blocks import find_blocks
from lightning_4d.parallel.pipeline.batch import signature
from lightning_4d.parallel.pipeline.flow import Flow
from lightning_4d.parallel.pipeline.record import Recorder, StepRecord
from lightning_4d.parallel.pipeline.shapes import ShapeFamily


class Net(nn.Module):
    def __init__(self, rule) -> None:
        super().__init__()
        self.rule = rule
        self.input = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, tokens_BT):
        x = self.input(tokens_BT)
        x = torch.cat([x, x.new_zeros(len(x), self.rule(x.shape[1]), 4)], 1)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def record(net: Net, tokens: torch.Tensor) -> StepRecord:
    recorder = Recorder(net, find_blocks(net), Flow(net.named_parameters(), net.named_buffers()))
    with recorder.recording():
        output = net(tokens)
    return recorder.result(output)


def family(net: Net, shapes: list[tuple[int, int]]) -> ShapeFamily:
    found = ShapeFamily()
    for shape in shapes:
        tokens = torch.zeros(shape, dtype=torch.long)
        found.add(signature([tokens]), record(net, tokens))
    return found


def predicted(family_: ShapeFamily, shape: tuple[int, int]) -> StepRecord | None:
    return family_.predict(signature([torch.zeros(shape, dtype=torch.long)]))


def test_three_lengths_tell_a_fourth():
    net = Net(lambda length: length + 3)
    known = family(net, [(2, 5), (2, 9)])
    assert predicted(known, (2, 12)) is None  # two records have nothing that confirms them
    known = family(net, [(2, 5), (2, 9), (2, 6)])
    assert predicted(known, (2, 12)) == record(net, torch.zeros(2, 12, dtype=torch.long))


def test_lengths_and_samples_vary_together():
    net = Net(lambda length: 1)
    known = family(net, [(2, 5), (2, 9), (3, 6), (4, 4)])
    assert predicted(known, (5, 11)) == record(net, torch.zeros(5, 11, dtype=torch.long))


def test_a_rule_that_is_not_affine_is_not_predicted():
    net = Net(lambda length: -length % 8)
    known = family(net, [(2, 5), (2, 9), (2, 6), (2, 17)])
    assert predicted(known, (2, 12)) is None
