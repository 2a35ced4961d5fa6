"""Bytes and time of each policy of activation checkpointing against the number of blocks, as a table and a picture.

    python -m tests.benchmarks recompute [--quick | --keep FILE]

It takes half an hour: with --keep, what FILE (JSON) holds is not measured again, and each new number is added to it.
Bytes are the peak of what autograd holds in one forward and backward, what the recompute re-creates included, counted
from outside (`tests.saved_bytes`). Time is processor time of one thread, of the fastest step over the fastest without
checkpointing, policies taking turns; memory that is freed stays with the process, as on a GPU. Process memory is the
peak of a process of its own, without what it had before the step: parameters, gradients, libraries.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.progress import Progress

from lightning_4d.parallel.recompute import RecomputePolicy, install, installed
from lightning_4d.parallel.recompute.plan import extra_forwards
from tests.benchmarks.report import machine
from tests.saved_bytes import TinyStack, peak_of_step

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "docs" / "recompute.md", ROOT / "docs" / "images" / "recompute.png"
COUNTS = (4, 16, 36, 64, 100, 144)
TIMED = {4: 12, 16: 8, 64: 5, 144: 4}  # number of blocks: how often
TABLED = (16, 64, 144)
DIM, WIDTH, ROWS = 384, 12, 256  # floats of a block's input: ROWS x DIM
POLICIES = {
    "none": RecomputePolicy("none"),
    "every_k=2": RecomputePolicy("every_k", every_k=2),
    "selective": RecomputePolicy("selective"),
    "full": RecomputePolicy("full"),
    "sqrt": RecomputePolicy("sqrt"),
    "nested": RecomputePolicy("sqrt", nested=True),
}
IN_TABLE = ("none", "full", "sqrt", "nested")
STYLES = {"none": "k-o", "every_k=2": "C7-s", "selective": "C4-v", "full": "C0-^", "sqrt": "C1-D", "nested": "C2-P"}


def main(options: Sequence[str] = ()) -> None:
    """Measure, and write the table and the picture; with --quick measure little and write nothing."""
    if options and options[0] == "--process":
        print(process_memory(options[1], int(options[2])))
        return
    if options and options[0] == "--times":
        print(json.dumps(time_ratios(int(options[1]), int(options[2]))))
        return
    quick = "--quick" in options
    torch.set_num_threads(1)
    counts = COUNTS[:2] if quick else COUNTS
    tabled = counts[-1:] if quick else TABLED
    found = Measurements(Path(options[options.index("--keep") + 1]) if "--keep" in options else None)
    with Progress(transient=True) as progress:
        for count in progress.track(counts, description="bytes"):
            found.get(f"bytes {count}", lambda count=count: {name: peak(name, count) for name in POLICIES})
        for count, repeats in progress.track(
            (dict.fromkeys(counts, 2) if quick else TIMED).items(), description="time"
        ):
            found.get(f"time {count}", lambda count=count, repeats=repeats: times_of_child(count, repeats))
        for count in progress.track(tabled, description="process memory"):
            found.get(
                f"memory {count}",
                lambda count=count: {name: process_memory_of_child(name, count) for name in IN_TABLE},
            )
    lines = table(tabled, found)
    print("\n".join(lines))
    if not quick:
        write_page(lines)
        draw(found)


class Measurements:
    """Numbers by policy, under names such as "time 16" (with 16 blocks).

    Args:
        file: holds those that are known already.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known: dict[str, dict[str, float]] = json.loads(file.read_text()) if file and file.exists() else {}

    def get(self, name: str, measure: Callable[[], dict[str, float]]) -> None:
        if name not in self._known:
            self._known[name] = measure()
            if self._file is not None:
                self._file.write_text(json.dumps(self._known, indent=1))

    def __call__(self, kind: str, count: int, policy: str) -> float:
        return self._known[f"{kind} {count}"][policy]


def module_with(name: str, count: int, rows: int = ROWS) -> tuple[TinyStack, torch.Tensor]:
    """A model under a policy that has measured its blocks, and a batch."""
    torch.manual_seed(0)
    module, x = TinyStack(count, DIM, WIDTH), torch.randn(rows, DIM)
    install(module, POLICIES[name])
    module(x.clone().requires_grad_()).backward()  # the step that measures
    return module, x


def peak(name: str, count: int) -> int:
    """Peak bytes of a step, after the one that measures."""
    gc.collect()  # of the module before
    module, x = module_with(name, count, rows=8)
    return peak_of_step(module, x) * ROWS // 8


def times_of_child(count: int, repeats: int) -> dict[str, float]:
    """Time of a step over that of one without checkpointing, by policy; in a process of its own."""
    # Freed memory stays with the process, as on a GPU: else one measures how the system clears new pages.
    keep = {"MALLOC_MMAP_THRESHOLD_": str(2**31), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**28)}
    return json.loads(_child(keep, "--times", str(count), str(repeats)))


def time_ratios(count: int, repeats: int) -> dict[str, float]:
    """The fastest step of each policy over the fastest without checkpointing: what else the machine does adds time."""
    torch.set_num_threads(1)
    module, x = module_with("none", count)
    fastest = dict.fromkeys(POLICIES, math.inf)
    for _ in range(repeats):
        for name, policy in POLICIES.items():
            install(module, policy)
            if policy.needs_sizes:
                take_step(module, x)  # it measures the blocks
            fastest[name] = min(fastest[name], take_step(module, x), take_step(module, x))
    return {name: seconds / fastest["none"] for name, seconds in fastest.items()}


def _child(environment: Mapping[str, str], *options: str) -> str:
    command = [sys.executable, "-m", "tests.benchmarks.recompute", *options]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=1800)
    return done.stdout


def take_step(module: TinyStack, x: torch.Tensor) -> float:
    """Processor seconds of one forward and backward."""
    gc.collect()
    gc.disable()  # as timeit does
    try:
        start = time.process_time()
        module(x.clone().requires_grad_()).backward()
        return time.process_time() - start
    finally:
        gc.enable()


def process_memory_of_child(name: str, count: int) -> int:
    """Peak bytes of a process beyond what it had before the step."""
    # Freed memory goes back to the system at once; otherwise the allocator's own habits are what one measures.
    give_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return int(_child(give_back, "--process", name, str(count)))


def process_memory(name: str, count: int) -> int:
    """In a process of its own: see `process_memory_of_child`."""
    torch.set_num_threads(1)
    module, x = module_with(name, count, rows=8)  # gradients and libraries are there now
    x = torch.randn(ROWS, DIM)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    module(x.requires_grad_()).backward()
    return max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def table(tabled: Sequence[int], found: Measurements) -> list[str]:
    """The rows of the page's table, in units of one block input."""
    unit = ROWS * DIM * 4
    head = ["policy", "extra forwards", *(f"N = {n}: bytes / process / time" for n in tabled)]
    lines = [f"Measured on {machine()}. Bytes in block inputs ({unit // 1024} KiB here), b = {WIDTH + 2} a.", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in IN_TABLE:
        cells = [f"`{name}`", extra(name, tabled[-1])]
        for n in tabled:
            held, resident = found("bytes", n, name) / unit, found("memory", n, name) / unit
            cells.append(f"{held:.0f} / {resident:.0f} / {found('time', n, name):.2f}×")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def extra(name: str, count: int) -> str:
    """How many more forwards per block a policy runs on average."""
    module, _ = module_with(name, count, rows=1)
    recompute = installed(module)
    assert recompute is not None
    values = extra_forwards(recompute.plan)
    return f"{sum(values) / len(values):.2f}"


def write_page(lines: Sequence[str]) -> None:
    """Replace what stands between the markers on the page."""
    start, end = "<!-- bench:recompute -->", "<!-- /bench -->"
    text = PAGE.read_text()
    head, rest = text.split(start, 1)
    PAGE.write_text(f"{head}{start}\n" + "\n".join(lines) + f"\n{end}{rest.split(end, 1)[1]}")


def draw(found: Measurements) -> None:
    """Bytes and time against the number of blocks."""
    try:
        import matplotlib as mpl
    except ImportError:
        print(f"{PICTURE.name} stays as it is: matplotlib draws it (pip install '.[bench]')")
        return

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    unit = ROWS * DIM * 4
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for name in POLICIES:
        left.loglog(COUNTS, [found("bytes", n, name) / unit for n in COUNTS], STYLES[name], label=name, markersize=5)
        right.semilogx([*TIMED], [found("time", n, name) for n in TIMED], STYLES[name], markersize=5)
    guide = [2 * math.sqrt(n) + WIDTH for n in COUNTS]
    left.loglog(COUNTS, guide, "k:", linewidth=1, label="2√N·a + b − 2a")
    left.set(xlabel="blocks N", ylabel="peak of saved bytes / block input a", title=f"Memory (b = {WIDTH + 2} a)")
    right.set(xlabel="blocks N", ylabel="time of a step / none", title="Time (one CPU thread)")
    for axes in (left, right):
        axes.set_xticks(COUNTS, [str(n) for n in COUNTS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    right.axhline(4 / 3, color="C0", linewidth=0.8, linestyle=":")
    right.axhline(5 / 3, color="C2", linewidth=0.8, linestyle=":")
    right.annotate("one extra forward: 4/3", (COUNTS[0], 4 / 3), (0, 3), textcoords="offset points", fontsize=8)
    right.annotate("two extra forwards: 5/3", (COUNTS[0], 5 / 3), (0, 3), textcoords="offset points", fontsize=8)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
