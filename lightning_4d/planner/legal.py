"""Which sizes of the axes fit a model that is known by its sizes alone.

A strategy judges by the module itself: which layers a tensor plan divides, how many blocks there are for stages. What
is refused here either would be refused there, or would leave layers whole on every rank and so cost what nobody plans.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_4d.layout import ParallelLayout

__all__ = ["ModelSizes", "axis_conflict", "model_conflicts"]


class ModelSizes(NamedTuple):
    """What of a model the sizes of the axes must fit; 0 where it is not known or does not exist.

    `layers` repeated blocks, `heads` of attention, `kv_heads` of its keys and values, `ffn_hidden` channels inside the
    feed-forward part, `seq_len` tokens of a sample.
    """

    layers: int
    heads: int = 0
    kv_heads: int = 0
    ffn_hidden: int = 0
    seq_len: int = 0


def axis_conflict(axis: str, size: int, model: ModelSizes) -> str | None:
    """Return why an axis of that size does not fit a model, or None where it does.

    >>> axis_conflict("tp", 3, ModelSizes(layers=32, heads=32))
    'tp=3 does not divide the 32 attention heads'
    >>> axis_conflict("pp", 64, ModelSizes(layers=32))
    'pp=64 leaves stages without any of the 32 blocks'
    """
    if axis == "pp" and size > model.layers:
        return f"pp={size} leaves stages without any of the {model.layers} blocks"
    divided = {
        "tp": ((model.heads, "attention heads"), (model.kv_heads, "key/value heads"), (model.ffn_hidden, "channels")),
        "cp": ((model.seq_len // 2 if model.seq_len % 2 == 0 else model.seq_len, "token pairs of a sample"),),
    }
    for count, what in divided.get(axis, ()):
        if size > 1 and count % size:
            return f"{axis}={size} does not divide the {count} {what}"
    return None


def model_conflicts(layout: ParallelLayout, model: ModelSizes) -> list[str]:
    """Return why a layout does not fit a model, axis by axis; empty where it does.

    >>> model_conflicts(ParallelLayout(tensor_parallel_size=8), ModelSizes(layers=4, heads=32, kv_heads=4))
    ['tp=8 does not divide the 4 key/value heads']
    """
    conflicts = (axis_conflict(axis, size, model) for axis, size in layout.axis_sizes.items())
    return [conflict for conflict in conflicts if conflict]
