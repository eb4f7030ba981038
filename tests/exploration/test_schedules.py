"""The tester tested: seeded orders repeat, and show faults of order, of failures and of files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explored_training import training

import parallel_sgd as psgd
from parallel_sgd import runtime
from parallel_sgd.communication import Communicator
from parallel_sgd.testing import Outcome, ScheduleFailed, explore
from parallel_sgd.testing.exploration.faults import Planned
from parallel_sgd.testing.exploration.scheduler import Schedule
from parallel_sgd.testing.exploration.strategies import Deviations, Priorities, RandomOrder

RANKS = 3


def summed(comm: Communicator) -> int:
    """Returns 6 on each of three ranks, by a collective and by messages around a ring."""
    assert comm.size == RANKS
    total = int(comm.sum_integers(np.array([comm.rank + 1]))[0])
    received, arrived = np.zeros(1), list[bool]()
    messages = comm.messages()
    messages.receive(received, (comm.rank - 1) % comm.size, 0, lambda: arrived.append(True))
    messages.send(np.full(1, 1.0 + comm.rank), (comm.rank + 1) % comm.size, 0, lambda: None)
    with messages.watched("a number"):
        backoff = messages.backoff()
        while not arrived:
            if not messages.progress():
                backoff.pause()
    assert received[0] == 1 + (comm.rank - 1) % comm.size
    return total


def replies(comm: Communicator) -> None:
    """Ranks 0 and 1 wait for each other if rank 1 looks for a request before that has come."""
    messages, (request, reply) = comm.messages(), np.zeros((2, 1))
    came = list[str]()
    if comm.rank == 0:
        messages.send(np.ones(1), 1, 0, lambda: None)
        messages.receive(reply, 1, 1, lambda: came.append("reply"))
        with messages.watched("a reply"):
            while not came:
                messages.progress()
                messages.idle(1e-3)
    elif comm.rank == 1:
        messages.receive(request, 0, 0, lambda: came.append("request"))
        messages.progress()
        if came:
            messages.send(request, 0, 1, lambda: None)
            messages.progress()
    comm.barrier()


@pytest.mark.parametrize("order", ["mixed", "random", "priorities", "search"])
def test_a_program_without_faults_passes(order: str) -> None:
    def check(outcome: Outcome) -> None:
        assert outcome.results == [6] * RANKS and not outcome.failed and outcome.error is None

    done = explore(summed, ranks=RANKS, schedules=60, faults=0, order=order, seed=1, check=check)
    assert done.schedules == 60 and done.outcomes == {"finished": 60}
    assert done.distinct > 50


def recorded(seed: int) -> tuple[int, int, int]:
    """Digest, points and messages of two schedules."""
    facts = []
    for strategy in (RandomOrder, lambda random: Priorities(random, 300)):
        from random import Random

        schedule = Schedule(strategy(Random(seed)), Planned())
        schedule.run(lambda: psgd.simulate(RANKS, summed))
        facts += [schedule.digest, schedule.points, schedule.messages]
    return tuple(facts)


def test_the_same_seed_gives_the_same_order() -> None:
    assert recorded(3) == recorded(3)
    assert recorded(3) != recorded(4)
    code = "import test_schedules; print(*test_schedules.recorded(3))"
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": folders, "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert tuple(map(int, ran.stdout.split())) == recorded(3)


@pytest.mark.parametrize("order", ["random", "priorities", "search"])
def test_a_deadlock_of_one_order_is_found_and_repeated(order: str) -> None:
    explore(replies, ranks=2, schedules=1, faults=0, only="search:0")  # not in the plain order
    with pytest.raises(ScheduleFailed) as found:
        explore(replies, ranks=2, schedules=300, faults=0, order=order, seed=1, timeout_s=1.0)
    text, name = str(found.value), found.value.schedule
    assert f"repeat it by only={name!r}" in text
    assert "rank 1 waits in allgather_object" in text or "rank 0 waits in a reply" in text
    with pytest.raises(ScheduleFailed) as again:
        explore(replies, ranks=2, faults=0, only=name, timeout_s=1.0)
    assert str(again.value) == text


def test_locks_taken_in_two_orders() -> None:
    """All wait without an end: told with what each waits for, and where."""
    locks = runtime.Lock(), runtime.Lock()

    def program(comm: Communicator) -> None:
        first, second = locks if comm.rank else locks[::-1]
        with first, second:
            pass

    with pytest.raises(ScheduleFailed, match="all threads wait for each other") as found:
        explore(program, ranks=2, schedules=200, faults=0, seed=1)
    lines = str(found.value).splitlines()
    for rank in (0, 1):
        assert any(
            line.startswith(f"  rank {rank} waits (lock) in program (test_schedules.py:")
            for line in lines
        )
    before = threading.active_count()
    with pytest.raises(ScheduleFailed):
        explore(program, ranks=2, faults=0, only=found.value.schedule)
    assert threading.active_count() == before, "threads of an ended schedule are left"


def test_a_lost_update() -> None:
    counts = {"all": 0}

    def program(comm: Communicator) -> None:
        if comm.rank == 0:
            counts["all"] = 0
        comm.barrier()
        seen = counts["all"]
        runtime.sched_yield()
        counts["all"] = seen + 1
        comm.barrier()
        assert counts["all"] == comm.size

    with pytest.raises(ScheduleFailed, match="AssertionError"):
        explore(program, ranks=2, schedules=50, faults=0, seed=1)


def test_time_is_simulated() -> None:
    """Sleeps take no time, and end in their order."""
    woke = list[int]()

    def program(comm: Communicator) -> float:
        begin = runtime.monotonic()
        runtime.sleep(1000.0 * (comm.size - comm.rank))
        woke.append(comm.rank)
        return runtime.monotonic() - begin

    def check(outcome: Outcome) -> None:
        assert woke == [2, 1, 0], woke
        woke.clear()
        assert [round(seconds) for seconds in outcome.results] == [3000, 2000, 1000]

    explore(program, ranks=3, schedules=20, faults=0, check=check)


def test_a_failed_rank_is_seen_by_nobody() -> None:
    """Nothing that its end unwinds reaches another rank; the rest hear of it, or have finished."""
    said = list[str]()

    def program(comm: Communicator) -> str:
        messages = comm.messages()
        try:
            comm.barrier()
            comm.barrier()
        except psgd.RanksLost:
            return "heard"
        finally:
            if sys.exc_info()[0] is runtime.SimulatedFailure:
                said.append("unwinds")
                messages.send(np.ones(1), (comm.rank + 1) % comm.size, 0, lambda: None)
                said.append("sent")
        return "finished"

    def check(outcome: Outcome) -> None:
        assert outcome.error is None
        for rank, result in enumerate(outcome.results):
            assert (result is None) == (rank in outcome.failed)

    done = explore(program, ranks=3, schedules=200, faults=2, seed=1, check=check)
    assert done.failures > 150 and "unwinds" in said and "sent" not in said


def test_spares_join_and_fail() -> None:
    sizes = set[int]()

    def check(outcome: Outcome) -> None:
        sizes.update(result[1] for result in outcome.results if result is not None)

    trained = training(psgd.DataParallelSGD())

    def program(comm: Communicator) -> Any:
        return trained(comm), comm.size

    explore(program, RANKS, 100, faults=2, spares=1, seed=1, check=check, may_fail=False)
    assert sizes >= {2, 3}  # one of two failed ranks is replaced


def test_files_fail(tmp_path: Path) -> None:
    """As on a full or a broken disk; a rank may fail at a change of a file."""
    seen = set[str]()

    def program(comm: Communicator) -> str:
        path, done = tmp_path / f"{comm.rank}", "nothing"
        try:
            with path.open("wb") as file:
                done = "opened"
                file.write(b"12345678")
                file.flush()
                done = "written"
                os.fsync(file.fileno())
                done = "flushed"
            os.replace(path, tmp_path / f"{comm.rank}.done")
            done = "renamed"
        except OSError as error:
            seen.add(f"{os.strerror(error.errno or 0)} after {done}")
        return done

    def check(outcome: Outcome) -> None:
        for rank, done in enumerate(outcome.results):
            path = tmp_path / f"{rank}.done"
            assert path.exists() or done != "renamed"
            seen.update({f"{path.stat().st_size} bytes of failed rank"} if path.exists() else ())
            seen.update({str(done)})
        for path in tmp_path.iterdir():
            seen.update({f"{path.stat().st_size} bytes"})
            path.unlink()

    explore(program, 2, 300, faults=1, kinds="files", seed=1, check=check)
    assert seen >= {
        "No space left on device after nothing",
        "No space left on device after flushed",
        "Input/output error after written",
        "4 bytes",
        "8 bytes",
        "renamed",
        "None",
    }


def test_files_of_kernels_are_no_points(tmp_path: Path) -> None:
    """Another rank that compiles would wait for Numba's lock without an end."""
    from numba.core.compiler_lock import global_compiler_lock

    def program(comm: Communicator) -> None:
        with global_compiler_lock:
            (tmp_path / f"{comm.rank}.nbc").write_bytes(b"machine code")

    explore(program, 2, 20, faults=0, seed=1)


def test_notices() -> None:
    from parallel_sgd.communication import preemption_requested

    def program(comm: Communicator) -> bool:
        comm.barrier()
        return preemption_requested()

    noticed = set[bool]()

    def check(outcome: Outcome) -> None:
        noticed.update(outcome.results)

    explore(program, 2, 50, faults=1, kinds="notices", seed=1, check=check)
    assert noticed == {True, False}


def test_search_takes_few_orders_twice() -> None:
    done = explore(summed, RANKS, 400, faults=0, order="search", seed=1)
    assert done.schedules == 400 and done.distinct > 350


def test_an_endless_loop_ends() -> None:
    def program(comm: Communicator) -> None:
        while True:
            runtime.sched_yield()

    with pytest.raises(ScheduleFailed, match="no end after 500000 points"):
        explore(program, 1, 1, faults=0)


def test_errors_that_nobody_asks_for_are_faults() -> None:
    from parallel_sgd.communication import InBackground

    def program(comm: Communicator) -> None:
        def fails() -> None:
            raise ValueError("nobody hears this")

        InBackground("unheard", fails).wait()

    with pytest.raises(ScheduleFailed, match=r"no one has asked .*nobody hears this"):
        explore(program, 1, 1, faults=0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ranks": 0}, "ranks=0 must be"),
        ({"schedules": 0}, "schedules=0 must be"),
        ({"faults": -1}, "faults=-1 must be"),
        ({"kinds": "fires"}, "kinds='fires' must be"),
        ({"order": "alphabetical"}, "order='alphabetical' must be"),
        ({"only": "seed 5"}, "only='seed 5' must be the name of a schedule"),
        ({"program": 5}, "program must be"),
        ({"check": 5}, "check must be"),
        ({"timeout_s": -1}, "timeout_s=-1"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], text: str) -> None:
    with pytest.raises(psgd.UserError) as raised:
        explore(**({"program": summed} | given))
    assert text in str(raised.value)


def test_deviations_skip_the_next_tasks() -> None:
    """The plain order never leaves a thread that can go on."""
    plain = Deviations({})
    schedule = Schedule(plain, Planned())
    schedule.run(lambda: psgd.simulate(RANKS, summed))
    point, tasks = next((p, n) for p, n in plain.choices if n > 1 and p > 20)
    other = Schedule(Deviations({point: 1}), Planned())
    other.run(lambda: psgd.simulate(RANKS, summed))
    assert tasks > 1 and other.digest != schedule.digest


def test_the_page_shows_a_mistake_of_one_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "exploring.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    module = types.ModuleType("explored_page")
    sys.modules[module.__name__] = module  # where dataclasses look types up
    with pytest.raises(ScheduleFailed) as found:
        exec(code, vars(module))
    wait = "UserError: rank 1 waits in the mean of the models for more than timeout_s=10 s"
    assert wait in str(found.value) and wait in " ".join(page.split())
    program, name = vars(module)["program"], found.value.schedule
    with pytest.raises(ScheduleFailed, match="the mean of the models"):
        explore(program, ranks=2, faults=0, only=name)
