"""Predict every run of a CSV file and compare: ``python -m lightning_4d.planner.evaluate FILE.csv --output OUT.csv``.

The file has the columns of published tables (tests/planner/published_runs.csv). What was measured in a run is read for
the comparison only; nothing of it enters its prediction.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_4d.planner.accuracy import Accuracy, accuracy
from lightning_4d.planner.constants import DEFAULT, Constants
from lightning_4d.planner.memory import memory_bytes
from lightning_4d.planner.numbers import GIB
from lightning_4d.planner.published import Run, flops_per_token, read_runs, table_of
from lightning_4d.planner.step_time import step_seconds, total_seconds

__all__ = ["Predictions", "predict"]


class Predictions:
    """Predicted step times and memory of runs, in their order.

    Attributes:
        runs: the runs.
        seconds: of a step.
        bytes: of the fullest device.
    """

    def __init__(self, runs: Sequence[Run], c: Constants = DEFAULT) -> None:
        self.runs = list(runs)
        table = table_of(self.runs)
        parts = step_seconds(table.model, table.machine, table.software, table.plan, c)
        self.seconds: NDArray[np.float64] = np.asarray(total_seconds(parts), float)
        self.bytes: NDArray[np.float64] = np.asarray(
            memory_bytes(table.model, table.software, table.plan, c).total, float
        )

    def rows(self) -> list[dict[str, str]]:
        """Return a row of a table for each run: predicted and published, and the error."""
        return [self._row(run, index) for index, run in enumerate(self.runs)]

    def _row(self, run: Run, index: int) -> dict[str, str]:
        seconds, gib = float(self.seconds[index]), float(self.bytes[index]) / GIB
        capacity = float(run.machine.memory) / GIB
        flops = flops_per_token(run.model, run.row["flops_convention"]) * float(run.plan.samples * run.model.seq_len)
        # The MFU by the row's own way of counting FLOPs, so that it compares with what was published.
        rate = flops / seconds / float(run.plan.devices)
        return {
            "id": run.row["id"],
            "source": run.row["source"],
            "predicted_step_time_s": f"{seconds:.6g}",
            "published_step_time_s": _text(run.seconds),
            "step_time_error": _text(seconds / run.seconds - 1),
            "predicted_tokens_per_s_per_gpu": f"{run.plan.samples * run.model.seq_len / seconds / run.plan.devices:.6g}",
            "predicted_tflops_per_gpu": f"{rate / 1e12:.6g}",
            "predicted_mfu_pct": f"{100 * rate / float(run.machine.peak):.4g}",
            "published_mfu_pct": _text(100 * rate * seconds / run.seconds / float(run.machine.peak)),
            "predicted_memory_gib": f"{gib:.4g}",
            "published_memory_gib": _text(run.memory / GIB),
            "memory_error": _text(gib * GIB / run.memory - 1),
            "device_memory_gib": f"{capacity:.4g}",
            "predicted_status": "ok" if gib <= capacity else "oom",
            "published_status": run.row["status"],
        }


def predict(runs: Sequence[Run], c: Constants = DEFAULT) -> Predictions:
    """Predict runs."""
    return Predictions(runs, c)


def _text(value: float) -> str:
    return "" if value != value else f"{value:.6g}"


def write(rows: Sequence[dict[str, str]], path: str | Path) -> None:
    """Write the table of predictions."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def summary(predictions: Predictions) -> list[str]:
    """Return lines on the errors: by source, overall for GPU runs in 16 bit, for fp8 and for TPUs, and of memory."""
    runs, seconds = predictions.runs, predictions.seconds
    sources: dict[str, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        if run.seconds == run.seconds:
            sources[_short(run.row["source"])].append(index)
    lines = ["step time", *(_line(name, _of(runs, seconds, rows)) for name, rows in sorted(sources.items()))]
    kinds = {
        "GPU, 16-bit": [i for i, run in enumerate(runs) if run.is_gpu and not run.is_fp8],
        "GPU, fp8": [i for i, run in enumerate(runs) if run.is_gpu and run.is_fp8],
        "TPU": [i for i, run in enumerate(runs) if not run.is_gpu],
        "all": list(range(len(runs))),
    }
    lines += [_line(name, _of(runs, seconds, rows)) for name, rows in kinds.items() if rows]
    return [*lines, *_memory_lines(predictions)]


def _short(source: str) -> str:
    return " ".join(source.replace(",", " ").split(" line ")[0].split()[:3])[:44]


def _of(runs: Sequence[Run], seconds: NDArray[np.float64], rows: Sequence[int]) -> Accuracy:
    return accuracy([runs[i] for i in rows], [float(seconds[i]) for i in rows])


def _line(name: str, found: Accuracy) -> str:
    text = f"  {name:44} {found.rows:4d} rows  median {found.median:6.1%}  90th percentile {found.p90:6.1%}"
    if found.pairs:
        text += f"  {found.pairs} pairs, {found.ordered:.1%} ordered right"
    if found.groups:
        text += f"  regret {found.regret:.2%}, at most {found.worst_regret:.1%}"
    return text


def _memory_lines(predictions: Predictions) -> list[str]:
    kept = [(run, bytes_) for run, bytes_ in zip(predictions.runs, predictions.bytes) if run.memory == run.memory]
    lines = ["memory"]
    # torchtitan prints one layout's memory as 77, 62 to 67 and 47 GiB: no peaks.
    for name, is_titan in (("without torchtitan", False), ("torchtitan", True)):
        errors = [abs(b / run.memory - 1) for run, b in kept if ("torchtitan" in run.row["source"]) is is_titan]
        if errors:
            lines.append(
                f"  {name:44} {len(errors):4d} rows  median {np.median(errors):6.1%}  "
                f"90th percentile {np.quantile(errors, 0.9):6.1%}"
            )
    out = [(run, b) for run, b in zip(predictions.runs, predictions.bytes) if run.row["status"].lower() == "oom"]
    right = sum(b > float(run.machine.memory) for run, b in out)
    if out:
        lines.append(f"  published out of memory: {right} of {len(out)} predicted so")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m lightning_4d.planner.evaluate", description=__doc__)
    parser.add_argument("file", help="a CSV file with the columns of published tables")
    parser.add_argument("--output", help="where to write a row of predictions for each run")
    options = parser.parse_args(arguments)
    predictions = predict(read_runs(options.file))
    if options.output:
        write(predictions.rows(), options.output)
    print("\n".join(summary(predictions)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
