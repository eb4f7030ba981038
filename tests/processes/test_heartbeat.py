"""What a board shows of ranks that do not move, and who is killed for that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_sgd.communication import (
    FOLDER,
    Heartbeat,
    HeartbeatTable,
    RankState,
    Status,
    make_heartbeat_table,
)
from parallel_sgd.communication.elastic.eviction import evict_unresponsive_ranks, unresponsive
from parallel_sgd.communication.liveness.heartbeat import HEARTBEAT_BYTES, _birth
from parallel_sgd.launcher import Ending, Outcome, Supervisor, Waits, judge

RANKS = 7


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(RANKS)]
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def heartbeat_table(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> HeartbeatTable:
    """Ranks that wait, compute, hold Python's lock, are stopped; one has moved, one is gone, and
    one stands by."""
    made, now = make_heartbeat_table(tmp_path / "board", RANKS + 1), time.monotonic()
    for rank, process in enumerate(processes):
        line = Heartbeat(rank, process.pid, _birth(process.pid), now, now - 9, 0.0, 60.0, "")
        made.write(line)
    made.write(vary(made, 0, waits_since=now - 8, name="alltoall"))
    made.write(vary(made, 2, written=now - 7))
    processes[3].send_signal(signal.SIGSTOP)
    made.write(vary(made, 3, written=now - 6))
    made.write(vary(made, 4, moved=now - 1))
    processes[5].kill()
    processes[5].wait()
    made.write(vary(made, 6, name="the training ranks"))
    return made


def vary(heartbeat_table: HeartbeatTable, rank: int, **changed: object) -> Heartbeat:
    (line,) = (line for line in heartbeat_table.heartbeats() if line.rank == rank)
    return Heartbeat(**{**vars(line), **changed})  # type: ignore[arg-type]


def test_who_does_not_move(
    heartbeat_table: HeartbeatTable, processes: list[subprocess.Popen[bytes]]
) -> None:
    found = unresponsive(heartbeat_table, 5.0)
    assert {one.rank: (one.state, round(one.seconds)) for one in found} == {
        0: (RankState.WAITS, 8),
        1: (RankState.COMPUTES, 9),
        2: (RankState.SILENT, 7),
        3: (RankState.STOPPED, 6),
        6: (RankState.STANDS_BY, 9),
    }
    said = [line.in_words(time.monotonic()) for line in heartbeat_table.heartbeats()]
    assert said[0] == f"rank 0 (pid {processes[0].pid}) waits in alltoall, for 8 s"
    assert said[3].endswith("is stopped, by a signal or a debugger, for 6 s")
    assert said[5] == f"rank 5 (pid {processes[5].pid}) has exited"
    assert said[6].endswith("stands by for the training ranks, for 9 s")


@pytest.mark.parametrize("one_waits", [True, False])
def test_who_is_killed(
    heartbeat_table: HeartbeatTable, processes: list[subprocess.Popen[bytes]], one_waits: bool
) -> None:
    """Who computes only where another waits for it; never who stands by."""
    if not one_waits:
        heartbeat_table.write(vary(heartbeat_table, 0, waits_since=0.0, moved=time.monotonic()))
    killed = [1, 2, 3] if one_waits else [2, 3]
    assert evict_unresponsive_ranks(heartbeat_table, 5.0) == killed
    assert all(processes[rank].wait(5) == -signal.SIGKILL for rank in killed)
    assert all(processes[rank].poll() is None for rank in (0, 4, 6))


def test_a_process_with_a_number_that_has_gone_round_is_left_in_peace(
    heartbeat_table: HeartbeatTable, processes: list[subprocess.Popen[bytes]]
) -> None:
    heartbeat_table.write(vary(heartbeat_table, 1, birth=1))
    assert 1 not in evict_unresponsive_ranks(heartbeat_table, 5.0)
    assert processes[1].poll() is None


WRITER = """
import sys
from pathlib import Path
from parallel_sgd.communication import Heartbeat, make_heartbeat_table
table = make_heartbeat_table(Path(sys.argv[1]), 2)
for number in range(1, 100_000):
    table.write(Heartbeat(1, number, number, number, number, number, number, ""))
"""


def test_a_line_is_read_as_a_whole_while_it_is_written(tmp_path: Path) -> None:
    """Else a rank in the midst of writing looks like one that has been silent for ever."""
    heartbeat_table = make_heartbeat_table(tmp_path / "board", 2)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "board")])
    seen = set()
    while writer.poll() is None:
        seen |= {
            (line.process, line.birth, line.written, line.timeout_s)
            for line in heartbeat_table.heartbeats()
        }
    assert writer.returncode == 0 and len(seen) > 10
    assert all(len({*line}) == 1 for line in seen)


def test_a_line_of_which_half_is_written_is_the_one_before(tmp_path: Path) -> None:
    """Wherever its rank has been stopped in the midst of writing, and in whatever order its core
    writes the bytes."""
    heartbeat_table = make_heartbeat_table(tmp_path / "board", 1)
    lines = [Heartbeat(0, n, n, n, n, n, n, f"wait {n}") for n in range(1, 4)]
    assert heartbeat_table.heartbeats() == []
    before, known = bytes(HEARTBEAT_BYTES), []
    for line in lines:
        heartbeat_table.write(line)
        after = heartbeat_table._memory[:]
        assert heartbeat_table.heartbeats() == [line]
        for cut in range(1, HEARTBEAT_BYTES):
            for torn in (after[:cut] + before[cut:], before[:cut] + after[cut:]):
                heartbeat_table._memory[:] = torn
                assert heartbeat_table.heartbeats() in (known, [line])
        heartbeat_table._memory[:] = before = after
        known = [line]


def test_there_is_room_for_the_whole_board_once_it_is_made(tmp_path: Path) -> None:
    """Else a full disk would be found out by a signal, when it is written to."""
    make_heartbeat_table(tmp_path / "board", 1000)
    assert (tmp_path / "board").stat().st_blocks * 512 >= 1000 * HEARTBEAT_BYTES


def test_the_launcher_ends_a_job_whose_ranks_have_all_been_stopped(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    """And kills what is left of it."""
    waits = Waits(poll_s=0.05, kill_s=0.1)  # the pipes are held here
    with Supervisor(3, waits=waits) as supervisor:
        heartbeat_table = make_heartbeat_table(Path(supervisor.environ[FOLDER], "board"), 3)
        for rank in range(2):
            pid, now = processes[rank].pid, time.monotonic()
            heartbeat_table.write(Heartbeat(rank, pid, _birth(pid), now, now, 0.0, 0.1, ""))
            pipe = os.open(
                Path(supervisor.environ[FOLDER], f"{rank}.{Status.PROCESS}"), os.O_WRONLY
            )
            os.write(pipe, json.dumps([0, Status.PROCESS, str(pid)]).encode() + b"\n")
        gone = subprocess.Popen(["true"])  # one that has died, and whom the others survive
        line = Heartbeat(2, gone.pid, _birth(gone.pid), now, now, 0.0, 0.1, "")
        gone.wait()
        heartbeat_table.write(line)
        os.close(os.open(Path(supervisor.environ[FOLDER], f"2.{Status.PROCESS}"), os.O_WRONLY))
        processes[0].send_signal(signal.SIGSTOP)
        for _ in range(5):
            time.sleep(0.06)
            assert supervisor.reason_to_end() is None
        processes[1].send_signal(signal.SIGSTOP)
        until, said = time.monotonic() + 10, None
        while said is None and time.monotonic() < until:
            said = supervisor.reason_to_end()
        assert said == "all ranks have been stopped, for more than timeout_s=0.1 s"
        assert judge(supervisor.job_status(1), survive=False) == Outcome(Ending.LOST, said)
        assert supervisor.silent_exit_line() is None
    assert processes[0].wait(5) == processes[1].wait(5) == -signal.SIGKILL
