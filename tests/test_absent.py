"""Stand-ins keep names, shapes and marks, and take no memory."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from lightning_4d.absent import Released, absent_names, is_absent
from lightning_4d.errors import UnsupportedError


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


@pytest.fixture
def net():
    net = nn.Linear(3, 3)
    Released(lambda module, name: name == "bias", torch.device("cpu")).release([net])
    net.weight.square().sum().backward()
    return net


def test_clipping_by_hand_is_refused_by_norm_and_right_by_value(net):
    with pytest.raises(UnsupportedError, match="gradient_clip_val"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)
    assert net.weight.grad.abs().max() <= 0.01


def test_a_norm_by_hand_warns_with_the_line_that_makes_it(net):
    with pytest.warns(UserWarning, match="counts this rank's stages only") as caught:
        sum(p.grad.norm() for p in net.parameters() if p.grad is not None)
    assert caught[0].filename == __file__


class OwnSGD(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


def test_who_takes_each_parameter_by_itself_hears_nothing(net):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in (OwnSGD(net.parameters()), torch.optim.Adam(net.parameters(), foreach=False)):
            optimizer.step()
            optimizer.zero_grad()
        net.zero_grad()
    assert is_absent(copy.deepcopy(net).bias)
