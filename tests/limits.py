"""How long tests may take: a test that takes longer fails by its name, and the run goes on.

A pytest plugin. What a test waits for has limits of its own, which are shorter: a job that it has
started, other ranks, other threads. Where threads or ranks hang nevertheless, all stacks are
printed; then

    without MPI   the test fails. If it cannot be interrupted for another `GRACE_S`, the run ends.
    with it       the whole world ends, since the ranks cannot go on together; each names its test.

pytest's faulthandler_timeout ends what does not even let other threads of Python run.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import pytest

from parallel_sgd.communication import launched_rank

MOST = 8.0  #: times as long things may take on a busy machine
GRACE_S = 20.0  #: how long a test may take to notice that its time is over
OTHERS_S = 3.0  #: how long a rank waits until others have said the same

REAL_STDERR = pytest.StashKey[TextIO]()


def patience() -> float:
    """How many times as long as on an idle machine things may take now.

    As many as processes want each core (the load average), or PARALLEL_SGD_TEST_PATIENCE.
    """
    given = os.environ.get("PARALLEL_SGD_TEST_PATIENCE")
    if given:
        return float(given)
    return times_as_long(os.getloadavg()[0], len(os.sched_getaffinity(0)))


def times_as_long(load: float, cores: int) -> float:
    """The same for a load average and a number of cores."""
    return min(MOST, max(1.0, load / cores))


class OutOfTime(pytest.fail.Exception):
    """A test has run longer than it may."""


@contextmanager
def limited(name: str, limit_s: float, stderr: TextIO, *, world: bool) -> Iterator[None]:
    """Let the body run no longer than `limit_s`, times `patience`.

    Args:
        name: of the test.
        stderr: where a message is seen whatever pytest captures.
        world: whether other ranks wait for this one.
    """
    over, began = threading.Event(), time.monotonic()

    def interrupt(number: int, frame: object) -> None:
        if not over.is_set():
            raise OutOfTime(f"ran longer than {limit_s:g} s, times {patience():.1f}")

    def watch() -> None:
        while (left := limit_s * patience() - (time.monotonic() - began)) > 0:
            if over.wait(left):
                return
        rank = launched_rank()
        where = "" if rank is None else f"[rank {rank}] "
        print(f"\n{where}{name} has run longer than {limit_s:g} s", file=stderr, flush=True)
        faulthandler.dump_traceback(stderr)
        if not world:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        if not over.wait(OTHERS_S if world else GRACE_S) or world:
            print(f"{where}{name} ends the run", file=stderr, flush=True)
            os._exit(1)

    before = signal.signal(signal.SIGALRM, interrupt)
    watcher = threading.Thread(target=watch, daemon=True, name="limit of a test")
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGALRM, before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("limit_s", "longest time of a test on an idle machine, in seconds", default="300")


def pytest_configure(config: pytest.Config) -> None:
    copied = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)  # nothing is captured yet
    config.stash[REAL_STDERR] = open(copied, "w")  # noqa: SIM115


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[REAL_STDERR].close()


def phase(item: pytest.Item) -> Any:
    return limited(
        item.nodeid,
        float(item.config.getini("limit_s")),
        item.config.stash[REAL_STDERR],
        world=any(item.config.getoption(name, False) for name in ("with_mpi", "with_torch")),
    )


# Each by itself, since what is raised within them is a result of the test.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with phase(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with phase(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with phase(item):
        return (yield)
