"""Ranks over MPI that are killed at a call end as ranks as threads do that are killed there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from agrees_with_mpi import Case, Compared, compare
from killed import Kill

pytestmark = pytest.mark.open_mpi


@pytest.mark.parametrize(
    "case",
    [
        Case(1, "1 bit", 3, (Kill(0, "world", 30, True),)),
        Case(2, "block momentum, overlap, 8 bits", 4, (Kill(2, "world/1", 3, True),)),
    ],
    ids=str,
)
def test_the_outcome_is_that_of_threads(case: Case) -> None:
    with np.errstate(all="ignore"):
        compared = compare(case, 5)
    assert compared.exact and compared.same_calls, (compared.outcomes, compared.mpi)
    assert len(compared.mpi) == case.ranks - 1


def test_a_kill_at_another_call_is_another_outcome() -> None:
    case = Case(3, "sync", 3, (Kill(1, "world", 12, True),))
    (kill,) = case.kills
    with np.errstate(all="ignore"):
        here = compare(case, 5)
        there = compare(replace(case, kills=(replace(kill, number=15),)), 5)
    assert here.exact and there.exact
    assert not Compared(case, here.outcomes, there.mpi).agrees
