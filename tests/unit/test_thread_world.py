"""How a world of threads ends when something goes wrong in it: at once, and with the cause."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest
from limits import patience

from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.communication import InBackground
from parallel_sgd.communication.threads import communicator


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


@pytest.fixture
def interruptible():
    """Let SIGINT interrupt: a shell makes a job in its background, and these tests, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_main():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def meets(comm, working):
    working.wait(10 * patience())
    while True:
        comm.barrier()


def computes(comm, working):
    working.wait(10 * patience())
    while True:
        pass


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("body", "size"), [(meets, 3), (computes, 2), (meets, 1)])
def test_an_interrupt_ends_all_ranks(body, size, monkeypatch):
    monkeypatch.setattr(communicator, "PYTHON_S", communicator.PYTHON_S * patience())
    before, working = set(threading.enumerate()), threading.Barrier(size + 1)
    interrupt = threading.Thread(target=lambda: (working.wait(10 * patience()), interrupt_main()))
    interrupt.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        simulate(size, lambda comm: body(comm, working))
    interrupt.join()
    assert before.issuperset(threading.enumerate())
    assert time.monotonic() - began < 5 * patience()


@pytest.mark.usefixtures("interruptible")
def test_a_rank_that_cannot_be_interrupted_is_named(monkeypatch, capsys):
    monkeypatch.setattr(communicator, "COLLECTIVE_S", 0.05 * patience())
    monkeypatch.setattr(communicator, "PYTHON_S", 0.2 * patience())
    over, working = threading.Event(), threading.Barrier(3)

    def body(comm):
        working.wait(10 * patience())
        if comm.rank == 1:
            over.wait(60)  # a lock, which Python's threads wait for without a look around

    threading.Thread(
        target=lambda: (working.wait(10 * patience()), time.sleep(0.1), interrupt_main())
    ).start()
    with pytest.raises(KeyboardInterrupt):
        simulate(2, body)
    over.set()
    assert "parallel_sgd: rank 1 cannot be interrupted" in capsys.readouterr().err


def test_the_rank_of_an_exception_is_named():
    def body(comm):
        if comm.rank == 2:
            [][5]
        comm.barrier()

    with pytest.raises(IndexError) as caught:
        simulate(4, body)
    assert caught.value.__notes__ == ["raised on rank 2 of 4"]


def test_a_notebook_shows_the_users_own_lines_and_the_error():
    def caused(comm):
        try:
            comm.rank // 0
        except ZeroDivisionError as error:
            raise UserError("callback failed") from error

    with pytest.raises(UserError) as caught:
        simulate(2, caused)
    *frames, line = caught.value._render_traceback_()
    assert line == "UserError: callback failed"
    assert [frame.partition(", ")[2] for frame in frames] == ["in caused: comm.rank // 0"]
    with pytest.raises(UserError) as caught:
        simulate(0, caused)
    (frame, line) = caught.value._render_traceback_()
    assert frame.endswith("the_error: simulate(0, caused)")
    assert line == "UserError: size=0 must be a whole number from 1 to 32768"
