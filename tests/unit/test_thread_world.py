"""How a world of threads ends when something goes wrong in it: at once, and with the cause."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from limits import patience

from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.communication import InBackground


def test_results_come_in_rank_order():
    assert simulate(5, lambda comm: (comm.rank, comm.size)) == [(k, 5) for k in range(5)]


def test_a_single_rank():
    comm = Communicator.single()
    assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    "wait",
    [
        lambda comm, apart: comm.barrier(),
        lambda comm, apart: InBackground("barrier", apart.barrier).result(),
    ],
    ids=["in the world", "in a duplicate"],
)
def test_the_error_of_one_rank_stops_the_others(wait):
    def body(comm):
        apart = comm.duplicate()
        if comm.rank == 1:
            raise UserError("rank 1 gives up")
        wait(comm, apart)

    began = time.monotonic()
    with pytest.raises(UserError, match="rank 1 gives up"):
        simulate(3, body)
    assert time.monotonic() - began < 5 * patience()


def test_a_rank_that_leaves_early_is_not_waited_for():
    def body(comm):
        comm.barrier()
        if comm.rank != 2:
            comm.sum_integers(np.ones(1, np.int64))

    began = time.monotonic()
    with pytest.raises(UserError, match=r"waits in sum_integers for rank 2, which has finished"):
        simulate(3, body)
    assert time.monotonic() - began < 5


def test_in_a_part_of_the_world_ranks_are_called_as_in_the_whole():
    def body(comm):
        part = comm.split(comm.rank % 2)
        if comm.rank == 1:
            part.duplicate().barrier()

    with pytest.raises(
        UserError, match=r"rank 1 waits in sum_integers for rank 3, which has finished"
    ):
        simulate(4, body)


def test_who_has_left_after_the_last_meeting_is_not_missed():
    def body(comm):
        for _ in range(50):
            comm.barrier()
        return comm.rank

    for _ in range(20):
        assert simulate(4, body) == [0, 1, 2, 3]


def test_a_message_of_a_rank_that_has_left_is_not_waited_for():
    def body(comm):
        messages = comm.messages()
        if comm.rank == 0:
            messages.receive(np.zeros(1), 1, 0, lambda: None)
            with messages.watched("exchange"):
                while messages.under_way:
                    messages.progress()

    with pytest.raises(UserError, match=r"rank 0 waits in exchange for rank 1, which has finished"):
        simulate(2, body)


def test_a_rank_that_does_not_come_is_named():
    gone = threading.Event()

    def body(comm):
        if comm.rank == 1:
            gone.wait(10)
        try:
            comm.barrier()
        finally:
            gone.set()

    with pytest.raises(UserError, match=r"timeout_s=0.2 s: it has waited for rank 1"):
        simulate(2, body, timeout_s=0.2)


def test_different_collectives_are_noticed():
    def body(comm):
        comm.barrier() if comm.rank else comm.broadcast(np.zeros(1))

    with pytest.raises(UserError, match=r"rank 0: broadcast; ranks 1, 2: sum_int"):
        simulate(3, body)


def test_a_problem_is_printed_where_the_others_do_not_come(capfd):
    late = threading.Event()

    def body(comm):
        if comm.rank == 1:
            late.wait(10)
        comm.agree("rank 0 has no data" if comm.rank == 0 else None)

    threading.Timer(1.3, late.set).start()
    with pytest.raises(UserError, match="rank 0 has no data"):
        simulate(2, body)
    assert "parallel_sgd: rank 0 has no data (on rank 0, which now waits" in capfd.readouterr().err


def test_no_threads_are_left_behind():
    before = set(threading.enumerate())
    for _ in range(3):
        simulate(4, lambda comm: comm.barrier())
    with pytest.raises(ZeroDivisionError):
        simulate(4, lambda comm: 1 // 0)
    assert before.issuperset(threading.enumerate())


def test_objects_are_not_shared_between_ranks():
    def body(comm):
        items = comm.allgather_object([comm.rank])
        items[0].append("mine")
        comm.barrier()
        return items

    assert simulate(2, body) == [[[0, "mine"], [1]]] * 2
