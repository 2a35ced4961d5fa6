"""Activation checkpointing: blocks, or segments of blocks, computed again in backward instead of kept.

No module is wrapped or renamed. Hooks on the blocks drop what autograd saves inside them, remember their arguments,
and call the blocks again when backward asks. The user's loop over the blocks stays as it is.
"""

from lightning_4d.parallel.recompute.install import Recompute, StageRuns, install, installed, recompute_plan, remove
from lightning_4d.parallel.recompute.plan import BlockBytes, Segment, best_plan, peak_bytes
from lightning_4d.parallel.recompute.policy import POLICIES, RecomputePolicy

__all__ = [
    "POLICIES",
    "BlockBytes",
    "Recompute",
    "RecomputePolicy",
    "Segment",
    "StageRuns",
    "best_plan",
    "install",
    "installed",
    "peak_bytes",
    "recompute_plan",
    "remove",
]
