"""Each configuration of the example, run from its file on as many processes as it says, gives one process's losses.

The text is so short that all windows are one step's batch: then it does not matter who reads which of them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from examples import train_gpt
from tests.harness import quiet
from tests.hosts.two_hosts import arguments, losses, write_text

STEPS = 4
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    write_text(folder / "text")
    return folder


def fitted(name: str, folder: Path) -> list[float]:
    """Run a configuration on the ranks of the pool; validation losses after each step, as rank 0 logged them."""
    script, *options = arguments(f"{name}.yaml", folder, STEPS)
    with quiet(), mock.patch.object(sys, "argv", [script]):
        cli = train_gpt.main(options)
    return losses(Path()) if cli.trainer.is_global_zero else []


@pytest.fixture(scope="module")
def expected(pool, folder: Path) -> list[float]:
    return pool.run(1, fitted, "single", folder)[0]


@pytest.mark.parametrize("name", [slow("ddp"), slow("hsdp"), "tp", "pp", "cp"])
def test_a_configuration_gives_the_losses_of_one_process(pool, folder, expected, name):
    assert len(expected) == STEPS
    assert expected[-1] < expected[0]
    assert pool.run(4, fitted, name, folder)[0] == pytest.approx(expected, rel=1e-8)


@pytest.mark.slow
def test_two_nodes_give_the_losses_of_one_process(pool, folder, expected):
    actual = pool.run(4, fitted, "two_nodes", folder, env={"LOCAL_WORLD_SIZE": "2"})[0]
    assert actual == pytest.approx(expected, rel=1e-8)
