"""Train the example on two "machines" that share nothing but a cable, and compare with one process.

    python -m tests.hosts.two_hosts [--steps N]

Each machine is a network namespace with a host name of its own; a pair of virtual Ethernet devices joins them. On each,
torchrun starts 2 processes of examples/train_gpt.py with examples/configs/two_nodes.yaml: layers divided inside a
machine, copies of the model between the two. Ends with 0 if validation losses equal those of one process, with 1 if
not, with 77 where namespaces are not allowed.

Everything lives in a process-id namespace whose first process ends when this one does, in whatever way: then the system
kills all the others, and namespaces and devices vanish with them.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
NOT_ALLOWED = 77
ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT, DEVICE = 29500, "eth0"
BLOCK, WINDOWS = 32, 16  # all windows are one batch of all processes, so that their order cannot matter
LIMIT = 240  # seconds for each of the two runs
CROSSING = 100_000  # bytes at least: gradients of some 25,000 parameters in 8 bytes each, a few times
NAMESPACES = ["unshare", "--net", "--uts", "--mount-proc", "--pid", "--fork", "--kill-child"]
OPTIONS = {
    "model.dim": 32,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.warmup_steps": 2,
    "data.block_size": BLOCK,
    "trainer.precision": "64-true",
    "trainer.val_check_interval": 1,
    "trainer.log_every_n_steps": 1,
    "trainer.num_sanity_val_steps": 0,
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "sample_text.n_bytes": 4,
}


ENDING = threading.Lock()  # held by the thread that ends the process


# -------------------------------------------------------------------------------------------------------------- outside


def namespaces() -> list[str] | None:
    """The command that enters new namespaces, as root or as a user that is root in them; None where neither may be."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None or shutil.which("ip") is None:
        return None
    for command in (NAMESPACES, [NAMESPACES[0], "--user", "--map-root-user", *NAMESPACES[1:]]):
        tried = [*command, "ip", "link", "add", DEVICE, "type", "veth"]
        if subprocess.run(tried, capture_output=True, check=False).returncode == 0:
            return command
    return None


def environment(temporary: Path) -> dict[str, str]:
    """The variables of this process, without those of a launcher or of Lightning, and a folder for temporary files."""
    launchers = ("PL_", "LIGHTNING_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_", "MASTER_", "TORCH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}


def write_text(folder: Path) -> None:
    """Two files of equal length, one for training and one for validation: ``WINDOWS`` windows each."""
    folder.mkdir()
    draw = random.Random(0)
    for name in ("first.txt", "second.txt"):
        (folder / name).write_text("".join(draw.choices("abcdefgh \n", k=WINDOWS * BLOCK)))


def arguments(config: str, folder: Path, steps: int) -> list[str]:
    """The command line of the example, after the interpreter or the launcher."""
    options = OPTIONS | {"data.path": folder / "text", "trainer.max_steps": steps}
    script = [str(ROOT / "examples" / "train_gpt.py"), "fit", "--config", str(CONFIGS / config)]
    return script + [f"--{name}={value}" for name, value in options.items()]


def losses(folder: Path) -> list[float]:
    """Validation losses after each step, as the run in ``folder`` logged them."""
    with (folder / "logs" / "csv" / "version_0" / "metrics.csv").open() as file:
        return [float(row["val_loss"]) for row in csv.DictReader(file) if row.get("val_loss")]


def train(command: list[str], folder: Path, steps: int) -> dict[str, list[float]]:
    """Train on one process and on two machines: losses of both, and the bytes that each machine has sent."""
    inside = [*command, sys.executable, "-m", "tests.hosts.two_hosts", "--inside", str(folder), "--steps", str(steps)]
    # The first process inside reads this pipe; it ends when the pipe does, that is, when this process ends.
    (folder / "tmp").mkdir()
    with subprocess.Popen(inside, cwd=ROOT, env=environment(folder / "tmp"), stdin=subprocess.PIPE) as process:
        try:
            code = process.wait()
        finally:
            process.kill()
    if code:
        logs = "".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(folder.glob("*.log")))
        raise SystemExit(f"training failed with {code}:\n{logs}")
    return {
        "one": losses(folder / "one"),
        "two": losses(folder / "two"),
        "sent": json.loads((folder / "sent.json").read_text()),
    }


def main() -> None:
    """Run both and compare; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.two_hosts", description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        run_inside(options.inside, options.steps)
    command = namespaces()
    if command is None:
        print("skipped: network namespaces are not allowed here, or unshare, nsenter or ip is missing")
        raise SystemExit(NOT_ALLOWED)
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as name:
        folder = Path(name)
        write_text(folder / "text")
        result = train(command, folder, options.steps)
    print("validation losses on one process:", *result["one"])
    print("on two hosts:                    ", *result["two"])
    print("bytes sent by each host:", *result["sent"])
    if not same(result["two"], result["one"]) or len(result["one"]) != options.steps:
        raise SystemExit("the losses differ")
    if min(result["sent"]) < CROSSING:
        raise SystemExit("the hosts did not exchange the gradients over the cable")


def same(actual: list[float], expected: list[float]) -> bool:
    """Whether all losses are equal up to rounding of 64-bit floats."""
    if len(actual) != len(expected):
        return False
    return all(abs(a - b) <= 1e-8 * abs(b) for a, b in zip(actual, expected))


# --------------------------------------------------------------------------------------------------------------- inside


def run_inside(folder: Path, steps: int) -> NoReturn:
    """As the first process of the namespaces: train on one process, then on two machines, and end with all others."""
    threading.Thread(target=end_with, args=(sys.stdin.buffer, folder), daemon=True).start()
    try:
        codes = wait([start_one(folder, steps)]) or train_on_two(folder, steps)
    except BaseException:  # also of what the other thread has killed: it has to come to its own end
        traceback.print_exc()
        end(1)
    end(int(any(codes)))


def train_on_two(folder: Path, steps: int) -> list[int]:
    """Make the second machine and the cable, train on both; exit statuses that are not 0."""
    socket.sethostname("host0")
    second = start_second_host()
    lay_cable(second)
    failed = wait([start_training(0, [], folder, steps), start_training(1, into(second), folder, steps)])
    (folder / "sent.json").write_text(json.dumps([sent_by([]), sent_by(into(second))]))
    return failed


def end(status: int) -> NoReturn:
    """End, and not wait for the second machine: with the first process, the system ends all."""
    with ENDING:
        os._exit(status)


def end_with(pipe: IO[bytes], folder: Path) -> None:
    """End when the pipe ends: whoever made the folder is no more."""
    pipe.read()
    with ENDING:
        os.kill(-1, signal.SIGKILL)  # all but this one: they would go on writing
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        shutil.rmtree(folder)
        os._exit(1)


def start_one(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start the run on one process."""
    return started([sys.executable, *arguments("single.yaml", folder, steps)], folder / "one", folder / "one.log")


def started(command: list[str], here: Path, log: Path) -> subprocess.Popen[bytes]:
    """A command that runs in the folder ``here`` and writes into a log."""
    here.mkdir(exist_ok=True)
    variables = os.environ | {"GLOO_SOCKET_IFNAME": DEVICE}
    with log.open("w") as file:
        return subprocess.Popen(
            command, cwd=here, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )


def start_second_host() -> int:
    """A process that holds the second machine's namespaces; its id."""
    held = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", "hostname host1; exec sleep infinity"])
    while os.readlink(f"/proc/{held.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    return held.pid


def into(pid: int) -> list[str]:
    """Prefix of a command for the second machine."""
    return ["nsenter", "--target", str(pid), "--net", "--uts"]


def lay_cable(second: int) -> None:
    """Join the two machines by Ethernet."""
    ip("link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(second))
    for prefix, address in zip(([], into(second)), ADDRESSES):
        ip("addr", "add", f"{address}/24", "dev", DEVICE, prefix=prefix)
        for device in ("lo", DEVICE):
            ip("link", "set", device, "up", prefix=prefix)


def ip(*words: str, prefix: list[str] | None = None) -> None:
    """Run ``ip``, here or on the second machine."""
    subprocess.run([*(prefix or []), "ip", *words], check=True)


def start_training(host: int, prefix: list[str], folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start torchrun on one machine."""
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=2",
        f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", f"--local-addr={ADDRESSES[host]}",
    ]  # fmt: skip
    command = [*prefix, *launcher, *arguments("two_nodes.yaml", folder, steps)]
    return started(command, folder / "two", folder / f"host{host}.log")


def wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait until all have ended or one has failed; the exit statuses that are not 0.

    Raises:
        TimeoutError: they take too long.
    """
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(codes):
            return [code for code in codes if code]
        time.sleep(0.1)
    raise TimeoutError(f"not done in {LIMIT} s")


def sent_by(prefix: list[str]) -> int:
    """Bytes that a machine has sent over the cable."""
    shown = subprocess.run([*prefix, "ip", "-s", "-j", "link", "show", DEVICE], check=True, capture_output=True)
    return json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"]


if __name__ == "__main__":
    main()
