"""Rehearse one rank of a large job in one process: what it would hold, compute with and communicate.

The rank is set up by the mechanisms of a real run on a process group that has no other ranks, with tensors that have
no memory.
"""

from lightning_4d.rehearsal.llama import Llama, LlamaSizes
from lightning_4d.rehearsal.observe import Communications
from lightning_4d.rehearsal.placed import RehearsalOptions
from lightning_4d.rehearsal.rehearse import rehearse
from lightning_4d.rehearsal.result import Collectives, Rehearsal
from lightning_4d.rehearsal.table import print_rehearsal

__all__ = [
    "Collectives",
    "Communications",
    "Llama",
    "LlamaSizes",
    "Rehearsal",
    "RehearsalOptions",
    "print_rehearsal",
    "rehearse",
]
