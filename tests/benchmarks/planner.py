"""The planner against published runs, as tables and pictures in docs/planner.md.

    python -m tests.benchmarks planner [--quick]

Accuracy by source with the constants in use, and of constants that were fitted without that source; the time of a
search; pictures of a plan. With --quick nothing is fitted or written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_4d.layout import ParallelLayout
from lightning_4d.planner import cluster_facts, model_facts, search, timeline
from lightning_4d.planner.accuracy import Accuracy, accuracy
from lightning_4d.planner.constants import DEFAULT, FITTED, FITTED_MEMORY
from lightning_4d.planner.evaluate import predict as predictions
from lightning_4d.planner.published import Run, read_runs
from tests.benchmarks.report import machine
from tests.planner.fit import RUNS, family, is_for_fit, leave_one_out, predict, predict_memory

ROOT = Path(__file__).parents[2]
PAGE, IMAGES = ROOT / "docs" / "planner.md", ROOT / "docs" / "images"


def main(options: Sequence[str] = ()) -> None:
    """Measure, and write the tables and pictures; with --quick print what needs no fit."""
    quick = "--quick" in options
    runs = read_runs(RUNS)
    sections = {"accuracy": accuracy_table(runs, quick), "memory": memory_table(runs), "search": search_table()}
    sections["constants"] = constants_table()
    for name, lines in sections.items():
        print(f"\n{name}\n" + "\n".join(lines))
        if not quick:
            write_section(name, lines)
    if not quick:
        draw(runs)


def accuracy_table(runs: Sequence[Run], quick: bool) -> list[str]:
    """A row for each source: the fit's errors, and those of constants fitted on the other sources."""
    timed = [run for run in runs if run.seconds == run.seconds]
    whole = [run for run in timed if run.is_gpu and not run.is_fp8]
    kept = [run for run in whole if is_for_fit(run)]
    unseen = {} if quick else leave_one_out(kept)
    head = ["source", "runs", "median", "90th percentile", "pairs", "ordered right", "regret", "unseen: median", "90th"]
    lines = _head(head)
    for name in sorted({family(run) for run in whole}):
        part = [run for run in whole if family(run) == name]
        lines.append(_row(name, accuracy(part, predict(part)), unseen.get(name)))
    lines.append(_row("**GPU, 16-bit**", accuracy(whole, predict(whole))))
    others = {
        "GPU, fp8": [run for run in timed if run.is_gpu and run.is_fp8],
        "TPU": [run for run in timed if not run.is_gpu],
    }
    lines += [_row(f"{name} (not fitted)", accuracy(part, predict(part))) for name, part in others.items()]
    return lines


def _head(names: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def _row(name: str, found: Accuracy, unseen: Accuracy | None = None) -> str:
    cells = [name, str(found.rows), f"{found.median:.1%}", f"{found.p90:.1%}", str(found.pairs or "")]
    cells += [f"{found.ordered:.1%}" if found.pairs else "", f"{found.regret:.2%}" if found.groups else ""]
    cells += [f"{unseen.median:.1%}", f"{unseen.p90:.1%}"] if unseen else ["", ""]
    return "| " + " | ".join(cells) + " |"


def memory_table(runs: Sequence[Run]) -> list[str]:
    """Errors of the memory model by source, and the runs that were out of memory."""
    told = [run for run in runs if run.memory == run.memory]
    lines = _head(["source", "runs", "median", "90th percentile"])
    groups = {name: [run for run in told if family(run) == name] for name in sorted({family(run) for run in told})}
    groups["**without torchtitan**"] = [run for run in told if family(run) != "torchtitan"]
    for name, part in groups.items():
        errors = np.abs(predict_memory(part) / np.array([run.memory for run in part]) - 1)
        lines.append(f"| {name} | {len(part)} | {np.median(errors):.1%} | {np.quantile(errors, 0.9):.1%} |")
    out = [run for run in runs if run.row["status"] == "oom"]
    seen = sum(predict_memory(out) > np.array([float(run.machine.memory) for run in out]))
    return [*lines, "", f"Of {len(out)} published runs that were out of memory, {seen} are predicted so."]


def search_table() -> list[str]:
    """How long searches take, and what they find."""
    lines = _head(["model", "devices", "batch", "candidates", "seconds", "best layout", "step", "MFU"])
    cases = (
        ("gpt2-xl", "dgx-a100", 8, 512),
        ("llama3-8b", "dgx-h100", 64, 512),
        ("llama3-70b", "dgx-h100", 256, 1024),
        ("gpt3-175b", "dgx-a100", 1024, 1536),
        ("llama3-405b", "meta-llama3", 16_384, 2048),
    )
    for model, cluster, devices, batch in cases:
        start = time.perf_counter()
        found = search(model_facts(model), cluster_facts(cluster, devices), batch)
        best, seconds = found.best, time.perf_counter() - start
        cells = [model, f"{devices:,}", str(batch), f"{len(found.space):,}", f"{seconds:.2f}"]
        lines.append("| " + " | ".join([*cells, f"`{best}`", f"{best.seconds:.2f} s", f"{best.mfu:.1%}"]) + " |")
    return [f"{machine()}:", "", *lines]


def constants_table() -> list[str]:
    """The fitted constants with their bounds."""
    lines = _head(["constant", "value", "bounds"])
    for name, (low, high) in (FITTED | FITTED_MEMORY).items():
        lines.append(f"| `{name}` | {getattr(DEFAULT, name):.3g} | {low:.3g} to {high:.3g} |")
    return lines


def write_section(name: str, lines: Sequence[str]) -> None:
    """Put lines between ``<!-- bench:planner-NAME -->`` and ``<!-- /bench -->`` of the page."""
    start, end = f"<!-- bench:planner-{name} -->", "<!-- /bench -->"
    text = PAGE.read_text()
    if start not in text:
        raise SystemExit(f"{PAGE.name} has no {start}")
    head, rest = text.split(start, 1)
    PAGE.write_text(f"{head}{start}\n" + "\n".join(lines) + f"\n{end}{rest.split(end, 1)[1]}")


def draw(runs: Sequence[Run]) -> None:
    """Draw the pictures of the page."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        print("the pictures stay as they are: matplotlib draws them (pip install '.[bench]')")
        return
    from lightning_4d.visual import Cell, draw_memory, draw_mesh, draw_scatter, draw_schedule, draw_time

    timed = [run for run in runs if run.seconds == run.seconds and run.is_gpu and not run.is_fp8]
    rows = predictions(timed).rows()
    published, predicted = ([float(row[f"{kind}_mfu_pct"]) for row in rows] for kind in ("published", "predicted"))
    draw_scatter(published, predicted, [family(run) for run in timed], IMAGES / "planner_mfu.png")
    found = search(model_facts("llama3-70b"), cluster_facts("dgx-h100", 256), 1024)
    top = found.top(6)
    names = [f"{each.layout}\n{each.policy}, micro-batch {each.micro_batch}" for each in top]
    title = "Llama 3 70B on 256 H100"
    draw_memory(names, [each.memory for each in top], found.capacity, IMAGES / "planner_memory.png", f"{title}: memory")
    draw_time(names, [each.parts for each in top], IMAGES / "planner_time.png", f"{title}: where a step goes")
    draw_mesh(ParallelLayout.parse("pp2.dp2x2.cp2.tp2"), 8, IMAGES / "planner_mesh.png")
    cells = [Cell(*work) for work in timeline("interleaved_1f1b", 4, 8, 2)]
    draw_schedule(cells, IMAGES / "planner_schedule.png", "interleaved_1f1b, 4 ranks with 2 stages each")
