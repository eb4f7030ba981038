"""No wait for other ranks is endless, and a wait that ends in time is left in peace."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from parallel_sgd.communication import watchdog as watchdog_module
from parallel_sgd.communication.watchdog import Watchdog


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
    assert "test_a_long_wait_ends_the_job" in text, "the stacks of all threads are shown"
    assert last_resort[0] == (5.0, os._exit, (1,))


def test_no_thread_is_started_before_the_first_wait():
    before = threading.active_count()
    Watchdog(1.0, 0, lambda: None)
    assert threading.active_count() == before


@pytest.mark.parametrize(("abort", "code"), [("lambda: os._exit(7)", 7), ("lambda: None", 1)])
def test_the_process_ends(abort, code):
    """By the abort of the job, or where that does nothing, some seconds later by itself."""
    script = f"""
import os, threading, time
from parallel_sgd.communication import watchdog
class SoonerTimer(threading.Timer):
    def __init__(self, seconds, *rest, **named):
        super().__init__(seconds / 10, *rest, **named)
watchdog.threading.Timer = SoonerTimer
with watchdog.Watchdog(0.2, 1, {abort})("broadcast"):
    time.sleep(50)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == code
    assert "[rank 1] parallel_sgd: waited more than timeout_s=0.2 s" in done.stderr
    assert "in broadcast" in done.stderr
