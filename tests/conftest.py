"""What every test can use: the `pool` of ranks, and the markers that keep slow and GPU tests out of an ordinary run."""

from __future__ import annotations

import pytest
import torch

from tests.pool import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_by_marker = "slow" in config.getoption("-m")
    skip_slow = pytest.mark.skip(reason="slow: runs with --slow or -m slow")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "slow" in item.keywords and not (config.getoption("--slow") or asked_by_marker):
            item.add_marker(skip_slow)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip_gpu)


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Runs functions on gloo ranks; see `Pool.run`."""
    return Pool()
