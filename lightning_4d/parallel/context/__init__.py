"""Context parallelism: ranks that share each sequence.

Attention is computed by a ring, by all-to-all exchanges of heads for positions, or by both. The rest of the model sees
a tensor that shows the whole sequence and holds this rank's part of it.
"""

from lightning_4d.parallel.context import rules
from lightning_4d.parallel.context.boundary import ContextParallel, divided
from lightning_4d.parallel.context.groups import ContextGroups, make_groups, ulysses_size_of
from lightning_4d.parallel.context.report import GatherWarning
from lightning_4d.parallel.context.tensor import SequenceTensor, whole

__all__ = [
    "ContextGroups",
    "ContextParallel",
    "GatherWarning",
    "SequenceTensor",
    "divided",
    "make_groups",
    "rules",
    "ulysses_size_of",
    "whole",
]
