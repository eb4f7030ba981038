"""Ranks as threads that are killed at a call: the order of the other ranks changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from agrees_with_mpi import Case, explored, without_calls
from killed import Kill

from parallel_sgd import runtime
from parallel_sgd.communication import Communicator
from parallel_sgd.testing import Outcome, explore


@pytest.mark.parametrize(
    "case",
    [
        Case(1, "sync", 4, (Kill(1, "world", 11, True),)),
        Case(2, "1 bit", 3, (Kill(0, "world", 30, True),)),
        Case(3, "8 bits, double buffering", 4, (Kill(2, "world/1", 9, True),)),
        Case(4, "PowerSGD", 4, (Kill(3, "world", 6, True), Kill(0, "world", 9, True))),
        Case(5, "2 servers", 4, (Kill(1, "endpoint of world/2", 7, True),)),
    ],
    ids=str,
)
def test_a_late_kill_has_one_outcome(case: Case) -> None:
    """A kill one call later has another one, if the calls that the rest makes are counted."""
    with np.errstate(all="ignore"):
        outcomes = explored(case, 0, 10)
        first = case.kills[0]
        later = replace(first, number=first.number + 1)
        others = explored(replace(case, kills=(later, *case.kills[1:])), 0, 3)
    (outcome,) = without_calls(outcomes)
    victims = {str(kill.rank) for kill in case.kills}
    assert len(json.loads(outcome)) == case.ranks - len(victims)
    assert not victims.intersection(json.loads(outcome))
    assert not outcomes.keys() & others.keys()


def gathers(comm: Communicator) -> None:
    received = np.zeros(2)
    comm.allgather(np.full(int(comm.rank != 1), 1.0 + comm.rank), received, [1, 0, 1])
    assert received.tolist() == [1, 3]


def exchanges(comm: Communicator) -> None:
    """Everybody sends to rank 1."""
    n = 3 * (comm.rank == 1)
    received = np.zeros(n)
    comm.alltoall(np.full(1, float(comm.rank)), [0, 1, 0], received, [n // 3] * 3)
    assert received.tolist() == [0, 1, 2][:n]


def broadcasts(comm: Communicator) -> None:
    array = np.full(2, float(comm.rank))
    comm.broadcast(array, 2)
    assert array.tolist() == [2, 2]


@pytest.mark.parametrize("collective", [gathers, exchanges, broadcasts])
def test_a_rank_may_go_on_without_ranks_that_it_needs_nothing_of(collective: Any) -> None:
    """As over MPI, where it need not; and it never goes on from a sum without all of them."""
    gone, summed, seen = set[int](), set[int](), set[tuple[bool, bool]]()

    def program(comm: Communicator) -> None:
        assert comm.size == 3
        if comm.rank == 1:
            runtime.sleep(1.0)
            seen.add((0 in gone, 2 in gone))
            assert not summed
        collective(comm)
        gone.add(comm.rank)
        comm.barrier()
        summed.add(comm.rank)

    def check(outcome: Outcome) -> None:
        gone.clear()
        summed.clear()

    explore(program, 3, 60, faults=1, seed=1, check=check)
    assert seen == {(one, other) for one in (True, False) for other in (True, False)}
