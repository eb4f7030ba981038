"""Exploration finds faults of recovery that were mended, once they are put back."""

from __future__ import annotations

import time

import numpy as np
import pytest
from explored import CONFIGURATIONS
from explored_training import TOTAL, training
from failures import Failure, FailurePlan
from old_faults import OLD_FAULTS, RARE

import parallel_sgd as psgd
from parallel_sgd.communication import simulate_recovery
from parallel_sgd.testing import ScheduleFailed

SECONDS = 300.0  #: of a core, in which each must be found; most were within 20
AT_A_TIME = 50


@pytest.mark.filterwarnings("ignore:servers=0")
@pytest.mark.parametrize("fault", OLD_FAULTS)
def test_an_old_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = OLD_FAULTS[fault]
    configuration = CONFIGURATIONS[old.configuration]
    old.put_back(monkeypatch)

    def explored() -> None:
        until, seed = time.process_time() + SECONDS, old.seed
        while time.process_time() < until:
            configuration.explore(schedules=AT_A_TIME, seed=seed)
            seed += AT_A_TIME

    with np.errstate(all="ignore"), pytest.raises(ScheduleFailed) as found:
        explored()
    print(f"{fault}: {found.value}")


@pytest.mark.parametrize("faulty", [True, False])
def test_a_second_failure_before_a_snapshot_is_restored(
    faulty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot must not count as restored before it is: the next recovery may choose another.

    Rank 0 alone hears of rank 1's failure in a commit, and fails as the ranks restore a snapshot.
    """
    if faulty:
        RARE.put_back(monkeypatch)
    optimizer = psgd.MomentumSGD(lr=0.01)
    program = training(psgd.DataParallelSGD(), optimizer, compares=True, surviving=True)
    twice, errors = 0, []
    for number in range(70, 122, 2):
        with FailurePlan(
            Failure(1, meeting=number, heard_by=0), Failure(0, meeting=number + 10, heard_by=2)
        ) as plan:
            try:
                left = [one for one in simulate_recovery(4, program, timeout_s=20) if one]
            except psgd.UserError as error:
                errors.append(str(error))
                continue
        assert all(np.array_equal(one.flat, left[0].flat) for one in left)
        assert {one.samples for one in left} == {TOTAL}
        twice += plan.struck == 2
    assert twice > 20
    assert bool(errors) == faulty, errors
