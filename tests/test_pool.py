"""The pool of ranks: clean state for every task, and what it says when a rank raises, dies or hangs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from tests.pool import Pool, WorkerError

ROOT = Path(__file__).parents[1]


def is_running(pid: int) -> bool:
    """Whether the process does anything still; a zombie that its parent has not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int]) -> list[int]:
    """Those that still run after a while."""
    for _ in range(200):
        if not any(map(is_running, pids)):
            return []
        time.sleep(0.1)
    return [pid for pid in pids if is_running(pid)]


# -- an ordinary task -------------------------------------------------------------------------------------------------


def sum_of_ranks(scale: float, offset: float = 0.0) -> tuple[int, Tensor]:
    total = torch.tensor([dist.get_rank() * scale])
    dist.all_reduce(total)
    return dist.get_rank(), total + offset


@pytest.mark.parametrize("world_size", [1, 2, 16])
def test_results_come_in_the_order_of_the_ranks(pool: Pool, world_size: int) -> None:
    results = pool.run(world_size, sum_of_ranks, 2.0, offset=1.0)
    assert [rank for rank, _ in results] == list(range(world_size))
    assert {float(total) for _, total in results} == {world_size * (world_size - 1) + 1.0}


def group_and_process() -> tuple[int, int, bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return dist.get_world_size(), os.getpid(), mesh.get_group().size() == dist.get_world_size()


def test_each_task_has_a_new_process_group_and_new_processes(pool: Pool) -> None:
    tasks = [pool.run(size, group_and_process) for size in (2, 3, 2)]
    assert [[size for size, _, _ in ranks] for ranks in tasks] == [[2, 2], [3, 3, 3], [2, 2]]
    assert all(fits for ranks in tasks for _, _, fits in ranks)
    pids = [pid for ranks in tasks for _, pid, _ in ranks]
    assert len(set(pids)) == len(pids)
    assert not wait_until_gone(pids)


def torchrun_view() -> dict[str, Any]:
    elastic = TorchElasticEnvironment()
    return {
        "detected": TorchElasticEnvironment.detect(),
        "global": elastic.global_rank(),
        "local": elastic.local_rank(),
        "node": elastic.node_rank(),
        "world": elastic.world_size(),
        "rank_zero": rank_zero_only.rank,
        "threads": torch.get_num_threads(),
        "extra": os.environ.get("EXTRA"),
        "home": os.environ.get("HOME"),
    }


def test_ranks_see_the_environment_of_torchrun(pool: Pool) -> None:
    for rank, view in enumerate(pool.run(2, torchrun_view, env={"EXTRA": "1", "HOME": None})):
        assert view == {
            "detected": True,
            "global": rank,
            "local": rank,
            "node": 0,
            "world": 2,
            "rank_zero": rank,
            "threads": 1,
            "extra": "1",
            "home": None,
        }


def test_two_nodes_can_be_pretended(pool: Pool) -> None:
    views = pool.run(4, torchrun_view, env={"LOCAL_WORLD_SIZE": "2"})
    assert [(view["node"], view["local"]) for view in views] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def start_group_from_environment() -> tuple[bool, int]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    dist.barrier()
    return before, dist.get_world_size()


def test_a_task_can_start_the_process_group_itself(pool: Pool) -> None:
    assert pool.run(2, start_group_from_environment, process_group=False) == [(False, 2), (False, 2)]


def write_and_read(folder: Path) -> tuple[str, list[str], str]:
    if dist.get_rank() == 0:
        Path("from_rank_0").write_text("hello")
        (folder / "shared").write_text("everyone")
    dist.barrier()
    return Path("from_rank_0").read_text(), sorted(os.listdir()), (folder / "shared").read_text()


def test_ranks_share_a_new_working_directory_and_the_folders_of_the_test(pool: Pool, tmp_path: Path) -> None:
    before = sorted(os.listdir())
    for _ in range(2):
        assert pool.run(2, write_and_read, tmp_path) == [("hello", ["from_rank_0"], "everyone")] * 2
    assert sorted(os.listdir()) == before


def read_with_dataloader_workers() -> list[float]:
    loader = DataLoader([float(i) for i in range(4)], batch_size=2, num_workers=1)
    return [float(batch.sum()) for batch in loader]


def test_ranks_may_have_dataloader_workers(pool: Pool) -> None:
    assert pool.run(1, read_with_dataloader_workers) == [[1.0, 5.0]]


# -- state does not travel from one task to the next -------------------------------------------------------------------


def state() -> dict[str, Any]:
    return {
        "torch": torch.rand(3).tolist(),
        "numpy": float(np.random.rand()),
        "python": random.random(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "variable": os.environ.get("LEFT_BEHIND"),
        "attribute": hasattr(torch, "left_behind"),
        "group": dist.is_initialized() and dist.get_world_size(),
    }


def change_everything() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.rand(7)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.left_behind = True  # type: ignore[attr-defined]
    dist.destroy_process_group()


def test_a_task_cannot_change_the_next(pool: Pool) -> None:
    first = pool.run(2, state)
    assert first[0] == first[1]  # all ranks start with the same seeds
    assert first[0]["dtype"] == torch.float32
    assert first[0]["group"] == 2
    pool.run(2, change_everything)
    assert pool.run(2, state) == first


def warn() -> None:
    warnings.warn("take care", UserWarning, stacklevel=1)


def test_warning_filters_are_those_of_the_test(pool: Pool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "take", UserWarning)
        pool.run(1, warn)
        warnings.filterwarnings("error", "take", UserWarning)
        with pytest.raises(WorkerError, match="UserWarning: take care"):
            pool.run(1, warn)


# -- what travels ------------------------------------------------------------------------------------------------------


def tensors() -> dict[str, Tensor]:
    big = torch.zeros(1_000_000, requires_grad=True)
    return {"view": big[:2], "parameter": torch.nn.Parameter(torch.ones(3)), "product": big[:1] * 2}


def test_tensors_come_back_detached_and_alone(pool: Pool) -> None:
    (result,) = pool.run(1, tensors)
    assert not any(tensor.requires_grad for tensor in result.values())
    assert result["view"].untyped_storage().nbytes() == 2 * 4
    assert result["parameter"].tolist() == [1.0, 1.0, 1.0]


def sharded() -> Tensor:
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])


def test_a_sharded_result_is_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"DTensor of shape \(4,\).*full_tensor"):
        pool.run(2, sharded)


def test_a_function_that_ranks_cannot_import_is_refused(pool: Pool) -> None:
    with pytest.raises(TypeError, match="top level of the test module"):
        pool.run(1, lambda: None)


# -- failures ----------------------------------------------------------------------------------------------------------


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("about to fail")
        raise ValueError("boom\nsecond line")
    dist.all_reduce(torch.ones(1))


def test_an_exception_is_shown_with_its_rank_and_traceback(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(3, raise_on_rank_1)
    message = str(caught.value)
    assert message.startswith("rank 1 of 3 in raise_on_rank_1: ValueError: boom\n")
    assert "second line" in message
    assert 'raise ValueError("boom\\nsecond line")' in message  # the line of the source
    assert "about to fail" in message
    assert caught.value.failures[1] == "ValueError: boom"
    # The others fail at the closed connection, or are killed after the grace.
    assert set(caught.value.failures) | set(caught.value.unfinished) == {0, 1, 2}
    assert "[rank 1] about to fail" in capsys.readouterr().out
    assert len(pool.run(3, sum_of_ranks, 1.0)) == 3


def raise_everywhere() -> None:
    raise KeyError(dist.get_rank())


def test_all_failures_are_collected(pool: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(3, raise_everywhere)
    assert caught.value.failures == {rank: f"KeyError: {rank}" for rank in range(3)}


def end(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(("how", "said"), [("exit", "exit code 3"), ("kill", r"killed by SIGKILL \(exit code -9\)")])
def test_a_dead_rank_is_named_and_replaced(pool: Pool, how: str, said: str) -> None:
    with pytest.raises(WorkerError, match=f"^rank 1 of 2 in end: ended without a result, {said}"):
        pool.run(2, end, how)
    assert len(pool.run(2, sum_of_ranks, 1.0)) == 2


def leave_quietly() -> None:
    os._exit(0)


def test_a_rank_that_exits_with_0_has_not_succeeded(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="ended without a result, exit code 0"):
        pool.run(1, leave_quietly)


def note_process(folder: Path, with_child: bool = False) -> None:
    pids = [os.getpid()]
    if with_child:
        pids.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid)
    (folder / f"pids{os.environ['RANK']}").write_text(" ".join(map(str, pids)))


def noted_processes(folder: Path) -> list[int]:
    return [int(pid) for path in folder.glob("pids*") for pid in path.read_text().split()]


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def hang_in_python_and_in_a_collective(folder: Path) -> None:
    note_process(folder, with_child=dist.get_rank() == 1)
    if dist.get_rank() == 0:
        return
    if dist.get_rank() == 1:
        sleep_for_ever()
    dist.all_reduce(torch.ones(1))


def test_a_hang_is_shown_with_the_stacks_of_the_ranks_that_hang(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(3, hang_in_python_and_in_a_collective, tmp_path, timeout=5)
    message = str(caught.value)
    assert message.startswith(
        "rank(s) 1, 2 of 3 had not finished hang_in_python_and_in_a_collective after 5 s\n--- stack of rank 1\n"
    )
    first, second = message.split("--- stack of rank 2")
    assert "in sleep_for_ever" in first
    assert "in all_reduce" in second
    assert caught.value.unfinished == [1, 2]
    assert len(noted_processes(tmp_path)) == 4  # three ranks and a child
    assert not wait_until_gone(noted_processes(tmp_path))
    assert len(pool.run(3, sum_of_ranks, 1.0)) == 3


def fail_while_others_compute() -> None:
    if dist.get_rank() == 0:
        raise ValueError("early")
    sleep_for_ever()


def test_the_others_get_only_a_grace_once_one_has_failed() -> None:
    with pytest.raises(WorkerError, match="ValueError: early") as caught:
        Pool(grace=0.5).run(2, fail_while_others_compute, timeout=100_000)
    assert caught.value.unfinished == [1]
    assert "rank 1: had not finished, and was killed" in str(caught.value)


def note_and_sleep(folder: Path) -> None:
    note_process(folder, with_child=True)
    dist.barrier()
    (folder / "ready").touch()
    sleep_for_ever()


def test_no_rank_outlives_a_killed_test_session(tmp_path: Path) -> None:
    session = textwrap.dedent(f"""
        from pathlib import Path
        from tests.pool import Pool
        from tests.test_pool import note_and_sleep
        Pool().run(2, note_and_sleep, Path({str(tmp_path)!r}))
    """)
    process = subprocess.Popen([sys.executable, "-c", session], cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None, "the session ended by itself"
        time.sleep(0.1)
    pids = noted_processes(tmp_path)
    assert len(pids) == 4
    assert all(map(is_running, pids))
    process.kill()
    process.wait()
    assert not wait_until_gone(pids)
