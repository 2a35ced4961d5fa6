"""Any combination of axes gives the numbers of DDP: losses, gradients, norms, parameters, metrics on every rank."""

from __future__ import annotations

import pytest

from tests.grid import FEATURES, WHOLE, Case, References, check, pruned, recorded

PRUNED = pruned()
BY_DEFAULT = set(PRUNED)


@pytest.fixture(scope="module")
def references(pool):
    return References(pool)


def cases() -> list[object]:
    rest = [pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in WHOLE if case not in BY_DEFAULT]
    return [*(pytest.param(case, id=str(case)) for case in PRUNED), *rest]


@pytest.mark.parametrize("case", cases())
def test_layout_gives_the_numbers_of_ddp(pool, references, case: Case):
    check(recorded(pool, case), references.of(case), case)


def test_the_default_grid_has_every_combination_feature_and_module():
    assert {case.axes for case in PRUNED} == {case.axes for case in WHOLE}
    assert {case.module for case in PRUNED} == {case.module for case in WHOLE}
    for feature in FEATURES:
        assert sum(case.feature == feature for case in PRUNED) >= 2, feature
