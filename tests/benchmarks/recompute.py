"""Bytes and time of each policy of activation checkpointing against the number of blocks, as a table and a picture.

    python -m tests.benchmarks recompute [--quick]

Bytes are the peak of what autograd holds in one forward and backward, what the recompute re-creates included, counted
from outside (`tests.saved_bytes`). Time is processor time of one thread, beside a step without checkpointing; memory
that is freed stays with the process, as on a GPU. Process memory is the peak of a process of
its own, without what it had before the step: parameters, gradients, libraries.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lightning_4d.parallel.recompute import RecomputePolicy, install, installed
from lightning_4d.parallel.recompute.plan import extra_forwards
from tests.benchmarks.report import machine
from tests.saved_bytes import TinyStack, peak_of_step

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "docs" / "recompute.md", ROOT / "docs" / "images" / "recompute.png"
COUNTS = (4, 16, 36, 64, 100, 144)
TIMED = (4, 16, 64, 144)
TABLED = (16, 64, 144)
DIM, WIDTH, ROWS = 192, 12, 256  # floats of a block's input: ROWS x DIM
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
    bytes_ = {name: {count: peak(name, count) for count in counts} for name in POLICIES}
    timed = counts if quick else TIMED
    times = measure_times(timed, repeats=2 if quick else 12)
    tabled = counts[-1:] if quick else TABLED
    memory = {(name, n): process_memory_of_child(name, n) for name in IN_TABLE for n in tabled}
    lines = table(tabled, bytes_, times, memory)
    print("\n".join(lines))
    if not quick:
        write_page(lines)
        draw(bytes_, times)


def module_with(name: str, count: int, rows: int = ROWS) -> tuple[TinyStack, torch.Tensor]:
    """A model under a policy that has measured its blocks, and a batch."""
    torch.manual_seed(0)
    module, x = TinyStack(count, DIM, WIDTH), torch.randn(rows, DIM)
    install(module, POLICIES[name])
    module(x.clone().requires_grad_()).backward()  # the step that measures
    return module, x


def peak(name: str, count: int) -> int:
    """Peak bytes of a step, after the one that measures."""
    module, x = module_with(name, count, rows=8)
    return peak_of_step(module, x) * ROWS // 8


def measure_times(counts: Sequence[int], repeats: int) -> dict[str, dict[int, float]]:
    """Time of a step beside one without checkpointing, by policy and number of blocks; in a process of its own."""
    # Freed memory stays with the process, as on a GPU: else one measures how the system clears new pages.
    keep = {"MALLOC_MMAP_THRESHOLD_": str(2**31), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**28)}
    found = {name: {} for name in POLICIES}
    for count in counts:
        for name, ratio in json.loads(_child(keep, "--times", str(count), str(repeats))).items():
            found[name][count] = ratio
    return found


def time_ratios(count: int, repeats: int) -> dict[str, float]:
    """The shortest step of several in turns, over the shortest without checkpointing: other work only adds time."""
    torch.set_num_threads(1)
    module, x = module_with("none", count)
    least = dict.fromkeys(POLICIES, math.inf)
    for _ in range(repeats):
        for name, policy in POLICIES.items():
            install(module, policy)
            if policy.needs_sizes:
                take_step(module, x)  # it measures the blocks
            least[name] = min(least[name], take_step(module, x))
    return {name: seconds / least["none"] for name, seconds in least.items()}


def _child(environment: Mapping[str, str], *options: str) -> str:
    command = [sys.executable, "-m", "tests.benchmarks.recompute", *options]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=900)
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


def table(
    tabled: Sequence[int],
    bytes_: dict[str, dict[int, int]],
    times: dict[str, dict[int, float]],
    memory: dict[tuple[str, int], int],
) -> list[str]:
    """The rows of the page's table, in units of one block input."""
    unit = ROWS * DIM * 4
    head = ["policy", "extra forwards", *(f"N = {n}: bytes / process / time" for n in tabled)]
    lines = [f"Measured on {machine()}. Bytes in block inputs ({unit // 1024} KiB here), b = {WIDTH + 2} a.", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in IN_TABLE:
        cells = [f"`{name}`", extra(name, tabled[-1])]
        for n in tabled:
            cells.append(f"{bytes_[name][n] / unit:.0f} / {memory[name, n] / unit:.0f} / {times[name][n]:.2f}×")
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


def draw(bytes_: dict[str, dict[int, int]], times: dict[str, dict[int, float]]) -> None:
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
        left.loglog(COUNTS, [bytes_[name][n] / unit for n in COUNTS], STYLES[name], label=name, markersize=5)
        right.semilogx(TIMED, [times[name][n] for n in TIMED], STYLES[name], markersize=5)
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
    right.annotate("one extra forward: 4/3", (TIMED[0], 4 / 3), (0, 3), textcoords="offset points", fontsize=8)
    right.annotate("two extra forwards: 5/3", (TIMED[0], 5 / 3), (0, 3), textcoords="offset points", fontsize=8)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
