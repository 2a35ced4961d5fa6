"""What the fork server imports once so that every rank has it from the start.

Each rank is a fork of the server: what is imported here costs a rank nothing, what is missing here costs every rank of
every test. Nothing here may start a thread, draw a random number or run backward: a fork would inherit half of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

MODULES = (
    "lightning.pytorch",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.cli",
    "lightning.pytorch.loggers",
    "lightning.pytorch.strategies",
    "numpy",
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks",  # imported by Lightning's DDP at its first set-up
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torchmetrics",
    "torchmetrics.classification",
)


OURS = ("lightning_4d", "tests.pool.worker", "tests.harness", "tests.modules")


def preload() -> None:
    """Import everything, on one thread, and keep the garbage collector off the pages that the forks share."""
    for name in MODULES:
        importlib.import_module(name)
    for name in OURS:
        # One that does not import fails in the test that needs it, with its own traceback, not here.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    gc.collect()
    gc.freeze()


if os.environ.pop("LIGHTNING_4D_TEST_FORK_SERVER", None) is not None:  # only there, not wherever this file is imported
    preload()
