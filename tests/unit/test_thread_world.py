"""How a world of threads ends when something goes wrong in it: at once, and with the cause."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from limits import patience

from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.communication import InBackground, RankFailed


def test_results_come_in_rank_order():
    assert simulate(5, lambda comm: (comm.rank, comm.size)) == [(k, 5) for k in range(5)]


def test_a_single_rank():
    comm = Communicator.single()
    assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (0, 1, 0, 1)


def test_the_error_of_one_rank_stops_the_others():
    def body(comm):
        if comm.rank == 1:
            raise UserError("rank 1 gives up")
        comm.barrier()

    began = time.monotonic()
    with pytest.raises(UserError, match="rank 1 gives up"):
        simulate(3, body)
    assert time.monotonic() - began < 5 * patience()


def test_a_rank_that_leaves_early_is_not_waited_for_for_ever():
    def body(comm):
        if comm.rank == 1:
            comm.barrier()

    with pytest.raises(RankFailed, match="rank 1 waited in sum_integers for a rank that failed"):
        simulate(2, body, timeout_s=0.2)


def test_different_collectives_are_noticed():
    def body(comm):
        comm.barrier() if comm.rank else comm.broadcast(np.zeros(1))

    with pytest.raises(AssertionError, match="ranks called different collectives"):
        simulate(2, body)


def test_no_threads_are_left_behind():
    before = threading.active_count()
    for _ in range(3):
        simulate(4, lambda comm: comm.barrier())
    with pytest.raises(ZeroDivisionError):
        simulate(4, lambda comm: 1 // 0)
    assert threading.active_count() == before


def test_objects_are_not_shared_between_ranks():
    def body(comm):
        items = comm.allgather_object([comm.rank])
        items[0].append("mine")
        comm.barrier()
        return items

    assert simulate(2, body) == [[[0, "mine"], [1]]] * 2


def test_a_failure_reaches_those_who_wait_in_a_duplicate():
    def body(comm):
        apart = comm.duplicate()
        if comm.rank == 1:
            raise UserError("rank 1 gives up")
        InBackground("barrier", apart.barrier).result()

    began = time.monotonic()
    with pytest.raises(UserError, match="rank 1 gives up"):
        simulate(3, body)
    assert time.monotonic() - began < 5 * patience()
