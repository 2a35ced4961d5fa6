"""Starts the ranks of a task from a fork server that lives for the whole session, watches them, collects their reports.

A rank is a fork of a process that has imported everything already, so it starts in about 20 ms, and since it serves one
task only, nothing a test does to a rank (seeds, default dtype, environment, torch's caches, a dead process group) can
reach the next test.

One thing is unlike separate launches: forks share Python's hash seed, so the order of a set of strings is equal on all
ranks here, while under torchrun it is not. What depends on it needs a test with subprocesses.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.pool import worker

ROOT = Path(__file__).parents[2]
OUTPUT_LINES = 60  # of a failing rank, shown in the error
# What a rank says whose peer has gone: a consequence, never the cause.
SECONDARY = re.compile(
    r"Connection (closed|reset)|Broken pipe|connectFullMesh|connection was closed|Socket closed|failed to recv",
    re.IGNORECASE,
)


class WorkerError(Exception):
    """A rank raised, died or did not finish; the message shows the first cause, with its traceback or stack.

    Attributes:
        failures: by rank, "ValueError: first line of the message" or how the process ended.
        unfinished: ranks that were still running, and have been killed.
    """

    def __init__(self, message: str, failures: Mapping[int, str], unfinished: Sequence[int]) -> None:
        super().__init__(message)
        self.failures = dict(failures)
        self.unfinished = list(unfinished)


@dataclass(eq=False)  # hashed by identity
class _Rank:
    task: worker.Task
    process: multiprocessing.process.BaseProcess
    connection: multiprocessing.connection.Connection
    outcome: bytes | worker.Failure | None = None  # the pickled result, or what went wrong; None while it runs


class Pool:
    """Runs functions on several ranks of this machine; one per test session (the fixture `pool`).

    Args:
        grace: seconds that the other ranks get to finish or fail by themselves once one has failed.
    """

    def __init__(self, grace: float = 5.0) -> None:
        self.grace = grace
        self._context = multiprocessing.get_context("forkserver")

    def start(self) -> None:
        """Start the fork server, about 8 s of imports, unless it runs; `run` does this too."""
        self._context.set_forkserver_preload(["tests.pool.preload"])
        # The server takes no sys.path from us, only the environment, and reads OMP_NUM_THREADS when it imports torch.
        with _environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", LIGHTNING_4D_TEST_FORK_SERVER="1"):
            multiprocessing.forkserver.ensure_running()

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        env: Mapping[str, str | None] | None = None,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on `world_size` new ranks and return the results in the order of the ranks.

        Inside, torch.distributed is initialised (gloo, a new store), the environment is that of torchrun with one node,
        the random seeds are fixed and equal on all ranks, and the working directory is a new one that the ranks share.
        Warning filters are those of the calling test.

        Args:
            world_size: number of ranks.
            function: a function of a module (not a lambda or a nested one): ranks import it by name.
            *args: anything picklable; a `tmp_path` is the same folder on all ranks.
            timeout: seconds for the whole task. Ranks that have not finished by then are shown with their stacks.
            env: sets (or with None removes) environment variables on top. LOCAL_WORLD_SIZE="2" makes nodes of 2 ranks:
                LOCAL_RANK, GROUP_RANK and GROUP_WORLD_SIZE follow it.
            process_group: False leaves torch.distributed uninitialised; `init_process_group("gloo")` then works as
                under torchrun.
            **kwargs: as `args`.

        Raises:
            WorkerError: a rank raised, exited, was killed, or did not finish in time. All ranks have ended by then.
        """
        call = _pickle_call(function, args, kwargs)
        deadline = time.monotonic() + timeout
        self.start()
        with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
            (Path(folder) / "cwd").mkdir()
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            filters = _warning_filters()
            tasks = [
                worker.Task(
                    rank=rank,
                    world_size=world_size,
                    folder=Path(folder),
                    call=call,
                    store_port=store.port,
                    timeout=timeout,
                    environment=torchrun_environment(rank, world_size, store.port, env or {}),
                    start_method=multiprocessing.get_start_method(),
                    warning_filters=filters,
                    process_group=process_group,
                )
                for rank in range(world_size)
            ]
            ranks: list[_Rank] = []
            try:
                for task in tasks:
                    ranks.append(self._launch(task))
                self._collect(ranks, deadline)
                error = _error(ranks, getattr(function, "__qualname__", repr(function)), timeout)
            finally:
                _end(ranks)
            _relay_output(ranks)
            if error is not None:
                raise error
            return [pickle.loads(rank.outcome) for rank in ranks]  # type: ignore[arg-type]

    def _launch(self, task: worker.Task) -> _Rank:
        ours, theirs = self._context.Pipe()
        # Not a daemon: daemons may not have children, and DataLoader workers are children.
        process = self._context.Process(target=worker.main, args=(theirs, task), name=f"rank {task.rank}", daemon=False)
        process.start()
        theirs.close()
        return _Rank(task, process, ours)

    def _collect(self, ranks: Sequence[_Rank], deadline: float) -> None:
        """Wait for every rank's report; once one has failed, only `grace` seconds longer."""
        while pending := [rank for rank in ranks if rank.outcome is None]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            sources = [source for rank in pending for source in (rank.connection, rank.process.sentinel)]
            multiprocessing.connection.wait(sources, remaining)
            for rank in pending:
                _receive(rank)
                if isinstance(rank.outcome, worker.Failure):
                    deadline = min(deadline, time.monotonic() + self.grace)


def torchrun_environment(rank: int, world_size: int, port: int, env: Mapping[str, str | None]) -> dict[str, str]:
    """The test process's environment plus what torchrun sets for this rank, with `env` on top."""
    local_size = int(env.get("LOCAL_WORLD_SIZE") or world_size)
    nodes = -(-world_size // local_size)
    variables: dict[str, str | None] = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # env:// joins the store at MASTER_PORT instead of opening one
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "99",  # torch.profiler announces every start and stop otherwise
    }
    if any(name == "lo" for _, name in socket.if_nameindex()):
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise gloo looks the host name up, which some machines cannot
    merged = {**os.environ, **variables, **env}
    return {name: value for name, value in merged.items() if value is not None}


def _pickle_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"cannot send {function!r} and its arguments to the ranks: {error}. They travel by pickle: use a function "
            "at the top level of the test module (functools.partial for settings) and picklable arguments"
        ) from error


def _warning_filters() -> list[worker.WarningFilter]:
    def text(pattern: Any) -> str:
        return getattr(pattern, "pattern", pattern) or ""

    return [
        worker.WarningFilter(action, text(message), category, text(module), lineno)
        for action, message, category, module, lineno in warnings.filters
    ]


def _receive(rank: _Rank) -> None:
    """Take the report of a rank if it is there, or note that the rank ended without one."""
    ended = rank.process.exitcode is not None  # asked first: what it sent before it ended is then there to read
    try:
        if rank.connection.poll():
            rank.outcome = pickle.loads(rank.connection.recv_bytes())
            return
    except (EOFError, ConnectionError):
        rank.process.join(5)
        ended = True
    if ended:
        summary = f"ended without a result, {_describe_exit(rank.process.exitcode)}"
        rank.outcome = worker.Failure(time.monotonic(), summary, summary)


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name} (exit code {code})"
    return f"exit code {code}"


def _error(ranks: Sequence[_Rank], name: str, timeout: float) -> WorkerError | None:
    """What went wrong, or None; called while unfinished ranks still run."""
    failed = {rank: rank.outcome for rank in ranks if isinstance(rank.outcome, worker.Failure)}
    unfinished = [rank for rank in ranks if rank.outcome is None]
    if failed:
        message = _failure_message(failed, unfinished, f"of {len(ranks)} in {name}")
    elif unfinished:
        message = _hang_message(unfinished, f"of {len(ranks)} had not finished {name} after {timeout:g} s")
    else:
        return None
    summaries = {rank.task.rank: failure.summary for rank, failure in failed.items()}
    return WorkerError(message, summaries, [rank.task.rank for rank in unfinished])


def _failure_message(failed: Mapping[_Rank, worker.Failure], unfinished: Sequence[_Rank], where: str) -> str:
    def order(rank: _Rank) -> tuple[bool, float]:
        return bool(SECONDARY.search(failed[rank].summary)), failed[rank].time

    first, *others = sorted(failed, key=order)
    lines = [f"rank {first.task.rank} {where}: {failed[first].summary}", failed[first].text.rstrip()]
    lines += [f"rank {rank.task.rank}: {failed[rank].summary}" for rank in others]
    lines += [f"rank {rank.task.rank}: had not finished, and was killed" for rank in unfinished]
    return "\n".join([*lines, *_output(first)])


def _hang_message(unfinished: Sequence[_Rank], what: str) -> str:
    lines = [f"rank(s) {', '.join(str(rank.task.rank) for rank in unfinished)} {what}"]
    for rank, stack in zip(unfinished, _stacks(unfinished), strict=True):
        lines += [f"--- stack of rank {rank.task.rank}", stack.rstrip(), *_output(rank)]
    return "\n".join(lines)


def _stacks(ranks: Sequence[_Rank]) -> list[str]:
    """Ask the ranks for their Python stacks and wait up to 2 s for them."""
    for rank in ranks:
        if rank.process.pid is not None and rank.process.exitcode is None:
            os.kill(rank.process.pid, worker.STACK_SIGNAL)
    patience = time.monotonic() + 2
    while time.monotonic() < patience and not all(_size(rank.task.stack) for rank in ranks):
        time.sleep(0.02)
    time.sleep(0.1)  # a dump is several writes
    return [rank.task.stack.read_text() if _size(rank.task.stack) else "(no stack)" for rank in ranks]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _output(rank: _Rank) -> list[str]:
    lines = rank.task.log.read_text(errors="replace").splitlines() if rank.task.log.exists() else []
    if not lines:
        return []
    return [f"--- output of rank {rank.task.rank} (last {OUTPUT_LINES} lines)", *lines[-OUTPUT_LINES:]]


def _relay_output(ranks: Sequence[_Rank]) -> None:
    """Print what the ranks printed, so that pytest shows it when the test fails."""
    for rank in ranks:
        if _size(rank.task.log):
            lines = rank.task.log.read_text(errors="replace").splitlines()
            sys.stdout.writelines(f"[rank {rank.task.rank}] {line}\n" for line in lines)


def _end(ranks: Sequence[_Rank]) -> None:
    """Let finished ranks go, kill the others, with every process they started; none is left when this returns."""
    for rank in ranks:
        if isinstance(rank.outcome, bytes):
            _release(rank)
        else:
            _kill(rank)
    for rank in ranks:
        rank.process.join(5)
        _kill(rank)
        rank.process.join()
        rank.process.close()
        rank.connection.close()


def _release(rank: _Rank) -> None:
    try:
        rank.connection.send_bytes(b"done")
    except OSError:
        pass  # it has ended by itself


def _kill(rank: _Rank) -> None:
    assert rank.process.pid is not None, "a launched rank has a process id"
    try:
        os.killpg(rank.process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        rank.process.kill()  # it has no group of its own yet, or it has ended


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
