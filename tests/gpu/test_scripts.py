"""The scripts run, at a tiny size, where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_hsdp_script(precision):
    command = [sys.executable, "-m", "tests.gpu.hsdp", "--tiny", "--precision", precision]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    *contenders, summary = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {c["contender"] for c in contenders} == {"HSDPStrategy", "plain FSDP2"}
    assert all(c["step_seconds"] > 0 for c in contenders)
    assert summary["plain_over_ours"] > 0


def test_context_script():
    command = [sys.executable, "-m", "tests.gpu.context", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {line["ulysses"] for line in lines} == {1, 2}
    assert all(line["right"] for line in lines)
