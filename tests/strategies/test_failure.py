"""What happens when training fails: the user's own exception, a non-zero end in bounded time, no process left behind.

Real jobs: a script that Lightning's own launcher starts once more for each rank, or that torchrun starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 90  # seconds until a job counts as hung; a job that hangs does so for half an hour (the collectives' timeout)

SCRIPT = """
import os, signal, sys, threading, time
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning_4d import NDStrategy
from tests.modules import TinyGPT

kind, failing, on_exception = sys.argv[1], sys.argv[2], sys.argv[3] == "True"


class UsersOwnError(Exception):
    pass


class Failing(TinyGPT):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and failing in ("all", str(self.global_rank)):
            fail(self.global_rank)
        return loss


def fail(rank):
    if kind == "error":
        raise UsersOwnError(f"raised by the user on rank {rank}")
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "exit":
        os._exit(7)
    if kind == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "sigint":
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    with open(f"pid{os.environ.get('LOCAL_RANK', '0')}", "w") as file:
        file.write(str(os.getpid()))
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=NDStrategy(), max_epochs=3, limit_val_batches=0, logger=False,
        enable_checkpointing=on_exception, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[OnExceptionCheckpoint("kept")] if on_exception else [],
    )
    trainer.fit(TinyGPT() if kind == "nothing" else Failing())
    print("FINISHED")
"""


class Job:
    """What a job left behind."""

    def __init__(self, folder: Path, *arguments: object, torchrun: bool = False, content: str = SCRIPT) -> None:
        script = folder / "train.py"
        script.write_text(content)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "LIGHTNING_"))}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if torchrun else []
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(script), *map(str, arguments)],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            self.output, _ = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.output, _ = self.process.communicate()
            raise AssertionError(f"still running after {LIMIT} s:\n{self.output}") from None

    @property
    def code(self) -> int:
        return self.process.returncode

    def left_running(self) -> list[int]:
        """Processes of the job that have not gone a few seconds after it."""
        pids = [int(path.read_text()) for path in self.folder.glob("pid*")]
        assert len(pids) == 2, self.output
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and any(map(_alive, pids)):
            time.sleep(0.1)
        left = [pid for pid in pids if _alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and waits for its parent or init to notice


@pytest.mark.parametrize(
    ("failing", "on_exception", "torchrun"),
    [
        (1, True, False),
        pytest.param(0, False, False, marks=pytest.mark.slow),
        pytest.param(0, True, False, marks=pytest.mark.slow),
        pytest.param(1, False, False, marks=pytest.mark.slow),
        pytest.param(0, True, True, marks=pytest.mark.slow),
        (1, False, True),
    ],
)
def test_C12_an_exception_on_one_rank_ends_the_job(tmp_path, failing, on_exception, torchrun):
    job = Job(tmp_path, "error", failing, on_exception, torchrun=torchrun)
    assert not job.left_running(), job.output
    assert job.code != 0, job.output
    assert f"UsersOwnError: raised by the user on rank {failing}" in job.output
    assert "FINISHED" not in job.output
    assert not list(tmp_path.glob("kept/*")), "no checkpoint can be written by some of the ranks"


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_same_exception_on_all_ranks_writes_a_checkpoint(tmp_path, torchrun):
    job = Job(tmp_path, "error", "all", True, torchrun=torchrun)
    assert not job.left_running(), job.output
    assert job.code != 0, job.output
    assert "UsersOwnError: raised by the user" in job.output
    assert (tmp_path / "kept" / "on_exception.ckpt" / "meta.pt").is_file(), job.output


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["all", "0"])
def test_interrupts_end_the_job(tmp_path, failing):
    job = Job(tmp_path, "interrupt", failing, False)
    assert not job.left_running(), job.output
    assert job.code != 0, job.output
    assert "FINISHED" not in job.output


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_rank_that_dies_ends_the_job(tmp_path, torchrun):
    job = Job(tmp_path, "exit", 1, False, torchrun=torchrun)
    assert not job.left_running(), job.output
    assert job.code != 0, job.output
    assert "FINISHED" not in job.output


@pytest.mark.slow
def test_sigterm_ends_the_job_after_the_batch(tmp_path):
    """Lightning's SIGTERMException is a SystemExit without a code, so the job ends with 0."""
    job = Job(tmp_path, "sigterm", 0, False)
    assert not job.left_running(), job.output
    assert "Received SIGTERM" in job.output
    assert "FINISHED" not in job.output
