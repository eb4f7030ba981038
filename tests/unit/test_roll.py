"""Which rank is gone first: named where that is certain, and only there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_sgd.command_line.roll import Roll
from parallel_sgd.communication.attendance import END, FAILED, LEFT, PROCESS
from parallel_sgd.communication.launched import FOLDER

RANKS = 4

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"),
    reason="no process descriptors, which only Linux has: then no rank is named",
)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """One for each rank; what they do is wait."""
    wait = [sys.executable, "-Sc", "import signal; signal.pause()"]
    jobs = [subprocess.Popen(wait) for _ in range(RANKS)]
    yield jobs
    for job in jobs:
        job.kill()
        job.wait()


def note(roll: Roll, rank: int, suffix: str, text: object) -> None:
    Path(roll.environ[FOLDER], f"{rank}.{suffix}").write_text(f"{text}\n")


def sign_on(roll: Roll, processes: list[subprocess.Popen[bytes]]) -> None:
    for rank, process in enumerate(processes):
        note(roll, rank, PROCESS, process.pid)


def kill(processes: list[subprocess.Popen[bytes]], *ranks: int) -> None:
    for rank in ranks:
        processes[rank].send_signal(signal.SIGKILL)
        processes[rank].wait()


def test_the_first_one_that_is_gone_is_named(processes):
    with Roll(RANKS) as roll:
        sign_on(roll, processes)
        roll.look()
        kill(processes, 2, 0, 1, 3)
        said = roll.gone_without_a_word()
    assert said is not None and said.startswith(f"rank 2 (pid {processes[2].pid}) was gone first")


def test_one_that_was_gone_before_the_first_look_is_named(processes):
    with Roll(RANKS) as roll:
        sign_on(roll, processes)
        kill(processes, 2)
        roll.look()
        kill(processes, 0)
        said = roll.gone_without_a_word()
    assert said is not None and said.startswith("rank 2 (pid")


@pytest.mark.parametrize("why", [LEFT, FAILED])
def test_who_has_signed_off_is_not_named(processes, why):
    with Roll(RANKS) as roll:
        sign_on(roll, processes)
        for rank in range(RANKS):
            note(roll, rank, END, why)
        kill(processes, 1)
        assert roll.gone_without_a_word() is None


@pytest.mark.parametrize("number", ["ENOSYS", "EPERM", "EMFILE", None])
@pytest.mark.parametrize("watched", range(RANKS))
def test_nobody_is_named_where_processes_cannot_be_watched(processes, monkeypatch, number, watched):
    """All of them, or those after some: of the others it is not known when they are gone."""
    there, calls = os.pidfd_open, []

    def pidfd_open(pid):
        calls.append(pid)
        if len(calls) > watched:
            raise OSError(getattr(errno, number), "not to be had")
        return there(pid)

    if number is None:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    with Roll(RANKS) as roll:
        sign_on(roll, processes)
        roll.look()
        kill(processes, 2)
        roll.look()
        assert roll.gone_without_a_word() is None


def test_files_are_read_until_all_have_signed_on(processes, monkeypatch):
    there, read = Path.read_text, []

    def read_text(path, *arguments):
        read.append(path.name)
        return there(path, *arguments)

    monkeypatch.setattr(Path, "read_text", read_text)
    with Roll(RANKS) as roll:
        sign_on(roll, processes[:2])
        Path(roll.environ[FOLDER], f"2.{PROCESS}").write_text("12")  # as it is being written
        for _ in range(3):
            roll.look()
        assert sorted(name for name in read if name[0] in "01") == ["0.process", "1.process"]
        sign_on(roll, processes)
        roll.look()
        monkeypatch.setattr(Path, "glob", None)  # nobody is looked for any more
        for _ in range(3):
            roll.look()
        assert [read.count(f"{rank}.process") for rank in range(RANKS)] == [1, 1, 4, 1]
        monkeypatch.undo()
