"""The table of what combines with what, made from the grid of tests that runs it.

python -m tests.compatibility            # print it
python -m tests.compatibility --readme   # write it into the README
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.benchmarks.report import write_lines
from tests.grid import COMBINATIONS, FEATURES, SHORT, WHOLE, pruned

SECTION = "compatibility"
COLUMNS = {
    "plain": "plain, validation",
    "accumulation": "accumulation",
    "clipping": "clipping",
    "ragged": "unequal targets",
    "dropout": "dropout",
    "recompute": "recompute",
    "sequence": "sequence parallel",
    "mixed": "bf16-mixed",
    "zero_bubble": "zero bubble",
    "ulysses": "Ulysses",
}
TESTED, SLOW, ELSEWHERE, DISTRIBUTION = "✔", "○", "–", "≈"


def cell(axes: tuple[str, ...], feature: str) -> str:
    """✔: the default grid compares it with DDP; ○: the slow one; –: not of these axes; ≈: equal in distribution."""
    if any(case.axes == axes and case.feature == feature for case in pruned()):
        return TESTED
    if any(case.axes == axes and case.feature == feature for case in WHOLE):
        return SLOW
    return DISTRIBUTION if FEATURES[feature].excludes & set(axes) else ELSEWHERE


def table() -> list[str]:
    """The table as lines of Markdown."""
    lines = ["| axes, each of size 2 | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for axes in COMBINATIONS:
        name = " × ".join(SHORT[axis] for axis in axes)
        lines.append(f"| {name} | " + " | ".join(cell(axes, feature) for feature in COLUMNS) + " |")
    return lines


def main(options: Sequence[str]) -> None:
    """Print the table, or write it."""
    if "--readme" in options:
        write_lines(SECTION, table())
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main(sys.argv[1:])
