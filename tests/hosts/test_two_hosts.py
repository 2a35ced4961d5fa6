"""The example on two machines joined by a cable gives the losses of one process; see two_hosts.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.two_hosts import NOT_ALLOWED, ROOT

pytestmark = pytest.mark.slow
LIMIT = 540


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.hosts.two_hosts", "--steps", "3"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_hosts_train_as_one_process(tmp_path):
    with start(tmp_path) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    if process.returncode == NOT_ALLOWED:
        pytest.skip(printed.strip())
    assert process.returncode == 0, printed
    assert list(tmp_path.iterdir()) == []
    assert running(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_it_is_killed(tmp_path, number):
    process = start(tmp_path)
    try:
        while process.poll() is None and not list(tmp_path.glob("*/host1.log")):
            time.sleep(0.1)
        if process.returncode == NOT_ALLOWED:
            pytest.skip("network namespaces are not allowed")
        assert process.returncode is None, process.communicate()[0]
        assert running(tmp_path), "or this test would see nothing"
    finally:
        process.send_signal(number)
        process.communicate()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (running(tmp_path) or list(tmp_path.iterdir())):
        time.sleep(0.1)
    assert running(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def running(folder: Path) -> list[str]:
    """Command lines of processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if str(folder) in words and "pytest" not in words.split("two_hosts")[0]:
            found.append(words)
    return found
