"""Stand-ins keep names, shapes and marks, and take no memory."""

from __future__ import annotations

import torch
from torch import nn

from lightning_4d.absent import Released, absent_names, is_absent


def test_tied_parameters_get_one_stand_in():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    net[0].weight.no_decay = True
    Released(lambda module, name: module is not net[1], torch.device("cpu")).release(net.modules())
    assert net[0].weight is net[2].weight
    assert is_absent(net[0].weight)
    assert not is_absent(net[1].weight)
    assert net[0].weight.no_decay
    assert net[0].weight.shape == (4, 4)
    assert net[0].weight.untyped_storage().nbytes() == 4
    assert absent_names(net) == {"0.weight", "2.weight"}
    assert [name for name, _ in net.named_parameters()] == ["0.weight", "1.weight"]


def test_an_optimizer_leaves_them_alone():
    net = nn.Linear(3, 3)
    Released(lambda module, name: name == "bias", torch.device("cpu")).release([net])
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    net.weight.square().sum().backward()
    optimizer.step()
    assert set(optimizer.state) == {net.weight}
