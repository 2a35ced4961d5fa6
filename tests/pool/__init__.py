"""Gloo ranks for tests: `pool.run(4, function)` runs a function of a test module on 4 processes.

pool.py starts and watches the ranks, worker.py is what runs inside one, preload.py is what all of them share.
"""

from tests.pool.pool import Pool, WorkerError

__all__ = ["Pool", "WorkerError"]
