"""Which repeated layers are found in other people's models, from the module tree alone."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.blocks import find_blocks
from tests.modules import GAN, MLP, EncoderStack, TinyGPT, ViT


def names(root, blocks="auto"):
    return [block.name for block in find_blocks(root, blocks)]


class Layer(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 64) for _ in range(experts))


class Stage(nn.Module):
    """A stage of a hierarchical model: a list of layers and a different ending."""

    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(depth))
        self.downsample = nn.Linear(8, 8)


def test_lists_and_sequentials():
    assert names(TinyGPT(layers=4)) == [f"blocks.{i}" for i in range(4)]
    assert names(ViT())
    assert all(name.startswith("encoder.layers.") for name in names(EncoderStack()))


def test_experts_inside_a_layer_belong_to_it_even_if_they_hold_most_parameters():
    model = nn.ModuleDict({"layers": nn.ModuleList(Layer(experts=8) for _ in range(3))})
    assert names(model) == ["layers.0", "layers.1", "layers.2"]


def test_encoder_and_decoder_are_two_chains():
    model = nn.ModuleDict(
        {"encoder": nn.ModuleList(Layer() for _ in range(2)), "decoder": nn.ModuleList(Stage(1) for _ in range(2))}
    )
    assert names(model) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_a_small_chain_beside_a_large_one_is_left_out():
    model = nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            "layers": nn.ModuleList(map(Layer, (0, 0))),
        }
    )
    assert names(model) == ["layers.0", "layers.1"]


def test_sequentials_of_sequentials_are_looked_into():
    stages = nn.Sequential(*(nn.Sequential(*(Layer() for _ in range(2))) for _ in range(2)))
    assert names(stages) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_layer_used_twice_is_one_block():
    layer = Layer()
    model = nn.ModuleDict({"layers": nn.ModuleList([layer, layer, Layer()])})
    assert len(names(model)) == 2


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ModuleList([nn.ReLU(), nn.ReLU()])])
def test_no_repeated_layers(model):
    assert names(model) == []


def test_named_container():
    model = GAN()
    assert names(TinyGPT(layers=2), "blocks") == ["blocks.0", "blocks.1"]
    assert names(MLP()) == names(MLP(), "auto")
    generator = next(name for name, module in model.named_modules() if isinstance(module, nn.Sequential))
    assert all(name.startswith(generator) for name in names(model, [generator]))


@pytest.mark.parametrize(("given", "near"), [("block", "blocks"), ("embedding", "blocks"), ("model.blocks", "blocks")])
def test_a_wrong_name_says_what_there_is(given, near):
    with pytest.raises(UnsupportedError, match=rf"blocks='{given}'.*'{near}'"):
        find_blocks(TinyGPT(), given)
