"""Fit the planner's constants on published runs: ``python -m tests.planner.fit [--leave-out]``. Deterministic.

Least squares of log(predicted / published), with a robust loss (a published number may be wrong), by Levenberg and
Marquardt's method. Each constant moves between the bounds that physics sets it (`constants.FITTED`), through a logistic
map; a weak pull towards the middle keeps constants that the runs do not identify from running to a bound. A run weighs
less where its source has many, so that no source decides alone.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_4d.planner import constants as constants_module
from lightning_4d.planner.accuracy import Accuracy, accuracy
from lightning_4d.planner.constants import DEFAULT, FITTED, FITTED_MEMORY, Constants
from lightning_4d.planner.memory import memory_bytes
from lightning_4d.planner.numbers import GIB
from lightning_4d.planner.published import Run, read_runs, table_of
from lightning_4d.planner.step_time import step_seconds, total_seconds

SOURCE = Path(constants_module.__file__)
RUNS = Path(__file__).parent / "published_runs.csv"
# Where these are left out of fits, and why, is said in docs/planner.md.
LEFT_OUT = ("TPU", "Megatron-LM README", "performance_long_sequence.md: LLAMA3-8B (FP8) - B200")
ORDER, PULL = 1.0, 0.15
Vector = NDArray[np.float64]


def family(run: Run) -> str:
    """The project that published a run."""
    source = run.row["source"]
    names = {
        "bigscience": "BLOOM",
        "llm-foundry": "Mosaic",
        "SC'21": "SC'21",
        "nanotron": "nanotron",
        "InternEvo": "InternEvo",
        "torchtitan": "torchtitan",
        "NeMo": "NeMo",
        "Makefile": "Megatron 2020",
        "2407.21783": "Llama 3",
        "Megatron-LM README": "Megatron H100",
    }
    if "maxtext" in source:
        return "MaxText GPU" if run.is_gpu else "MaxText TPU"
    return next((name for word, name in names.items() if word in source), "other")


def is_for_fit(run: Run) -> bool:
    """Whether a run may enter a fit."""
    text = f"{run.row['source']} {run.row['gpu_type']}"
    return run.seconds == run.seconds and not any(word in text for word in LEFT_OUT)


def predict(runs: Sequence[Run], c: Constants = DEFAULT) -> Vector:
    """Step times of runs."""
    table = table_of(runs)
    return np.asarray(total_seconds(step_seconds(table.model, table.machine, table.software, table.plan, c)))


def fit(runs: Sequence[Run], names: Sequence[str] = tuple(FITTED), start: Constants = DEFAULT) -> Constants:
    """Fit the named constants on runs; the others are those of `start`."""
    table = table_of(runs)
    published = np.array([run.seconds for run in runs])
    count = Counter(family(run) for run in runs)
    weight = np.array([count[family(run)] ** -0.25 for run in runs])
    weight /= np.sqrt(np.mean(weight**2))
    mean_of_group, in_group = _groups(runs)
    low, high = (np.array([FITTED[name][i] for name in names]) for i in (0, 1))
    log_low, log_span = np.log(np.maximum(low, 1e-9)), np.log(high / np.maximum(low, 1e-9))

    def constants(x: Vector) -> Constants:
        values = np.exp(log_low + log_span / (1 + np.exp(-x)))
        return replace(start, **{name: float(value) for name, value in zip(names, values)})

    def residuals(x: Vector) -> Vector:
        c = constants(x)
        seconds = total_seconds(step_seconds(table.model, table.machine, table.software, table.plan, c))
        error = np.log(np.asarray(seconds) / published) * weight
        apart = (error - mean_of_group @ error) * in_group  # what decides the order of two layouts
        return np.concatenate([_robust(error / 0.05), ORDER * _robust(apart / 0.05), PULL * x])

    return constants(_least_squares(residuals, np.zeros(len(names))))  # from the middle of the bounds


def _groups(runs: Sequence[Run]) -> tuple[Vector, Vector]:
    """The matrix that takes means over runs of one model on the same devices, and which runs are in such a group."""
    names = ("layers", "hidden", "vocab", "seq_len", "gpu_type", "gpus", "model_name")
    keys = [tuple(run.row[name] for name in names) for run in runs]
    same = np.array([[a == b for b in keys] for a in keys], float)
    count = same.sum(axis=1)
    return same / count[:, None], (count > 1).astype(float)


def _robust(error: Vector) -> Vector:
    """The signed root of a loss that is quadratic near 0 and grows like a logarithm far away."""
    return np.sign(error) * np.sqrt(4 * np.log1p(error**2 / 4))


def _least_squares(function: Callable[[Vector], Vector], x: Vector, steps: int = 60) -> Vector:
    damping, here = 1.0, function(x)
    for _ in range(steps):
        slope = np.stack([(function(x + 1e-4 * unit) - here) / 1e-4 for unit in np.eye(len(x))], axis=1)
        normal, gradient = slope.T @ slope, slope.T @ here
        improved = False
        for _ in range(8):
            move = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-6 * np.eye(len(x))), -gradient)
            there = function(x + move)
            if there @ there < here @ here:
                gain = 1 - (there @ there) / (here @ here)
                x, here, damping, improved = x + move, there, damping / 4, True
                break
            damping *= 4
        if not improved or gain < 1e-6:
            break
    return x


def leave_one_out(runs: Sequence[Run]) -> dict[str, Accuracy]:
    """The accuracy on each source of constants that were fitted on all others."""
    results = {}
    for name in sorted({family(run) for run in runs}):
        kept, left = ([run for run in runs if (family(run) == name) is out] for out in (False, True))
        results[name] = accuracy(left, predict(left, fit(kept)))
    return results


def line(name: str, found: Accuracy) -> str:
    """One line of a report."""
    return (
        f"{name:16} {found.rows:4d} rows  median {found.median:6.1%}  p90 {found.p90:6.1%}  {found.pairs:4d} pairs "
        f"{found.ordered:6.1%}  {found.groups:3d} groups  regret {found.regret:6.2%} worst {found.worst_regret:6.1%}"
    )


def report(runs: Sequence[Run], c: Constants) -> None:
    """Print the accuracy, by source and overall."""
    for name in sorted({family(run) for run in runs}):
        part = [run for run in runs if family(run) == name]
        print(line(name, accuracy(part, predict(part, c))))
    whole = [run for run in runs if not run.is_fp8]
    print(line("all, 16-bit", accuracy(whole, predict(whole, c))))


def fit_memory(runs: Sequence[Run], start: Constants = DEFAULT) -> Constants:
    """Fit the memory model's constants: on published memory, and so that what ran is predicted to fit."""
    told = [run for run in runs if run.memory == run.memory and "torchtitan" not in run.row["source"]]
    ran = [run for run in runs if ran_in_16_bit(run)]
    names = tuple(FITTED_MEMORY)
    low, high = (np.array([FITTED_MEMORY[name][i] for name in names]) for i in (0, 1))
    published = np.array([run.memory for run in told])
    capacity = np.array([float(run.machine.memory) for run in ran])

    def constants(x: Vector) -> Constants:
        values = low * (high / low) ** (1 / (1 + np.exp(-x)))
        return replace(start, **{name: float(value) for name, value in zip(names, values)})

    def residuals(x: Vector) -> Vector:
        error = np.log(predict_memory(told, constants(x)) / published)
        excess = np.maximum(0, np.log(predict_memory(ran, constants(x)) / capacity))
        return np.concatenate([_robust(error / 0.05), _robust(excess / 0.05), PULL * x])

    return constants(_least_squares(residuals, np.zeros(len(names))))


def predict_memory(runs: Sequence[Run], c: Constants = DEFAULT) -> Vector:
    """Bytes of the fullest device of runs."""
    table = table_of(runs)
    return np.asarray(memory_bytes(table.model, table.software, table.plan, c).total)


def ran_in_16_bit(run: Run) -> bool:
    """Whether a run on GPUs is known to have fit, and how it recomputed."""
    return run.is_gpu and run.row["status"] != "oom" and bool(run.row["activation_ckpt"]) and not run.is_fp8


def report_memory(runs: Sequence[Run], c: Constants) -> None:
    """Print the memory's errors, and whether runs that were out of memory are predicted so."""
    told = [run for run in runs if run.memory == run.memory and "torchtitan" not in run.row["source"]]
    errors = np.abs(predict_memory(told, c) / np.array([run.memory for run in told]) - 1)
    print(f"memory: {len(told)} rows, median {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}")
    out = [run for run in runs if run.row["status"] == "oom"]
    for run, bytes_ in zip(out, predict_memory(out, c)):
        print(
            f"    {run.row['id']}: {bytes_ / GIB:.0f} of {float(run.machine.memory) / GIB:.0f} GiB, published out of memory"
        )


def write(c: Constants) -> None:
    """Put fitted values into the source file."""
    text = SOURCE.read_text()
    for name in (*FITTED, *FITTED_MEMORY):
        text = re.sub(rf"(?m)^    {name}: float = .*$", f"    {name}: float = {getattr(c, name):.4g}", text)
    SOURCE.write_text(text)


def main() -> None:
    """Fit, print the constants beside those in use, and the accuracy."""
    everything = read_runs(RUNS)
    runs = [run for run in everything if is_for_fit(run) and not run.is_fp8]
    print("before"), report(runs, DEFAULT)
    c = fit_memory(everything, fit(runs))
    for name in (*FITTED, *FITTED_MEMORY):
        print(f"    {name}: float = {getattr(c, name):.4g}  # was {getattr(DEFAULT, name):.4g}")
    print("after"), report(runs, c)
    report_memory(everything, c)
    if "--write" in sys.argv:
        write(c)
    if "--leave-out" in sys.argv:
        print("leave one source out")
        for name, found in leave_one_out(runs).items():
            print(line(name, found))


if __name__ == "__main__":
    main()
