"""Processes that SLURM starts find their ranks, and tensor parallelism stays inside a node.

srun starts one process for each task, with these variables; so does this test, for two nodes of two tasks.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from tests.hosts.two_hosts import environment

SCRIPT = """
import json, sys
import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning_4d import NDStrategy
from tests.harness import quiet
from tests.modules import TinyGPT

seed_everything(0, verbose=False)
with quiet():
    trainer = Trainer(
        accelerator="cpu", devices=2, num_nodes=2, max_steps=2, limit_val_batches=2, logger=False,
        strategy=NDStrategy(data_parallel_replicate_size=2, tensor_parallel_size=2), precision="64-true",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )
    module = TinyGPT(vocab=32, layers=2)
    trainer.fit(module)
    loss = float(trainer.validate(module, verbose=False)[0]["val_loss"])
strategy = trainer.strategy
seen = {
    "environment": type(strategy.cluster_environment).__name__,
    "rank": dist.get_rank(), "local": strategy.local_rank, "node": strategy.node_rank,
    "coordinate": {axis: at for axis, at in strategy.mesh.coordinate.items() if axis in ("dp_replicate", "tp")},
    "tensor group": dist.get_process_group_ranks(strategy.mesh["tp"].get_group()),
    "data rank": strategy.data_parallel_rank, "loss": loss,
}
with open(sys.argv[1], "w") as file:
    json.dump(seen, file)
"""


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def variables(rank: int, port: int) -> dict[str, str]:
    """What srun gives to a task: `srun --nodes=2 --ntasks-per-node=2`."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "localhost",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "MASTER_PORT": str(port),
    }


def test_ranks_and_layout_under_slurm(tmp_path):
    port = free_port()
    processes = []
    try:
        for rank in range(4):
            with (tmp_path / f"log{rank}").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", SCRIPT, str(tmp_path / f"seen{rank}.json")],
                        cwd=tmp_path,
                        env=environment(tmp_path) | variables(rank, port),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = [process.wait(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * 4, "".join(log.read_text() for log in sorted(tmp_path.glob("log*")))
    seen = [json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in range(4)]
    for rank, mine in enumerate(seen):
        assert mine["environment"] == "SLURMEnvironment"
        assert (mine["rank"], mine["local"], mine["node"]) == (rank, rank % 2, rank // 2)
        assert mine["coordinate"] == {"dp_replicate": rank // 2, "tp": rank % 2}
        assert mine["tensor group"] == [rank // 2 * 2, rank // 2 * 2 + 1], "on one node"
        assert mine["data rank"] == rank // 2
        assert mine["loss"] == pytest.approx(seen[0]["loss"], rel=1e-12)
