"""How the blocks of a model are dealt to pipeline ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_4d.planner.facts import Plan, Software
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.numbers import Number, ceil_div

__all__ = ["Stages", "stages_of"]


@dataclass(frozen=True)
class Stages:
    """How the blocks are dealt to pipeline ranks.

    Where pp divides the blocks, every rank has equally many. Where it divides the blocks and two more, the embedding
    and the head each take the place of one block. Otherwise some ranks have one block more, and the last one has not.
    Programs that cut by cost give the last rank as many blocks less as the head is worth.

    Attributes:
        first: blocks of the first rank.
        most: blocks of the rank with most of them.
        last: blocks of the last rank, which also has the head.
    """

    first: Number
    most: Number
    last: Number

    @classmethod
    def of(cls, layers: Number, pp: Number, head: Number = 0.0) -> Stages:
        """Deal `layers` blocks to `pp` ranks; the head costs as much as `head` blocks, 0 where cuts ignore it."""
        pp = np.asarray(pp, float)
        by_count, by_cost = cls._by_count(layers, pp), cls._by_cost(layers, pp, head)
        wanted = (np.asarray(head) > 0) & (pp > 1)
        pairs = ((by_cost.first, by_count.first), (by_cost.most, by_count.most), (by_cost.last, by_count.last))
        return cls(*(np.where(wanted, cost, count) for cost, count in pairs))

    @classmethod
    def _by_cost(cls, layers: Number, pp: Number, head: Number) -> Stages:
        others = np.maximum(pp - 1, 1)
        ideal = np.maximum((layers + head) / pp - head, 0)
        options = []
        for last in (np.floor(ideal), np.ceil(ideal)):
            most = ceil_div(layers - last, others)
            options.append((np.maximum(most, last + head), most, last))
        first = options[0][0] <= options[1][0]
        most, last = (np.where(first, options[0][i], options[1][i]) for i in (1, 2))
        most = np.maximum(most, last)
        return cls(np.minimum(most, np.maximum(np.rint((layers + head) / pp), 1)), most, last)

    @classmethod
    def _by_count(cls, layers: Number, pp: Number) -> Stages:
        even, spare = np.mod(layers, pp) == 0, np.mod(np.asarray(layers) + 2, pp) == 0
        slots = (np.asarray(layers) + 2) / pp
        uneven = ceil_div(layers, pp)
        most = np.where(even, layers / pp, np.where(spare, slots, uneven))
        last = np.where(even, layers / pp, np.where(spare, slots - 1, np.floor(layers / pp)))
        return cls(most, most, last)


def stages_of(model: ModelFacts, software: Software, plan: Plan) -> Stages:
    """Return the stages of plans: by cost where the software balances, the head weighed by its FLOPs."""
    head = model.head_rows * model.embedding_parameters
    block = model.seq_len * (model.attention_parameters + model.ffn_parameters) + model.attention_flops / 2
    return Stages.of(model.layers, plan.pp, np.asarray(software.balances_stages) * head / block)
