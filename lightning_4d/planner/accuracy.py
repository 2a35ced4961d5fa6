"""How good predictions are: errors of the step time, pairs of layouts ordered right, and what a wrong choice costs.

A planner that is a few per cent off may still choose badly, so pairs are scored too: two runs of one model on the same
devices (kind and number), whose published times per token differ by more than 5 %.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from lightning_4d.planner.published import Run

__all__ = ["Accuracy", "accuracy", "groups_of"]


@dataclass(frozen=True)
class Accuracy:
    """What `accuracy` finds.

    Attributes:
        rows: how many runs.
        median, p90: of the absolute relative error of the step time.
        pairs: pairs of layouts whose times differ by more than 5 %.
        ordered: share of them ordered right.
        groups: groups of runs of one model on the same devices.
        regret: mean over the groups: how much slower the predicted best is than the true best.
        worst_regret: of the worst group.
    """

    rows: int
    median: float
    p90: float
    pairs: int
    ordered: float
    groups: int
    regret: float
    worst_regret: float


def accuracy(runs: Sequence[Run], predicted: Sequence[float]) -> Accuracy:
    """Compare predicted step times with published ones; runs without a published time are left out."""
    kept = [(run, float(time)) for run, time in zip(runs, predicted, strict=True) if run.seconds == run.seconds]
    errors = np.array([abs(time / run.seconds - 1) for run, time in kept])
    pairs: list[bool] = []
    regrets: list[float] = []
    for group in groups_of(kept).values():
        for (true_a, guess_a), (true_b, guess_b) in combinations(group, 2):
            if max(true_a, true_b) > 1.05 * min(true_a, true_b):
                pairs.append((true_a < true_b) == (guess_a < guess_b))
        chosen = min(group, key=lambda pair: pair[1])[0]
        regrets.append(chosen / min(true for true, _ in group) - 1)
    nan = float("nan")
    return Accuracy(
        rows=len(kept),
        median=float(np.median(errors)) if kept else nan,
        p90=float(np.quantile(errors, 0.9)) if kept else nan,
        pairs=len(pairs),
        ordered=float(np.mean(pairs)) if pairs else nan,
        groups=len(regrets),
        regret=float(np.mean(regrets)) if regrets else nan,
        worst_regret=max(regrets, default=nan),
    )


def groups_of(timed: Sequence[tuple[Run, float]]) -> dict[tuple[str, ...], list[tuple[float, float]]]:
    """Return published and predicted seconds per token of runs of one model on the same devices; groups of 2 or more."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for run, time in timed:
        row = run.row
        names = ("layers", "hidden", "vocab", "seq_len", "gpu_type", "gpus", "model_name")
        precision = "fp8" if run.is_fp8 else "16-bit"
        tokens = float(run.plan.samples * run.model.seq_len)
        groups[*(row[name] for name in names), precision].append((run.seconds / tokens, time / tokens))
    return {key: group for key, group in groups.items() if len(group) > 1}
