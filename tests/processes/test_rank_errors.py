"""The launcher prints errors of ranks: once what several say, and none is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_sgd.communication import in_brief
from parallel_sgd.launcher import Supervisor, parse, rank_reports
from parallel_sgd.launcher.restarts import _has_output_files

RANKS = 3

#: A rank that fails, and is killed before it can do anything else.
FAILS = """
import os, signal, sys
from parallel_sgd.communication import report_start
from parallel_sgd.communication.liveness.abort import report
from parallel_sgd.errors import SharedError, UserError
report_start()
kind, text = sys.argv[1:]
report((SharedError if kind == "shared" else UserError)(text))
os.kill(os.getpid(), signal.SIGKILL)
"""


def fails(supervisor: Supervisor, rank: int, text: str, kind: str = "own", **environ: str) -> str:
    """What a rank prints by itself of an error."""
    variables = {"PMI_SIZE": str(RANKS), "PMI_RANK": str(rank), **environ}
    command = [sys.executable, "-c", FAILS, kind, text]
    environment = {**os.environ, **supervisor.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stderr


def test_an_error_of_all_ranks_is_printed_once_when_the_last_one_has_come(capsys):
    with Supervisor(RANKS, prints=True) as supervisor:
        for rank in (2, 0, 1):
            supervisor.check()
            assert capsys.readouterr().err == ""
            assert fails(supervisor, rank, "no data\nin 'x.npz'", "shared") == ""
        supervisor.check()
        said = capsys.readouterr().err
        lines = ["parallel-sgd: error: no data", "in 'x.npz'"]
        assert said.splitlines() == [f"[ranks 0 to 2] {line}" for line in lines]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("kind", "limit"), [("own", "_QUIET_S"), ("shared", "_SHARED_QUIET_S")])
def test_no_rank_waits_for_others_and_late_ones_are_named_too(capsys, kind, limit):
    with Supervisor(RANKS, prints=True) as supervisor:
        fails(supervisor, 1, "no data", kind)
        supervisor.check()
        assert capsys.readouterr().err == ""
        time.sleep(getattr(rank_reports, limit) + 0.01)
        supervisor.check()
        assert capsys.readouterr().err == "[rank 1] parallel-sgd: error: no data\n"
        fails(supervisor, 2, "no data", kind)
        fails(supervisor, 0, "another one", kind)
    rest = "[rank 2] parallel-sgd: error: no data\n[rank 0] parallel-sgd: error: another one\n"
    assert capsys.readouterr().err == rest


@pytest.mark.parametrize(
    ("text", "prints", "environ"),
    [("long" * 2000, True, {}), ("no data", False, {}), ("no data", True, {"PMI_RANK": "7"})],
    ids=["too long", "a log of its own", "no pipe"],
)
def test_a_rank_prints_itself_what_the_launcher_does_not(capsys, text, prints, environ):
    with Supervisor(RANKS, prints=prints) as supervisor:
        rank = environ.get("PMI_RANK", "1")
        assert (
            fails(supervisor, 1, text, **environ) == f"[rank {rank}] parallel-sgd: error: {text}\n"
        )
    assert capsys.readouterr().err == ""


def test_a_rank_prints_itself_where_the_launcher_is_gone(tmp_path: Path) -> None:
    with Supervisor(RANKS, prints=True) as supervisor:
        supervisor._close_pipes()  # as the kernel does
        assert fails(supervisor, 1, "no data") == "[rank 1] parallel-sgd: error: no data\n"


ENDED_AS_IT_TELLS = """
import os, signal
from parallel_sgd.communication import report_start
from parallel_sgd.communication.liveness import abort
from parallel_sgd.errors import PeerFailure
report_start()
abort.user_location = lambda stack: os.kill(os.getpid(), signal.SIGKILL)
abort.report(PeerFailure("rank 1 has failed"))
"""


def test_a_rank_that_is_ended_before_it_has_told_an_error_has_told_nothing():
    """As by torchrun, once another rank has failed: else no line would name a rank."""
    with Supervisor(1, prints=True) as supervisor:
        variables = {**os.environ, **supervisor.environ, "PMI_SIZE": "1", "PMI_RANK": "0"}
        done = subprocess.run([sys.executable, "-c", ENDED_AS_IT_TELLS], env=variables)
        assert done.returncode == -signal.SIGKILL
        said = supervisor.silent_exit_line()
        assert said is not None and said.startswith("rank 0 (pid ")


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ([], False),
        (["--log-dir", "logs"], True),
        (["--mpiexec-options=--output dir=logs"], True),
        (["--mpiexec-options=-errfile-pattern err.%r"], True),
    ],
)
def test_errors_belong_to_the_files_of_ranks_where_there_are_any(options, apart):
    assert _has_output_files(parse(["-n", "2", *options, "train.py"])) == apart


def test_ranks_in_brief():
    assert [in_brief(ranks) for ranks in ([3], [0, 1], [0, 1, 2], [0, 2, 3, 4, 7, 9, 10])] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 0 to 2",
        "ranks 0, 2 to 4, 7, 9, 10",
    ]
