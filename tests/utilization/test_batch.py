"""What batches of different structures say about themselves."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_4d.utilization.batch import batch_key, find_tokens, sample_count

IDS = torch.randint(10, (3, 5))
IMAGES = torch.zeros(4, 3, 8, 8)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    ids: Tensor
    name: str = "a"


class Graph:
    def __init__(self) -> None:
        self.nodes = torch.zeros(7, 2)


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (IDS, 3, (3, 5)),
        ([IDS, torch.zeros(3)], 3, (3, 5)),
        ({"attention_mask": torch.ones(3, 5, dtype=torch.long), "input_ids": IDS}, 3, (3, 5)),
        (UserDict(input_ids=IDS), 3, (3, 5)),
        ({"a": {"b": (IMAGES, IDS)}}, 4, (3, 5)),
        (Sample(IDS), 3, (3, 5)),
        ((IMAGES, torch.zeros(4, dtype=torch.long)), 4, None),
        (Pair(torch.zeros(2, 5), torch.zeros(2, 1)), 2, None),
        (Graph(), 7, None),
        (["text"], None, None),
        (None, None, None),
    ],
)
def test_samples_and_tokens(batch, samples, tokens):
    assert sample_count(batch) == samples
    found = find_tokens(batch)
    assert (found and (found.samples, found.length)) == tokens


def test_equal_shapes_have_equal_keys_and_others_do_not():
    assert batch_key([IDS, {"x": IMAGES}]) == batch_key([IDS + 1, {"x": IMAGES + 1}])
    for other in ([IDS[:2], {"x": IMAGES}], [IDS, {"y": IMAGES}], [IDS.float(), {"x": IMAGES}], [IDS]):
        assert batch_key([IDS, {"x": IMAGES}]) != batch_key(other)


def test_padding_by_mask_by_labels_or_unknown():
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    by_mask = find_tokens({"input_ids": IDS, "attention_mask": mask, "labels": torch.full((3, 5), -100)})
    assert by_mask is not None
    assert by_mask.lengths_B is not None
    assert by_mask.lengths_B.tolist() == [5, 4, 2]
    # A masked prompt is no padding: only what follows the last label is.
    labels = torch.tensor([[1, 2, 3, 4, 5], [-100, -100, 3, 4, -100], [7, -100, -100, -100, -100]])
    for batch in ((IDS, labels), {"input_ids": IDS, "labels": labels}):
        found = find_tokens(batch)
        assert found is not None
        assert found.lengths_B is not None
        assert found.lengths_B.tolist() == [5, 4, 1]
    unknown = find_tokens({"input_ids": IDS, "token_type_ids": torch.zeros(3, 5, dtype=torch.long)})
    assert unknown is not None
    assert unknown.lengths_B is None
