"""Paths, commits and crashes: at every moment of a save one whole checkpoint is there; half a one never looks whole."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_4d.checkpoint import CheckpointKind, checkpoint_kind, files, locate, open_checkpoint, remove, save_file
from lightning_4d.checkpoint.save import save_folder
from lightning_4d.errors import CheckpointError
from tests.pool import WorkerError


def write(path: Path, version: int, *, folder: bool) -> None:
    content = {"version": version, "weight": torch.full((64,), float(version))}
    if folder:
        save_folder(path, {"state_dict": {"weight": content["weight"]}}, content, is_writer=True)
    else:
        save_file(path, content)


def version(path: Path) -> int:
    """The version of the checkpoint that stands for `path`, after checking that all of it is of one version."""
    opened = open_checkpoint(path)
    weight = opened.tensor("state_dict.weight") if locate(path).is_dir() else opened.content["weight"]
    assert weight.tolist() == [float(opened.content["version"])] * 64
    return opened.content["version"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "fallback"])
@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_save_replaces_what_has_its_name(tmp_path, monkeypatch, exchange, first, second):
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    path = tmp_path / "last.ckpt"
    write(path, 1, folder=first)
    write(path, 2, folder=second)
    assert version(path) == 2
    assert checkpoint_kind(path) is (CheckpointKind.FOLDER if second else CheckpointKind.FILE)
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
    remove(path)
    assert list(tmp_path.iterdir()) == []
    assert checkpoint_kind(path) is CheckpointKind.MISSING


def test_a_link_is_replaced_not_followed(tmp_path):
    write(tmp_path / "a.ckpt", 1, folder=True)
    link = tmp_path / "last.ckpt"
    link.symlink_to("a.ckpt")
    assert version(link) == 1
    write(link, 2, folder=True)
    assert (version(link), version(tmp_path / "a.ckpt")) == (2, 1)
    link.rename(tmp_path / "b.ckpt")
    link.symlink_to("a.ckpt")
    remove(link)
    assert version(tmp_path / "a.ckpt") == 1


class KillSwitch:
    """Kills this process at its event number `at`; an event is a step that changes the disk, before or after it."""

    CHANGES = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"})

    def __init__(self, at: int, *, exchange: bool = True) -> None:
        self.at, self.count = at, 0
        sys.addaudithook(lambda name, args: self.event() if name in self.CHANGES else None)
        swap, fsync = files._exchange, os.fsync  # which Python does not report
        files._exchange = lambda a, b: (self.event(), exchange and swap(a, b), self.event())[1]
        os.fsync = lambda descriptor: (self.event(), fsync(descriptor))[1]

    def event(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def check_after_kill(path: Path, finished: int) -> None:
    """The last finished version or the one in progress opens; what is half is refused; the next save works."""
    assert version(path) in (finished, finished + 1)
    partial = files.partial(path)
    if partial.exists():
        with pytest.raises(CheckpointError, match=r"writing was interrupted"):
            open_checkpoint(partial)
    write(path, 100, folder=path.name == "folder.ckpt")
    assert version(path) == 100
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def kill_at_every_step(parent: Path, *, folder: bool, exchange: bool) -> int:
    """Overwrite a checkpoint in a fork that is killed at its first, second, ... event, until one survives."""
    for number in range(1, 1000):
        path = parent / f"{folder}-{exchange}-{number}" / ("folder.ckpt" if folder else "file.ckpt")
        path.parent.mkdir()
        write(path, 1, folder=folder)
        pid = os.fork()
        if pid == 0:
            switch = KillSwitch(number, exchange=exchange)
            write(path, 2, folder=folder)
            os._exit(0 if switch.count < number else 1)
        code = os.waitpid(pid, 0)[1]
        assert code in (0, signal.SIGKILL)
        check_after_kill(path, 1 if code else 2)
        if code == 0:
            return number - 1
    raise AssertionError("no save survived")


def every_kind(parent: Path) -> dict[tuple[bool, bool], int]:
    os.fsync = lambda descriptor: None  # for time: the disk of this test loses no power
    kinds = [(folder, exchange) for folder in (True, False) for exchange in (True, False)]
    return {kind: kill_at_every_step(parent, folder=kind[0], exchange=kind[1]) for kind in kinds}


def test_killed_at_every_step_of_a_save(pool, tmp_path):
    steps = pool.run(1, every_kind, tmp_path, process_group=False)[0]
    print(steps)
    assert all(count >= (15 if folder else 6) for (folder, _), count in steps.items())


def save_and_be_killed(path: Path, victim: int, at: int) -> None:
    weight = distribute_tensor(torch.zeros(8, 8), init_device_mesh("cpu", (2,)), [Shard(0)])
    rank = int(os.environ["RANK"])
    for number in range(1, 3):
        if number == 2 and rank == victim:
            KillSwitch(at)
        state = {"state_dict": {"weight": weight + number}}
        save_folder(path, state, {"version": number}, is_writer=rank == 0)


@pytest.mark.parametrize(("victim", "at"), [(0, 9), (1, 2), (0, 25)])
def test_killed_rank_of_two(pool, tmp_path, victim, at):
    path = tmp_path / "folder.ckpt"
    with pytest.raises(WorkerError, match=r"SIGKILL"):
        pool.run(2, save_and_be_killed, path, victim, at)
    opened = open_checkpoint(path)
    assert opened.content["version"] in (1, 2)
    assert opened.tensor("state_dict.weight").unique().tolist() == [opened.content["version"]]


def save_for_ever(path: Path, log: Path) -> None:
    with log.open("w") as lines:
        for number in itertools.count(1):
            write(path, number, folder=True)
            print(number, file=lines, flush=True)


def kill_at_random_moments(parent: Path) -> None:
    randomly, path, log = random.Random(0), parent / "folder.ckpt", parent.parent / "log"
    for _ in range(20):
        log.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            save_for_ever(path, log)
        while not (log.exists() and log.read_text()):
            time.sleep(0.001)
        time.sleep(0.1 * randomly.random())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        check_after_kill(path, int(log.read_text().split()[-1]))


def test_killed_at_random_moments(pool, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    pool.run(1, kill_at_random_moments, tmp_path / "checkpoints", process_group=False)


def test_half_removed_and_missing_checkpoints_are_refused_by_name(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    write(path, 1, folder=True)
    monkeypatch.setattr(files.shutil, "rmtree", lambda path: None)  # the process ends here
    remove(path)
    assert (path / ".metadata").is_file()
    with pytest.raises(CheckpointError, match=r"a\.ckpt' holds no meta\.pt"):
        locate(path)
    with pytest.raises(CheckpointError, match=r"b\.ckpt': no such checkpoint exists"):
        locate(tmp_path / "b.ckpt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty' holds no meta\.pt and no \.metadata"):
        locate(tmp_path / "empty")


def test_the_previous_checkpoint_survives_errors(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    write(path, 1, folder=True)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("lightning_4d.checkpoint.save._write_file", full)
        for folder in (True, False):
            with pytest.raises(CheckpointError, match=r"last\.ckpt' cannot be written: OSError.*No space left"):
                write(path, 2, folder=folder)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(CheckpointError, match=r"No space left"):
            write(path, 2, folder=True)
    with pytest.raises(CheckpointError, match=r"pickle"):
        save_file(path, {"a": lambda: None})
    assert version(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"PermissionError"):
        write(tmp_path / "a.ckpt", 1, folder=True)


def test_a_parent_that_is_a_file_is_named(tmp_path):
    (tmp_path / "a").write_text("")
    for folder in (True, False):
        with pytest.raises(CheckpointError, match=r"cannot be written: (NotADirectory|FileExists)Error"):
            write(tmp_path / "a" / "b.ckpt", 1, folder=folder)


@pytest.mark.parametrize("url", ["memory://a/b.ckpt", "s3://bucket/b.ckpt", "simplecache::s3://bucket/b.ckpt"])
def test_d9_remote_folders_are_refused_by_name(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"save_distributed_checkpoint=False"):
        write(url, 1, folder=True)
    assert list(tmp_path.iterdir()) == []


def test_d9_file_urls_are_local_paths(tmp_path):
    url = f"file://{tmp_path}/a%20b.ckpt"
    write(url, 3, folder=True)
    assert version(tmp_path / "a b.ckpt") == version(url) == 3
