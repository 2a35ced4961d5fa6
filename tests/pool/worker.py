"""One rank of one task: takes on torchrun's environment, joins a new process group, runs, reports, exits."""

from __future__ import annotations

import faulthandler
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

SEED = 20240229  # of every task, on every rank


@dataclass(frozen=True)
class WarningFilter:
    """One entry of `warnings.filters`, in the terms of `warnings.filterwarnings`."""

    action: str
    message: str
    category: type[Warning]
    module: str
    lineno: int


@dataclass(frozen=True)
class Task:
    """What one rank is told at its start."""

    rank: int
    world_size: int
    folder: Path  # of the task: rank{r}.log, rank{r}.stack, and cwd/, the working directory that all ranks share
    call: bytes  # pickled (function, args, kwargs)
    store_port: int
    timeout: float  # seconds; the process group gives up a little later than the pool does
    environment: Mapping[str, str]  # the whole of os.environ
    start_method: str  # of multiprocessing, for DataLoader workers: the test process's, not the pool's own
    warning_filters: list[WarningFilter] = field(default_factory=list)
    process_group: bool = True

    @property
    def log(self) -> Path:
        """Where the standard output and error of this rank go."""
        return self.folder / f"rank{self.rank}.log"

    @property
    def stack(self) -> Path:
        """Where the Python stacks of this rank are written on `STACK_SIGNAL`."""
        return self.folder / f"rank{self.rank}.stack"


@dataclass(frozen=True)
class Failure:
    """An exception on a rank, as text: the class may not be importable, or even picklable, in the test process."""

    time: float  # time.monotonic() of the machine, comparable between ranks
    summary: str  # class and first line of the message
    text: str  # the whole traceback


STACK_SIGNAL = signal.SIGUSR1


def main(connection: multiprocessing.connection.Connection, task: Task) -> None:
    """Run `task` and send its pickled result, or a `Failure`; the process ends here."""
    os.setpgid(0, 0)  # with the DataLoader workers it may start: the pool ends them together
    code = 1
    try:
        _prepare(task)
        report: bytes | Failure = _dumps(_call(task))
        code = 0
    except BaseException as error:  # SystemExit and Lightning's own BaseExceptions are failures of the test body too
        report = _failure(error)
    connection.send_bytes(pickle.dumps(report))
    if code == 0:
        _wait_for_release(connection)
    sys.stdout.flush()
    sys.stderr.flush()
    # No clean-up: peers of a failed rank see its sockets close at once, and all state goes with the process.
    os._exit(code)


def _wait_for_release(connection: multiprocessing.connection.Connection) -> None:
    """Keep the process group alive until every rank is done: a peer may still be reading from this one."""
    try:
        connection.recv_bytes()
    except EOFError:
        pass


def _prepare(task: Task) -> None:
    threading.Thread(target=_exit_with_parent, name="exit with pytest", daemon=True).start()
    # The files stay open until the process ends: faulthandler writes to the descriptor from a signal handler.
    faulthandler.register(STACK_SIGNAL, file=task.stack.open("w"), all_threads=True)
    output = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(task.environment)
    os.chdir(task.folder / "cwd")
    multiprocessing.set_start_method(task.start_method, force=True)
    _set_warning_filters(task.warning_filters)
    logging.captureWarnings(False)
    _seed()
    _set_rank_zero(task.rank)
    if task.process_group:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", task.store_port, is_master=False),
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.timeout + 60),
        )


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "worker.main runs in a child process only"
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _set_warning_filters(filters: list[WarningFilter]) -> None:
    warnings.resetwarnings()
    for entry in reversed(filters):  # each call puts its filter in front
        warnings.filterwarnings(entry.action, entry.message, entry.category, entry.module, entry.lineno)  # type: ignore[arg-type]


def _seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _set_rank_zero(rank: int) -> None:
    """Lightning reads RANK when it is imported, which here was before the rank existed."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = rank


def _call(task: Task) -> Any:
    function: Callable[..., Any]
    function, args, kwargs = pickle.loads(task.call)
    return function(*args, **kwargs)


class _ResultPickler(pickle.Pickler):
    """Sends tensors as detached CPU copies of just their own elements, never through shared memory."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, DTensor):
            raise TypeError(
                f"the result holds a DTensor of shape {tuple(obj.shape)}, which means nothing outside its process "
                "group; return its full_tensor() or to_local()"
            )
        if isinstance(obj, torch.Tensor) and (obj.requires_grad or obj.device.type != "cpu" or _is_view(obj)):
            return torch.clone, (obj.detach().cpu().clone(),)
        return NotImplemented


def _is_view(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _ResultPickler(buffer).dump(value)
    return buffer.getvalue()


def _failure(error: BaseException) -> Failure:
    now = time.monotonic()
    message = (str(error).strip().splitlines() or [""])[0]
    return Failure(now, f"{type(error).__qualname__}: {message}", "".join(traceback.format_exception(error)))
