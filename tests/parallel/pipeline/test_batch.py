"""Batches of any structure are cut into microbatches without losing anything."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.pipeline.batch import batched_entries, bounds, cut, rows_of, signature, without_rows

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    names: list[str]


def nested(rows: int = 6):
    x = torch.arange(rows * 2).view(rows, 2)
    return {
        "pair": Pair(x, x + 1),
        "list": [x, (x * 2,)],
        "sample": Sample(x, [str(i) for i in range(rows)]),
        "ordered": OrderedDict(x=x),
        "table": torch.ones(3, 3),
        "scale": torch.tensor(2.0),
        "text": "abcdef",
        "number": rows,
    }


def test_every_kind_of_container():
    batch = nested()
    assert rows_of(batch) == 6
    pieces = [cut(batch, 6, start, stop) for start, stop in bounds(6, 4)]
    assert [len(piece["pair"].x) for piece in pieces] == [2, 2, 1, 1]
    assert type(pieces[0]["pair"]) is Pair
    assert type(pieces[0]["ordered"]) is OrderedDict
    assert torch.equal(torch.cat([piece["sample"].x for piece in pieces]), batch["sample"].x)
    assert functools.reduce(operator.iadd, (piece["sample"].names for piece in pieces), []) == batch["sample"].names
    for piece in pieces:
        assert piece["table"] is batch["table"]
        assert piece["scale"] is batch["scale"]
        assert (piece["text"], piece["number"]) == ("abcdef", 6)
    assert pieces[1]["pair"].x.data_ptr() == batch["pair"].x[2:].data_ptr()  # no copy


def test_entries_without_a_batch_dimension_can_be_named():
    batch = {"x": torch.ones(4, 2), "mask": torch.ones(4, 4)}
    piece = cut(batch, 4, 0, 1, whole=frozenset([("mask",)]))
    assert piece["x"].shape == (1, 2)
    assert piece["mask"].shape == (4, 4)
    assert list(batched_entries(batch, 4)) == [("x",), ("mask",)]


def test_a_smaller_batch_tells_what_has_no_samples():
    def batch(rows: int):
        return {"x": torch.ones(rows, 4), "mask": torch.ones(4, 4), "a": torch.ones(4), "b": torch.ones(4, 2)}

    whole = without_rows(batch(3), batch(2))
    assert whole == {("mask",), ("a",), ("b",)}
    assert rows_of(batch(3), whole) == 3  # though most entries have four
    assert without_rows(batch(3), None) == frozenset()


def test_an_unknown_object_with_tensors_is_refused():
    class Graph:
        def __init__(self) -> None:
            self.x = torch.ones(4)

    with pytest.raises(UnsupportedError, match="class Graph"):
        cut([torch.ones(4, 1), Graph()], 4, 0, 2)


def test_signatures_tell_shapes_apart():
    assert signature(nested()) == signature(nested())
    assert signature(nested(6)) != signature(nested(5))
