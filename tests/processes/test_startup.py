"""What the launcher makes of a death before the ranks of `--survive` have made their learner."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_sgd.communication import FOLDER, SURVIVE, Status
from parallel_sgd.launcher.cleanup import ranks_running
from parallel_sgd.launcher.rank_reports import RankReports
from parallel_sgd.launcher.startup import StartupMonitor

NOW = 1e9  #: when ranks that are gone were still there

RANKS, TRAINING = 3, 2  #: the last one is in reserve


@pytest.fixture
def start(tmp_path: Path) -> StartupMonitor:
    return StartupMonitor(RankReports(tmp_path), RANKS, TRAINING, local=True)


def tell(folder: Path, suffix: str, *ranks: int) -> None:
    for rank in ranks:
        (folder / f"{rank}.{suffix}").touch()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Those of the ranks of this folder's job; and one of another's, of the same number as one that
    is missing here."""
    folders = [(0, tmp_path), (1, tmp_path), (2, tmp_path / "another")]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            env={**os.environ, FOLDER: str(folder), "PMI_SIZE": "3", "PMI_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, folder in folders
    ]
    for process in started:
        process.stdout.readline()
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("gone", [{1: "pid 17", 0: "pid 16"}, {2: "pid 18"}])
def test_a_death_before_there_is_a_learner_is_in_vain(start, tmp_path, gone):
    """Also that of a rank in reserve: MPI_Init waits for it."""
    tell(tmp_path, Status.STARTED, 0, 1)
    tell(tmp_path, Status.TRAINS, 2)  # in reserve
    start.record_exits(gone, {}, NOW)
    rank, process = next(iter(gone.items()))
    assert start.failure.startswith(f"rank {rank} ({process}) ended without a report")
    tell(tmp_path, Status.TRAINS, 1)
    start.record_exits({0: "pid 16"}, {}, NOW)
    assert f"rank {rank} " in start.failure


@pytest.mark.parametrize(
    ("rank", "word", "seconds_ago", "is_lost"),
    [
        (1, Status.FINISHED, 0, False),
        (0, Status.FAILED, 0, False),
        (0, Status.LOST, 0, True),  # it has heard of the death
        (0, Status.LOST, 9, False),  # it has waited in vain, and ended the others
    ],
)
def test_who_says_why_is_no_loss_and_what_follows_from_it_none(
    start, tmp_path, rank, word, seconds_ago, is_lost
):
    tell(tmp_path, Status.STARTED, 0, 1, 2)
    tell(tmp_path, word, rank)
    os.utime(tmp_path / f"{rank}.{word}", (NOW - seconds_ago, NOW - seconds_ago))
    start.record_exits({1: "pid 17"}, {rank: word}, NOW)
    assert (start.failure is not None) == is_lost


@pytest.mark.parametrize("signed_on", [(0, 1, 2), (1,)], ids=["all", "those of this host"])
def test_a_death_after_that_is_survived(start, tmp_path, signed_on):
    """Also where others are about to say that they have it."""
    tell(tmp_path, Status.STARTED, *signed_on)
    tell(tmp_path, Status.TRAINS, 1)
    start.record_exits({1: "pid 17"}, {}, NOW)
    assert start.failure is None and start.has_started


def test_a_rank_that_never_signs_on_is_missed_when_it_has_no_process(start, tmp_path, processes):
    assert ranks_running(tmp_path) == {0, 1}
    for now in (0.0, 9.0):
        start.check(now, {})  # none has signed on: mpiexec may not have started any
    tell(tmp_path, Status.STARTED, 0)
    for now, lost in ((10.0, False), (11.0, False), (14.0, False), (15.0, True)):
        start.check(now, {})
        assert (start.failure is not None) == lost
    assert start.failure.startswith("rank 2 ended")


def test_a_rank_that_dies_on_another_host_is_told_of(start, tmp_path):
    tell(tmp_path, Status.STARTED, 0, 1)
    tell(tmp_path, Status.EXITED, 1)
    start.check(0.0, {1: Status.FINISHED})
    assert start.failure is None
    start.check(1.0, {})
    assert start.failure.startswith("rank 1 (on another host) ended")


#: A rank that finds no launcher on its host.
ELSEWHERE = """
import sys
from parallel_sgd.communication import Status, report_start, report_status
report_start()
if sys.argv[1] == "trains":
    report_status(Status.TRAINS)
print(flush=True)
input()
"""


@pytest.mark.parametrize("when", ["before", "trains"])
def test_a_rank_elsewhere_is_mourned_until_it_trains(tmp_path, when):
    variables = {FOLDER: str(tmp_path), SURVIVE: "1", "PMI_SIZE": "3", "PMI_RANK": "1"}
    rank = subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, when],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    rank.stdout.readline()
    assert not (tmp_path / f"1.{Status.EXITED}").exists()
    rank.kill()
    _, errors = rank.communicate()  # at their end nobody is left who mourns
    assert (tmp_path / f"1.{Status.EXITED}").exists() == (when == "before")
    assert errors == ""


def test_a_rank_that_takes_long_to_sign_on_is_waited_for(start, tmp_path, processes):
    tell(tmp_path, Status.STARTED, 0, 2)
    for now in range(100, 200):
        start.check(float(now), {})
    assert start.failure is None
