"""`ParallelLayout`: arithmetic over all small layouts; every refusal with its rule and a nearest layout that works."""

from __future__ import annotations

import ast
import copy
import dataclasses
import itertools
import pickle
import re
import subprocess
import sys
from fractions import Fraction
from math import prod
from pathlib import Path

import numpy as np
import pytest

from lightning_4d.errors import CheckpointError, LayoutError, Lightning4DError, UnsupportedError, explain
from lightning_4d.layout import AXES, ParallelLayout, hsdp_sizes

PP, REPLICATE, SHARD, CP, TP = KEYWORDS = (
    "pipeline_parallel_size",
    "data_parallel_replicate_size",
    "data_parallel_shard_size",
    "context_parallel_size",
    "tensor_parallel_size",
)
AXIS_OF = dict(zip(KEYWORDS, AXES, strict=True))
LARGEST_WORLD = 64


def factorizations(number: int, parts: int) -> list[tuple[int, ...]]:
    """All ordered ways to write `number` as a product of `parts` positive ints."""
    if parts == 1:
        return [(number,)]
    return [
        (d, *rest) for d in range(1, number + 1) if number % d == 0 for rest in factorizations(number // d, parts - 1)
    ]


ALL_LAYOUTS = [ParallelLayout(*sizes) for world in range(1, LARGEST_WORLD + 1) for sizes in factorizations(world, 5)]


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(LayoutError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def remedy_in(message: str) -> tuple[dict[str, object], ParallelLayout]:
    """Read "use name=size, ... (text form)." at the end of a message back into keyword arguments and a layout."""
    match = re.fullmatch(r".*\buse (?P<sizes>\w+=[^ ]+(, \w+=[^ ]+)*) \((?P<text>[^()]*)\)\.", message)
    assert match, message
    sizes = {name: ast.literal_eval(value) for name, value in (item.split("=") for item in match["sizes"].split(", "))}
    return sizes, ParallelLayout.parse(match["text"])


# ---- the dataclass


def test_defaults_and_derived_sizes():
    assert ParallelLayout().sizes == (1, 1, 1, 1, 1)
    layout = ParallelLayout(**dict(zip(KEYWORDS, (2, 3, 5, 7, 11), strict=True)))
    assert layout == ParallelLayout(2, 3, 5, 7, 11)
    assert layout.sizes == (2, 3, 5, 7, 11)
    assert layout.axis_sizes == {"pp": 2, "dp_replicate": 3, "dp_shard": 5, "cp": 7, "tp": 11}
    assert tuple(layout.axis_sizes) == AXES == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert (layout.world_size, layout.data_parallel_size, layout.model_parallel_size) == (2310, 15, 154)


def test_is_an_immutable_value():
    layout = ParallelLayout(tensor_parallel_size=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.tensor_parallel_size = 4
    assert {layout: "a"}[ParallelLayout(1, 1, 1, 1, 2)] == "a"
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout
    assert dataclasses.replace(layout, pipeline_parallel_size=2) == ParallelLayout(2, 1, 1, 1, 2)
    assert [field.name for field in dataclasses.fields(layout)] == list(KEYWORDS)


@pytest.mark.parametrize("size", [np.int64(4), np.int32(4), np.uint8(4)])
def test_numpy_integers_become_int(size):
    layout = ParallelLayout(tensor_parallel_size=size)
    resolved = ParallelLayout.resolve(np.int64(8), tensor_parallel_size=size, data_parallel_shard_size="auto")
    assert all(type(size) is int for size in (*layout.sizes, *resolved.sizes, layout.world_size))
    assert str(resolved) == "pp1.dp1x2.cp1.tp4"
    assert layout.coordinate(np.int64(3))["tp"] == 3


# What is not a size, and the positive int that a message should offer in its place.
NOT_SIZES = [
    (0, 1),
    (-1, 1),
    (-4, 1),
    (True, 1),
    (False, 1),
    (np.bool_(True), 1),
    (2.0, 2),
    (3.7, 4),
    (float("nan"), 1),
    (float("inf"), 1),
    ("8", 8),
    ("", 1),
    ("many", 1),
    ("Auto", 1),
    (None, 1),
    ([2], 1),
    (np.array([2, 3]), 1),
]


@pytest.mark.parametrize("keyword", KEYWORDS)
@pytest.mark.parametrize(("size", "nearest"), NOT_SIZES)
def test_constructor_refuses_what_is_not_a_size(keyword, size, nearest):
    message = refusal(ParallelLayout, **{keyword: size})
    assert message == f"{keyword}={size!r}: a size is an int of at least 1; use {keyword}={nearest}."
    assert ParallelLayout(**{keyword: nearest})


def test_constructor_sends_auto_to_resolve():
    message = refusal(ParallelLayout, tensor_parallel_size="auto")
    assert "tensor_parallel_size='auto'" in message
    assert "use ParallelLayout.resolve(world_size, tensor_parallel_size='auto')" in message


# ---- coordinates, over every layout up to 64 ranks


def test_coordinate_and_rank_are_inverse_and_row_major():
    for layout in ALL_LAYOUTS:
        expected = itertools.product(*(range(size) for size in layout.sizes))  # the last axis varies fastest
        for rank, indices in zip(range(layout.world_size), expected, strict=True):
            coordinate = layout.coordinate(rank)
            assert tuple(coordinate) == AXES
            assert tuple(coordinate.values()) == indices
            assert layout.rank(coordinate) == rank


def partition(layout: ParallelLayout, axes: tuple[str, ...]) -> list[list[int]]:
    """The groups along `axes`, each asked for by its first rank, once it is checked that they partition the world."""
    groups, seen = [], set()
    for rank in range(layout.world_size):
        if rank not in seen:
            groups.append(layout.group_ranks(axes, rank))
            assert len(groups[-1]) == prod(layout.axis_sizes[axis] for axis in axes)
            assert seen.isdisjoint(groups[-1])
            seen.update(groups[-1])
    assert seen == set(range(layout.world_size))
    return groups


def test_groups_partition_the_world():
    for layout in ALL_LAYOUTS:
        wide = tuple(axis for axis in AXES if layout.axis_sizes[axis] > 1)
        for axes in ((axis,) for axis in wide):
            partition(layout, axes)
        assert partition(layout, wide) == [list(range(layout.world_size))]


def test_groups_of_every_set_of_axes_partition_the_world():
    for layout in (layout for layout in ALL_LAYOUTS if layout.world_size <= 12):
        for axes in itertools.chain.from_iterable(itertools.combinations(AXES, count) for count in range(6)):
            for group in partition(layout, axes):
                assert all(layout.group_ranks(axes, rank) == group for rank in group)


def test_group_shares_all_other_coordinates():
    for layout in (ParallelLayout(2, 3, 2, 1, 2), ParallelLayout(1, 2, 2, 3, 2), ParallelLayout(2, 2, 2, 2, 2)):
        coordinates = [layout.coordinate(rank) for rank in range(layout.world_size)]
        for count in range(6):
            for axes in itertools.combinations(AXES, count):
                for rank, here in enumerate(coordinates):
                    expected = [
                        other
                        for other, there in enumerate(coordinates)
                        if all(here[axis] == there[axis] for axis in AXES if axis not in axes)
                    ]
                    assert layout.group_ranks(axes, rank) == layout.group_ranks(reversed(axes), rank) == expected


def test_group_ranks_takes_one_name_or_many():
    layout = ParallelLayout.parse("dp2x2.tp2")
    assert layout.group_ranks("dp_shard", 5) == layout.group_ranks(["dp_shard"], 5) == [5, 7]
    assert layout.group_ranks({"dp_shard", "dp_replicate"}, 0) == [0, 2, 4, 6]
    assert layout.group_ranks((), 3) == [3]


def test_data_parallel_rank_numbers_the_shares_replicate_major():
    for layout in ALL_LAYOUTS:
        ranks = [layout.data_parallel_rank(rank) for rank in range(layout.world_size)]
        assert all(ranks.count(share) == layout.model_parallel_size for share in range(layout.data_parallel_size))
        # Along the data axes the shares count up from 0; along the model axes they stay the same.
        for rank in (0, layout.world_size - 1):
            group = layout.group_ranks(("dp_replicate", "dp_shard"), rank)
            assert [ranks[other] for other in group] == list(range(layout.data_parallel_size))
            assert {ranks[other] for other in layout.group_ranks(("pp", "cp", "tp"), rank)} == {ranks[rank]}


def test_rank_lets_axes_of_size_one_be_left_out():
    layout = ParallelLayout.parse("pp2.dp1x2")
    assert layout.rank({"dp_shard": 1, "pp": 1}) == 3
    message = refusal(layout.rank, {"pp": 1})
    assert "coordinate {'pp': 1}" in message
    assert "pp2.dp1x2.cp1.tp1" in message
    assert "add an index for dp_shard" in message


@pytest.mark.parametrize(
    ("call", "given", "nearest"),
    [
        (lambda layout: layout.coordinate(4), "rank 4", "use 3."),
        (lambda layout: layout.coordinate(-1), "rank -1", "use 0."),
        (lambda layout: layout.coordinate(True), "rank True", "use 0."),
        (lambda layout: layout.coordinate(1.0), "rank 1.0", "use 0."),
        (lambda layout: layout.group_ranks("tp", 17), "rank 17", "use 3."),
        (lambda layout: layout.data_parallel_rank(4), "rank 4", "use 3."),
        (lambda layout: layout.rank({"pp": 0, "dp_shard": 2}), "dp_shard 2", "use 1."),
        (lambda layout: layout.rank({"pp": -1, "dp_shard": 0}), "pp -1", "use 0."),
        (lambda layout: layout.rank({"pp": 0, "dp_shard": 0, "tp": 1}), "tp 1", "use 0."),
    ],
)
def test_index_out_of_range_is_named(call, given, nearest):
    message = refusal(call, ParallelLayout.parse("pp2.dp2"))
    assert message.startswith(f"{given}: in pp2.dp1x2.cp1.tp1 (4 processes) it is an int from 0 to ")
    assert message.endswith(nearest)


@pytest.mark.parametrize(
    "call",
    [
        lambda layout: layout.group_ranks("dp", 0),
        lambda layout: layout.group_ranks(("tp", "dp"), 0),
        lambda layout: layout.rank({"dp": 0}),
    ],
)
def test_unknown_axis_is_named(call):
    message = refusal(call, ParallelLayout())
    assert message == "axis 'dp': a layout has five axes; use one or more of pp, dp_replicate, dp_shard, cp, tp."


# ---- the text form


def test_text_form_round_trips():
    for layout in ALL_LAYOUTS:
        assert ParallelLayout.parse(str(layout)) == layout
    assert len({str(layout) for layout in ALL_LAYOUTS}) == len(ALL_LAYOUTS)
    assert str(ParallelLayout(2, 2, 4, 1, 8)) == "pp2.dp2x4.cp1.tp8"


def test_text_form_in_any_order():
    layout = ParallelLayout(2, 3, 4, 5, 6)
    for parts in itertools.permutations(str(layout).split(".")):
        assert ParallelLayout.parse(".".join(parts)) == layout


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dp8", (1, 1, 8, 1, 1)),
        ("dp2x1", (1, 2, 1, 1, 1)),
        ("tp4", (1, 1, 1, 1, 4)),
        ("cp3", (1, 1, 1, 3, 1)),
        ("pp16", (16, 1, 1, 1, 1)),
        ("PP2.Dp2X4.TP8", (2, 2, 4, 1, 8)),
        ("  tp2 . dp8\t", (1, 1, 8, 1, 2)),
        ("tp08", (1, 1, 1, 1, 8)),
        ("dp16384", (1, 1, 16384, 1, 1)),
    ],
)
def test_text_form_is_tolerant(text, sizes):
    assert ParallelLayout.parse(text).sizes == sizes


@pytest.mark.parametrize(
    ("text", "faults", "nearest"),
    [
        ("", "it has no part", "pp1.dp1x1.cp1.tp1"),
        ("   ", "it has no part", "pp1.dp1x1.cp1.tp1"),
        (None, "it has no part", "pp1.dp1x1.cp1.tp1"),
        (8, "it has no part", "pp1.dp1x1.cp1.tp1"),
        ("pp2.xx", "unknown part 'xx'", "pp2.dp1x1.cp1.tp1"),
        ("PP2.Ep4", "unknown part 'Ep4'", "pp2.dp1x1.cp1.tp1"),
        ("pp2.", "unknown part ''", "pp2.dp1x1.cp1.tp1"),
        ("pp2..tp2", "unknown part ''", "pp2.dp1x1.cp1.tp2"),
        ("dp2x4x2.tp2", "unknown part 'dp2x4x2'", "pp1.dp1x1.cp1.tp2"),
        ("dp2x", "unknown part 'dp2x'", "pp1.dp1x1.cp1.tp1"),
        ("dpx2", "unknown part 'dpx2'", "pp1.dp1x1.cp1.tp1"),
        ("dp", "unknown part 'dp'", "pp1.dp1x1.cp1.tp1"),
        ("pp2x3", "unknown part 'pp2x3'", "pp1.dp1x1.cp1.tp1"),
        ("pp-1", "unknown part 'pp-1'", "pp1.dp1x1.cp1.tp1"),
        ("tp\u0662", "unknown part 'tp\u0662'", "pp1.dp1x1.cp1.tp1"),  # a digit, but not an ASCII one
        ("tp" + "9" * 5000, "unknown part 'tp9999", "pp1.dp1x1.cp1.tp1"),  # more digits than int() takes
        ("dp" + "9" * 5000, "unknown part 'dp9999", "pp1.dp1x1.cp1.tp1"),
        ("dp" + "9" * 5000 + "x2", "unknown part 'dp9999", "pp1.dp1x1.cp1.tp1"),
        ("tp2,pp2", "unknown part 'tp2,pp2'", "pp1.dp1x1.cp1.tp1"),
        ("tp0", "zero in part 'tp0'", "pp1.dp1x1.cp1.tp1"),
        ("dp0x4", "zero in part 'dp0x4'", "pp1.dp1x4.cp1.tp1"),
        ("dp4x0", "zero in part 'dp4x0'", "pp1.dp4x1.cp1.tp1"),
        ("tp2.tp4", "repeated part 'tp4'", "pp1.dp1x1.cp1.tp2"),
        ("dp2x4.dp8", "repeated part 'dp8'", "pp1.dp2x4.cp1.tp1"),
        ("tp0.tp3.zz1", "zero in part 'tp0', repeated part 'tp3', unknown part 'zz1'", "pp1.dp1x1.cp1.tp1"),
    ],
)
def test_text_form_refusals(text, faults, nearest):
    message = refusal(ParallelLayout.parse, text)
    assert message.startswith(f"layout text {text!r} ({faults}")
    assert "each part once, such as pp2.dp2x4.cp1.tp8" in message
    assert ParallelLayout.parse("pp2.dp2x4.cp1.tp8")
    assert message.endswith(f"use {nearest!r}.")
    assert str(ParallelLayout.parse(nearest)) == nearest


# ---- resolve


def test_resolve_accepts_every_layout_and_fills_every_auto():
    for layout in ALL_LAYOUTS:
        sizes = dict(zip(KEYWORDS, layout.sizes, strict=True))
        assert ParallelLayout.resolve(layout.world_size, **sizes) == layout
        for keyword in KEYWORDS:
            assert ParallelLayout.resolve(layout.world_size, **{**sizes, keyword: "auto"}) == layout


def test_resolve_defaults_are_one():
    assert ParallelLayout.resolve(1) == ParallelLayout()
    assert ParallelLayout.resolve(6, context_parallel_size="auto") == ParallelLayout(context_parallel_size=6)


EQUAL = r"the product of the sizes \({}\) must equal the world size"
DIVIDE = r"the product of the other sizes \({}\) must divide the world size"
TWO_AUTOS = "at most one size may be 'auto'"

# (world size, sizes given, rule, device counts that would do, sizes in the remedy, text form)
MISFITS = [
    # fewer devices than the layout needs
    (2, {REPLICATE: 2, SHARD: 2}, EQUAL.format(4), "4", {REPLICATE: 1, SHARD: 2}, "pp1.dp1x2.cp1.tp1"),
    (1, {REPLICATE: 2, SHARD: 2}, EQUAL.format(4), "4", {REPLICATE: 1, SHARD: 1}, "pp1.dp1x1.cp1.tp1"),
    (3, {REPLICATE: 2, SHARD: 2}, EQUAL.format(4), "4", {REPLICATE: 1, SHARD: 3}, "pp1.dp1x3.cp1.tp1"),
    (4, {SHARD: "auto", TP: 8}, DIVIDE.format(8), "8", {SHARD: "auto", TP: 4}, "pp1.dp1x1.cp1.tp4"),
    (1, {SHARD: "auto", PP: 2}, DIVIDE.format(2), "2", {PP: 1, SHARD: "auto"}, "pp1.dp1x1.cp1.tp1"),
    # more devices
    (8, {REPLICATE: 2, SHARD: 2}, EQUAL.format(4), "4", {REPLICATE: 2, SHARD: 4}, "pp1.dp2x4.cp1.tp1"),
    (8, {TP: 2}, EQUAL.format(2), "2", {SHARD: 4, TP: 2}, "pp1.dp1x4.cp1.tp2"),
    # a size that does not divide
    (8, {SHARD: "auto", TP: 3}, DIVIDE.format(3), "6 or 9", {SHARD: "auto", TP: 4}, "pp1.dp1x2.cp1.tp4"),
    (7, {SHARD: "auto", TP: 2}, DIVIDE.format(2), "6 or 8", {SHARD: "auto", TP: 1}, "pp1.dp1x7.cp1.tp1"),
    (
        12,
        {REPLICATE: 5, SHARD: "auto"},
        DIVIDE.format(5),
        "10 or 15",
        {REPLICATE: 6, SHARD: "auto"},
        "pp1.dp6x2.cp1.tp1",
    ),
    # data axes give way before pipeline, context and tensor
    (12, {REPLICATE: 2, SHARD: 3, TP: 4}, EQUAL.format(24), "24", {REPLICATE: 1, SHARD: 3, TP: 4}, "pp1.dp1x3.cp1.tp4"),
    (
        8,
        {REPLICATE: 2, PP: 2, CP: 2, TP: 2},
        EQUAL.format(16),
        "16",
        {REPLICATE: 1, PP: 2, CP: 2, TP: 2},
        "pp2.cp2.tp2",
    ),
    (64, {REPLICATE: 3, SHARD: "auto", TP: 6}, DIVIDE.format(18), "54 or 72", {REPLICATE: 4, TP: 8}, "dp4x2.tp8"),
    # one size changes rather than two, even if it is the tensor size
    (16, {REPLICATE: 4, SHARD: 4, TP: 8}, EQUAL.format(128), "128", {TP: 1}, "pp1.dp4x4.cp1.tp1"),
]


@pytest.mark.parametrize(("world", "given", "rule", "devices", "remedy", "text"), MISFITS)
def test_misfit_names_sizes_rule_devices_and_nearest_layout(world, given, rule, devices, remedy, text):
    message = refusal(ParallelLayout.resolve, world, **given)
    for keyword, size in given.items():
        assert f"{keyword}={size!r}" in message.partition(" with world_size=")[0]
    assert f" with world_size={world}: " in message
    assert re.search(rule, message)
    assert f"set the Trainer's devices x num_nodes to {devices}, or use " in message
    sizes, layout = remedy_in(message)
    assert sizes == {**given, **remedy}
    assert layout == ParallelLayout.parse(text) == ParallelLayout.resolve(world, **sizes)
    for count in devices.split(" or "):
        assert ParallelLayout.resolve(int(count), **given).world_size == int(count)


def test_all_sizes_are_named_when_none_was_given():
    message = refusal(ParallelLayout.resolve, 8)
    assert message.startswith(", ".join(f"{keyword}=1" for keyword in KEYWORDS) + " with world_size=8: ")
    assert remedy_in(message) == ({SHARD: 8}, ParallelLayout(data_parallel_shard_size=8))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({SHARD: "auto", TP: "auto"}, TP),  # the shards are often "auto" by default only
        ({SHARD: "auto", PP: "auto"}, PP),
        ({SHARD: "auto", CP: "auto"}, CP),
        ({SHARD: "auto", REPLICATE: "auto"}, REPLICATE),
        (dict.fromkeys(KEYWORDS, "auto"), TP),
    ],
)
def test_two_autos_are_refused(given, kept):
    message = refusal(ParallelLayout.resolve, 8, **given)
    assert all(f"{keyword}='auto'" in message for keyword in given)
    assert TWO_AUTOS in message
    sizes, layout = remedy_in(message)
    assert sizes == {**dict.fromkeys(given, 1), kept: "auto"}
    assert layout == ParallelLayout(**{kept: 8}) == ParallelLayout.resolve(8, **sizes)


def test_two_autos_beside_a_size_that_does_not_divide():
    message = refusal(ParallelLayout.resolve, 8, pipeline_parallel_size=3, **{SHARD: "auto", TP: "auto"})
    assert TWO_AUTOS in message
    assert remedy_in(message) == ({PP: 4, SHARD: 1, TP: "auto"}, ParallelLayout.parse("pp4.tp2"))


@pytest.mark.parametrize("keyword", KEYWORDS)
@pytest.mark.parametrize(("size", "nearest"), NOT_SIZES)
def test_resolve_refuses_what_is_not_a_size(keyword, size, nearest):
    other = TP if keyword != TP else SHARD
    message = refusal(ParallelLayout.resolve, 24, **{keyword: size, other: "auto"})
    assert f"{keyword}={size!r}" in message
    assert f"{other}='auto'" in message
    assert " with world_size=24: " in message
    assert f"{keyword} must be an int of at least 1, or 'auto'" in message
    sizes, layout = remedy_in(message)
    assert sizes == {keyword: nearest, other: "auto"}
    assert layout == ParallelLayout.resolve(24, **sizes)


@pytest.mark.parametrize("size", [-1, None, "Auto", "AUTO", "all"])
def test_what_must_have_meant_auto_becomes_auto_where_no_other_size_is(size):
    message = refusal(ParallelLayout.resolve, 8, tensor_parallel_size=2, data_parallel_shard_size=size)
    assert remedy_in(message) == ({SHARD: "auto", TP: 2}, ParallelLayout.parse("dp4.tp2"))


def test_several_illegal_sizes_are_all_named():
    message = refusal(ParallelLayout.resolve, 8, tensor_parallel_size=0, pipeline_parallel_size="two", **{SHARD: 3})
    assert "pipeline_parallel_size, tensor_parallel_size must be an int" in message
    sizes, layout = remedy_in(message)
    assert layout == ParallelLayout.resolve(8, **sizes)


@pytest.mark.parametrize("name", ["world_size", "num_nodes"])
@pytest.mark.parametrize(("count", "nearest"), NOT_SIZES)
def test_counts_are_checked(name, count, nearest):
    counts = {"world_size": 8, "num_nodes": 1, name: count}
    message = refusal(hsdp_sizes, "auto", "auto", **counts)
    assert message == f"{name}={count!r}: a count is an int of at least 1; use {name}={nearest}."
    if name == "world_size":
        assert refusal(ParallelLayout.resolve, count) == message


# ---- the nearest layout, against a search through all of them

POOL = (1, 2, 3, 4, 6, "auto")
WORLDS = (1, 2, 6, 7, 8, 12, 16)


def cost(given: dict[str, object], layout: ParallelLayout) -> tuple[int, int, Fraction]:
    """Changed sizes, those of pp, cp and tp among them, the product of ratios: what the nearest layout minimizes."""
    changed, model, ratio = 0, 0, Fraction(1)
    for keyword, size in given.items():
        new = layout.axis_sizes[AXIS_OF[keyword]]
        if size not in ("auto", new):
            changed += 1
            model += keyword in (PP, CP, TP)
            ratio *= Fraction(max(size, new), min(size, new))
    return changed, model, ratio


def requests(world: int):
    """Every choice from the pool for pp, replicate, shard and tp that has one "auto" at most and does not fit."""
    for sizes in itertools.product(POOL, repeat=4):
        if sizes.count("auto") > 1:
            continue
        product = prod(size for size in sizes if size != "auto")
        if world % product if "auto" in sizes else world != product:
            yield dict(zip(KEYWORDS, (*sizes[:3], 1, sizes[3]), strict=True))


@pytest.mark.parametrize("world", WORLDS)
def test_no_legal_layout_is_nearer_than_the_one_named(world):
    legal = [ParallelLayout(*sizes) for sizes in factorizations(world, 5)]
    for given in itertools.islice(requests(world), 0, None, 5):  # a fifth of them, spread evenly
        sizes, layout = remedy_in(refusal(ParallelLayout.resolve, world, **given))
        assert ParallelLayout.resolve(world, **{**given, **sizes}) == layout
        assert cost(given, layout) == min(cost(given, other) for other in legal)


def test_nearest_layout_of_a_large_awkward_world():
    given = dict.fromkeys(KEYWORDS, 11)
    sizes, layout = remedy_in(refusal(ParallelLayout.resolve, 98280, **given))
    assert layout.world_size == 98280
    assert ParallelLayout.resolve(98280, **sizes) == layout


# ---- the HSDP rule


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "nodes", "expected"),
    [
        ("auto", "auto", 1, 1, (1, 1)),
        ("auto", "auto", 8, 1, (1, 8)),
        ("auto", "auto", 16, 2, (2, 8)),
        ("auto", "auto", 4, 4, (4, 1)),
        (2, "auto", 4, 1, (2, 2)),
        ("auto", 2, 4, 1, (2, 2)),
        (8, "auto", 8, 2, (8, 1)),
        ("auto", 8, 8, 2, (1, 8)),
        (2, 2, 4, 1, (2, 2)),
        (np.int64(2), np.int64(4), np.int64(8), np.int64(1), (2, 4)),
    ],
)
def test_hsdp_sizes(replicate, shard, world, nodes, expected):
    sizes = hsdp_sizes(replicate, shard, world, nodes)
    assert sizes == expected
    assert all(type(size) is int for size in sizes)


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "nodes", "rule", "remedy"),
    [
        (2, 2, 2, 1, EQUAL.format(4), {"replicate_size": 1, "shard_size": 2}),
        (2, 2, 8, 1, EQUAL.format(4), {"replicate_size": 2, "shard_size": 4}),
        (3, "auto", 8, 1, DIVIDE.format(3), {"replicate_size": 4, "shard_size": "auto"}),
        ("auto", 3, 8, 2, DIVIDE.format(3), {"replicate_size": "auto", "shard_size": 4}),
        ("auto", "auto", 7, 2, "equally many devices on every node", {"replicate_size": 1, "shard_size": "auto"}),
        ("auto", "auto", 9, 2, "equally many devices on every node", {"replicate_size": 3, "shard_size": "auto"}),
        (0, 2, 8, 1, "replicate_size must be an int", {"replicate_size": 4, "shard_size": 2}),
        ("auto", -1, 8, 1, "shard_size must be an int", {"replicate_size": "auto", "shard_size": 1}),
        (2, "Auto", 8, 1, "shard_size must be an int", {"replicate_size": 2, "shard_size": "auto"}),
        (True, "auto", 8, 1, "replicate_size must be an int", {"replicate_size": 1, "shard_size": "auto"}),
    ],
)
def test_hsdp_refusals(replicate, shard, world, nodes, rule, remedy):
    message = refusal(hsdp_sizes, replicate, shard, world, nodes)
    assert f"replicate_size={replicate!r}, shard_size={shard!r} with world_size={world}" in message
    assert re.search(rule, message)
    sizes, layout = remedy_in(message)
    assert sizes == remedy
    found = hsdp_sizes(sizes["replicate_size"], sizes["shard_size"], world, nodes)
    assert layout == ParallelLayout(data_parallel_replicate_size=found[0], data_parallel_shard_size=found[1])
    assert layout.world_size == world


# ---- errors, and what the files import


def test_error_classes():
    assert LayoutError.__bases__ == (Lightning4DError, ValueError)
    assert UnsupportedError.__bases__ == CheckpointError.__bases__ == (Lightning4DError, RuntimeError)
    error = pickle.loads(pickle.dumps(LayoutError("a: b; c.")))  # as it travels from a worker process
    assert (type(error), str(error)) == (LayoutError, "a: b; c.")


@pytest.mark.parametrize("parts", [("given", "rule", "remedy"), (" given ", "rule.", "remedy. ")])
def test_explain_has_one_punctuation(parts):
    assert explain(*parts) == "given: rule; remedy."


IMPORT_WITHOUT_THE_PACKAGE = """
import sys, types
package = types.ModuleType("lightning_4d")  # stands for the package, whose own __init__ imports torch
package.__path__ = [sys.argv[1]]
sys.modules["lightning_4d"] = package
import lightning_4d.layout
outside = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - set(sys.argv[2].split(","))
print(",".join(sorted(outside)))
"""


def test_layout_imports_the_standard_library_only():
    import lightning_4d.layout as module

    folder = str(Path(module.__file__).parent)
    # Modules that the environment's own start-up files load are not ours.
    bare = [sys.executable, "-c", "import sys; print(','.join({name.partition('.')[0] for name in sys.modules}))"]
    startup = subprocess.run(bare, check=True, capture_output=True, text=True).stdout.strip()
    command = [sys.executable, "-c", IMPORT_WITHOUT_THE_PACKAGE, folder, startup]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert loaded == "lightning_4d"
