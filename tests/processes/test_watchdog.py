"""No wait for other ranks is endless, and a wait that ends in time is left in peace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from limits import patience

from parallel_sgd.communication import Watchdog, kill_if_longer_than
from parallel_sgd.communication.liveness import watchdog as watchdog_module
from parallel_sgd.communication.liveness.finish import CollectiveCounter, FinishProtocol


@pytest.fixture
def last_resort(monkeypatch):
    """What would end this process, recorded instead."""
    started = []

    class Timer:
        def __init__(self, seconds, function, args):
            started.append((seconds, function, args))

        def start(self):
            pass

    monkeypatch.setattr(watchdog_module.threading, "Timer", Timer)
    return started


@pytest.mark.usefixtures("last_resort")
def test_short_waits_are_left_in_peace():
    """Also where there are so many that together they take longer."""
    aborted = []
    watched = Watchdog(0.5, 0, lambda: aborted.append(1))
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        with watched("allgather"):
            time.sleep(0.02)
    with pytest.raises(ValueError, match="mine"), watched("alltoall"):
        raise ValueError("mine")
    time.sleep(0.7)  # working, not waiting
    assert aborted == []


def test_a_long_wait_ends_the_job(last_resort, capfd):
    ended = threading.Event()
    watched = Watchdog(0.1, 3, ended.set)
    with watched("allgather"):
        pass
    with watched("alltoall"):
        assert ended.wait(10)
    text = capfd.readouterr().err
    assert "[rank 3] parallel_sgd: waited more than timeout_s=0.1 s" in text
    assert "in alltoall" in text
    assert "[rank 3] where it waits:\n[rank 3]   File " in text
    assert "in test_a_long_wait_ends_the_job\n" in text
    # only the thread that waits is shown
    assert "watchdog.py" not in text.replace("test_watchdog.py", "")
    assert all(line.startswith("[rank 3] ") for line in text.splitlines())
    assert last_resort == [(5.0, os._exit, (1,))]


def test_a_problem_is_told_where_others_do_not_come_soon(capfd):
    """They may not come at all before this rank is ended."""
    watched = Watchdog(60.0, 2, lambda: None)
    with watched("sum_integers", problem="the gradient is not finite"):
        until = time.monotonic() + 10
        said = ""
        while not said and time.monotonic() < until:
            time.sleep(0.05)
            said += capfd.readouterr().err
    assert said == (
        "[rank 2] parallel_sgd: the gradient is not finite; this rank now waits for the other "
        "ranks, to report it (in sum_integers)\n"
    )


@pytest.mark.usefixtures("last_resort")
@pytest.mark.parametrize("entered", [4, 5])
def test_a_rank_that_has_left_is_missed_where_it_is_needed(entered, last_resort, capfd):
    """In the fifth collective: not where it has entered that one before it left."""
    finish_protocol, ended = (
        FinishProtocol(SimpleNamespace(rank=1, size=3, iprobe=lambda tag: False)),
        [],
    )
    finish_protocol._finished[2] = {"0": entered, "0/1.0": 9}
    watched = Watchdog(60.0, 0, lambda: ended.append(1), finish_protocol)
    with watched("allgather", CollectiveCounter("0", (0, 1, 2), collective_counts=5)):
        time.sleep(2.5)
    text = capfd.readouterr().err
    if entered == 5:
        assert (ended, text) == ([], "")
    else:
        assert ended == [1]
        assert "[rank 0] parallel_sgd: this rank waits in allgather for rank 2, which has" in text
        assert "(test_watchdog.py:" in text


@pytest.mark.usefixtures("last_resort")
def test_each_thread_has_its_own_wait(capfd):
    """One that waits too long is not hidden by another that comes and goes."""
    ended = threading.Event()
    watched = Watchdog(0.3, 0, ended.set)

    def waits_for_long():
        with watched("alltoall"):
            ended.wait(10)

    thread = threading.Thread(target=waits_for_long)
    thread.start()
    until = time.monotonic() + 10
    while not ended.is_set() and time.monotonic() < until:
        with watched("allgather"), watched("broadcast"):
            time.sleep(0.01)
    thread.join()
    text = capfd.readouterr().err
    assert ended.is_set()
    assert "in alltoall:" in text
    assert "in waits_for_long\n" in text


def test_a_watchdog_costs_a_collective_almost_nothing():
    watched = Watchdog(60.0, 0, lambda: None)

    def seconds():
        started = time.perf_counter()
        for _ in range(1000):
            with watched("allgather"):
                pass
        return (time.perf_counter() - started) / 1000

    assert min(seconds() for _ in range(20)) < 5e-6, "0.5e-6 where nothing else runs"


def test_no_thread_is_started_before_the_first_wait():
    before = set(threading.enumerate())
    Watchdog(1.0, 0, lambda: None)
    assert before.issuperset(threading.enumerate())


def test_all_watchdogs_share_a_thread():
    """There is one for every world, of which a program may make many."""
    for number in range(5):
        with Watchdog(60.0 + number, 0, lambda: None)("allgather"):
            pass
    assert [thread.name for thread in threading.enumerate()].count("watchdog") == 1


def executed(script):
    command, most = [sys.executable, "-c", script], 60 * patience()
    return subprocess.run(command, capture_output=True, text=True, timeout=most)


@pytest.mark.parametrize(("abort", "code"), [("lambda: os._exit(7)", 7), ("lambda: None", 1)])
def test_the_process_ends(abort, code):
    """By the abort of the job, or where that does nothing, some seconds later by itself."""
    script = f"""
import os, threading, time
from parallel_sgd.communication.liveness import watchdog
class SoonerTimer(threading.Timer):
    def __init__(self, seconds, *rest, **named):
        super().__init__(seconds / 10, *rest, **named)
watchdog.threading.Timer = SoonerTimer
with watchdog.Watchdog(0.2, 1, {abort})("broadcast"):
    time.sleep(50)
"""
    done = executed(script)
    assert done.returncode == code
    assert "[rank 1] parallel_sgd: waited more than timeout_s=0.2 s" in done.stderr
    assert "in broadcast" in done.stderr


HOLDS_THE_LOCK = "import ctypes; ctypes.PyDLL(None).sleep({})  # Python's lock is held meanwhile"


@pytest.mark.parametrize(("seconds", "code"), [(0, 0), (30, -signal.SIGKILL)])
def test_a_wait_that_holds_pythons_lock_ends_too(seconds, code):
    script = f"""
from parallel_sgd.communication.liveness.finish import CollectiveCounter, FinishProtocol
from parallel_sgd.communication import kill_if_longer_than
with kill_if_longer_than(1.0, 2, "Communicator.world()"):
    {HOLDS_THE_LOCK.format(seconds)}
"""
    started = time.monotonic()
    done = executed(script)
    assert time.monotonic() - started < 20 * patience()
    assert done.returncode == code
    if code:
        assert done.stderr.startswith("[rank 2] parallel_sgd: waited more than timeout_s=1 s")
        assert "in Communicator.world():" in done.stderr
    else:
        assert done.stderr == ""


def test_an_error_in_a_guarded_wait_passes_and_leaves_no_process():
    with pytest.raises(ValueError, match="mine"), kill_if_longer_than(0.5, 0, "nothing"):
        raise ValueError("mine")
    time.sleep(1.0)
