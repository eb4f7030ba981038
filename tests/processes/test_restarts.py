"""The launcher starts a failed job again. The mpiexec of these tests is a script."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from limits import patience
from test_launcher import MPICH, OPEN_MPI

from parallel_sgd.communication import Status
from parallel_sgd.communication import job_environment as launched
from parallel_sgd.launcher import (
    Hosts,
    Launch,
    Request,
    Restarts,
    job_variables,
    plan,
    read_hostfile,
)

RANKS = 3


#: Stands for mpiexec and its ranks: each start does what is next in a list.
MPIEXEC = """
import json, os, signal, sys, time
from pathlib import Path

number = int(os.environ.get("PARALLEL_SGD_RESTART", 0))
play = json.loads(Path("play.json").read_text())
with open("starts", "a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ["PARALLEL_SGD_JOB"], number]) + "\\n")
starts = len(Path("starts").read_text().splitlines())
step = play[min(starts, len(play)) - 1]
if step.get("reads"):
    Path("read").write_text(sys.stdin.read())
if "gone" in step:  # without a word
    process = Path(os.environ["PARALLEL_SGD_FOLDER"], f"{step['gone']}.process")
    os.write(os.open(process, os.O_WRONLY), b'[0, "process", "9999999"]\\n')
for name, text in step.get("files", {}).items():
    Path(os.environ["PARALLEL_SGD_FOLDER"], name).write_text(text)
time.sleep(step.get("seconds", 0))
if "signal" in step:
    if step["signal"] != signal.SIGKILL:
        signal.signal(step["signal"], signal.SIG_DFL)  # as it is for a program that is not Python's
    os.kill(os.getpid(), step["signal"])
sys.exit(step.get("code", 0))
"""


def words(*said: str) -> dict[str, str]:
    """The files in which ranks say why they end."""
    return {f"{rank}.{word}": "" for rank, word in enumerate(said)}


KILLED = {"code": 137}


WELL = {"files": words(Status.FINISHED, Status.FINISHED, Status.FINISHED)}


def saved(name: str) -> dict[str, Any]:
    return {"code": 137, "files": {"0.checkpoint": f"/somewhere/{name}\n"}}


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[Any]]]:
    """Runs a job of such starts; the exit code, and what each start was given."""
    monkeypatch.chdir(tmp_path)
    Path("mpiexec.py").write_text(MPIEXEC)

    def run(
        *steps: Mapping[str, Any],
        hosts: Any = None,
        first_pause_s: float = 0.01,
        longest_pause_s: float = 30.0,
        **asked: Any,
    ) -> tuple[int, list[Any]]:
        Path("play.json").write_text(json.dumps(steps))
        Path("starts").unlink(missing_ok=True)
        request = Request(RANKS, ("train.py",), **{"restarts": 5} | asked)
        environ = {**os.environ, launched.JOB: "this-job"}

        def launch(wanted: Request) -> Launch:
            command = (sys.executable, "mpiexec.py", str(wanted.ranks))
            return Launch(command, job_variables(wanted, environ))

        hosts = hosts or Hosts(None, None, "MPICH", (), environ)
        pauses = {"first_pause_s": first_pause_s, "longest_pause_s": longest_pause_s}
        code = Restarts(request, launch, hosts, environ, **pauses).run()
        return code, [json.loads(line) for line in Path("starts").read_text().splitlines()]

    return run


def test_a_lost_job_is_started_again_and_told_how_often(play, capsys):
    code, starts = play(saved("1"), KILLED, WELL)
    assert code == 0
    assert starts == [[["3"], "this-job", number] for number in range(3)]
    said = capsys.readouterr().err
    assert "restart 1 of 5 in 0.01 s, from checkpoint '/somewhere/1'" in said
    assert "restart 2 of 5" in said and "exit code 137" in said


@pytest.mark.parametrize(
    ("step", "code"),
    [
        ({"code": 3, "files": words(Status.FAILED)}, 3),
        ({"code": 0, "files": words(Status.FINISHED, Status.FAILED)}, 1),
        ({"code": 75, "files": words(Status.PREEMPTED, Status.PREEMPTED)}, 75),
        ({"code": 0, "files": words(Status.PREEMPTED)}, 75),
        (WELL, 0),
        ({**WELL, "code": 5}, 0),  # something has ended it as it was complete
        ({"code": 0}, 0),  # ranks on other hosts, that cannot say anything
    ],
)
def test_what_is_not_started_again(play, step, code):
    assert play(step) == (code, [[["3"], "this-job", 0]])


def test_without_restarts_it_is_mpiexecs_exit_code(play):
    assert play({**WELL, "code": 5}, restarts=0)[0] == 5


def test_a_job_goes_on_where_nothing_can_be_written_to_stderr(play, monkeypatch):
    def write(text: str) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    code, starts = play(
        saved("1"), {"code": 3, "files": words(Status.FINISHED, Status.FINISHED, Status.FINISHED)}
    )
    assert (code, len(starts)) == (0, 2)


def test_a_job_that_was_lost_has_no_exit_code_of_0(play):
    code, starts = play({"code": 0, "files": words(Status.FINISHED, Status.LOST)}, restarts=2)
    assert (code, len(starts)) == (1, 3)


def test_it_is_not_started_again_more_often_than_that(play, capsys):
    steps = [saved(str(number)) for number in range(9)]
    code, starts = play(*steps, restarts=4)
    assert (code, len(starts)) == (137, 5)
    assert "all 4 restarts are used up" in capsys.readouterr().err


GONE = {"code": 137, "gone": 1}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGPIPE])
def test_what_has_ended_mpiexec_is_said_and_no_rank_is_blamed(play, capsys, how):
    """Its ranks die of its end: the first one of them no more than the others."""
    code, starts = play({**GONE, "signal": how}, WELL, restarts=1)
    assert (code, len(starts)) == (0, 2)
    lines = capsys.readouterr().err.splitlines()
    why = rf"mpiexec \(pid \d+\) was ended by {how.name}"
    assert sum(bool(re.search(rf"^parallel-sgd: error: {why}", line)) for line in lines) == 1
    assert (
        sum(bool(re.search(rf"^parallel-sgd: {why}.*: restart 1 of 1", line)) for line in lines)
        == 1
    )
    assert not any("without a report" in line for line in lines)
    assert any("nobody reads its output" in line for line in lines) == (how == signal.SIGPIPE)
    assert play({**GONE, "signal": how}, restarts=0)[0] == 128 + how


@contextmanager
def stdout_of(file: int) -> Iterator[None]:
    kept = os.dup(1)
    os.dup2(file, 1)
    os.close(file)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@pytest.mark.parametrize(
    ("step", "code", "label"),
    [({"gone": 0, "code": 255}, 255, "error: "), ({"code": 255}, 255, "error: "), (WELL, 0, "")],
)
def test_no_rank_is_blamed_where_nothing_can_be_printed(play, capsys, step, code, label):
    """MPICH's mpiexec ends the job then, and Open MPI's says nothing."""
    with stdout_of(os.open("/dev/full", os.O_WRONLY)):
        assert play(step, restarts=0)[0] == code
    why = "standard output cannot be written (No space left on device)"
    why += ": the output of the ranks is lost"
    assert capsys.readouterr().err.splitlines()[1:] == [f"parallel-sgd: {label}{why}"]


@pytest.mark.parametrize("is_read", [False, True])
def test_no_rank_is_blamed_where_nobody_reads_what_open_mpi_prints(play, capsys, is_read):
    """Its mpiexec ends the job then, by exit code 1 and by no signal."""
    reads, writes = os.pipe()
    if not is_read:
        os.close(reads)
    with stdout_of(writes):
        assert play({"gone": 0, "code": 1}, restarts=0)[0] == 1
    said = capsys.readouterr().err
    assert ("rank 0" in said and "without a report" in said) == is_read
    assert ("error: mpiexec has ended the job: nobody reads its output" in said) != is_read
    if is_read:
        os.close(reads)


def test_standard_input_stays_the_users(play):
    """A loop of a shell reads its next line there; and a terminal would stop an mpiexec for it."""
    reads, writes = os.pipe()
    os.write(writes, b"the next line\n")
    os.close(writes)
    before = os.dup(0)
    os.dup2(reads, 0)
    try:
        assert play({**WELL, "reads": True})[0] == 0
        assert os.read(0, 64) == b"the next line\n"
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(reads)
    assert Path("read").read_text() == ""


def test_a_start_is_none_before_anything_was_trained_on_where_ranks_survive(play, capsys):
    """It counts for no restart, and needs none to be asked for."""
    code, starts = play(GONE, GONE, KILLED, GONE, WELL, survive=True, restarts=1)
    assert (code, [number for _, _, number in starts]) == (0, [0, 0, 0, 1, 1])
    said = capsys.readouterr().err
    gone = "rank 1 (pid 9999999) ended without a report before the ranks had made a learner"
    assert said.count(f"{gone}: nothing was trained yet, so the job starts again in") == 3
    assert said.count("restart 1 of 1") == 1


@pytest.mark.parametrize("survive", [True, False])
def test_nor_is_it_started_anew_for_ever(play, capsys, survive):
    code, starts = play(GONE, survive=survive, restarts=0)
    assert (code, len(starts)) == (137, 3 if survive else 1)
    why = "3 times in a row before any training: no further start"
    assert (why in capsys.readouterr().err) == survive


def test_starts_in_vain_end_early(play, capsys):
    code, starts = play(KILLED, saved("1"), KILLED, saved("1"), KILLED, WELL, restarts=9)
    assert (code, len(starts)) == (137, 5)
    assert "the last 3 starts ended within 60 s each" in capsys.readouterr().err


def test_the_whole_job_has_one_time_limit(play):
    slow, began = patience(), time.monotonic()  # two starts of Python must fit in it
    lost = {"code": 137, "seconds": 0.4}
    code, starts = play(lost, {"seconds": 60 * slow}, timeout_s=1.5 * slow)
    assert (code, len(starts)) == (124, 2)
    assert time.monotonic() - began < 20 * slow


@pytest.fixture
def sigint() -> Iterator[None]:
    """Heeded, also where the tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("pause_s", [0.01, 60], ids=["at work", "before a restart"])
def test_a_signal_ends_all(play, name, pause_s):
    number = signal.Signals[name]
    later = f"import os, sys, time; time.sleep(1); os.kill({os.getpid()}, {int(number)})"
    with subprocess.Popen([sys.executable, "-c", later]):
        steps = [KILLED, {"seconds": 60}]
        steps = steps if pause_s == 60 else steps[1:]
        code, _ = play(*steps, first_pause_s=pause_s, restarts=9)
    assert code == 128 + number


@pytest.mark.parametrize("pause_s", [0.01, 60], ids=["at work", "before a restart"])
def test_a_lost_job_that_was_asked_to_leave_is_requeued(play, monkeypatch, capsys, pause_s):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    Path("scontrol").write_text('#!/bin/sh\necho "$@" > asked\n')
    Path("scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{os.getcwd()}:{os.environ['PATH']}")
    later = f"import os, sys, time; time.sleep(1); os.kill({os.getpid()}, {int(signal.SIGUSR2)})"
    with subprocess.Popen([sys.executable, "-c", later]):
        steps = [KILLED, {"code": 137, "seconds": 4}]
        steps = steps if pause_s == 60 else steps[1:]
        code, starts = play(
            *steps, first_pause_s=pause_s, restarts=9, preempt_on="SIGUSR2", requeue=True
        )
    assert (code, len(starts)) == (75, 1)
    assert Path("asked").read_text() == "requeue 5\n"
    assert "failed before it had saved its state" in capsys.readouterr().err


def test_a_job_of_which_a_rank_was_asked_to_leave_is_not_started_again(play, capsys):
    """Nobody has told the launcher."""
    asked = {"code": 137, "files": {"1.asked": ""}}
    code, starts = play(asked, WELL, preempt_on="SIGUSR2")
    assert (code, len(starts)) == (75, 1)
    assert "failed before it had saved its state" in capsys.readouterr().err


class Nowhere:
    any_remote = False

    def with_reachable_hosts(self, request: Request) -> None:
        return None


def test_hosts_are_waited_for_as_often_as_was_asked(play, capsys):
    code, starts = play(KILLED, hosts=Nowhere(), restarts=1100, longest_pause_s=0.0)
    assert (code, len(starts)) == (69, 1)
    assert "too few hosts answer; all 1100 restarts are used up" in capsys.readouterr().err


FORKED = """
import os, signal, time
from parallel_sgd.communication import preemption_requested, listen
listen()
reads, writes = os.pipe()
child = os.fork()
if child == 0:
    os.write(writes, b".")
    time.sleep(60)
    os._exit(0)
os.read(reads, 1)
os.kill(child, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
assert not preemption_requested()
os.kill(os.getpid(), signal.SIGTERM)
assert preemption_requested()
"""


def test_a_child_of_a_rank_ends_by_sigterm():
    """As multiprocessing ends its own, and waits for them."""
    environ = os.environ | {launched.PREEMPT_ON: "SIGTERM"}
    subprocess.run([sys.executable, "-c", FORKED], env=environ, check=True, timeout=50)


AGENT = """#!/bin/sh
[ "$1" != n1 ]
"""


def hosts_of(tmp_path: Path, text: str, least: int | None, ranks: int = 6) -> Request | None:
    """What is left of a request for ranks on these hosts, where n1 is gone."""
    (tmp_path / "hosts").write_text(text)
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    hostfile = read_hostfile(str(tmp_path / "hosts"))
    hosts = Hosts(hostfile, None, "MPICH", ("-launcher-exec", str(agent)), {})
    request = Request(ranks, ("train.py",), hostfile=hostfile, restarts=1, min_ranks=least)
    return hosts.with_reachable_hosts(request)


def test_hosts_that_do_not_answer_are_left_out(tmp_path, capsys):
    three = "n0:2\nn1:2\nn2:2\n"
    left = hosts_of(tmp_path, three, least=4)
    assert left is not None and left.ranks == 4
    for mpi, option in ((MPICH, "-hosts"), (OPEN_MPI, "--host")):
        command = plan(left, mpi, {}, cores=2, root=False).command
        assert command[1:5] == ("-n", "4", option, "n0:2,n2:2")
    assert "no answer from n1: going on with 4 ranks" in capsys.readouterr().err
    assert hosts_of(tmp_path, three, least=5) is None
    assert "room for 4 ranks, and at least 5 are required" in capsys.readouterr().err
    assert hosts_of(tmp_path, three, least=None) is None
    spare = hosts_of(tmp_path, three, least=None, ranks=4)
    assert spare is not None and spare.ranks == 4
    more = hosts_of(tmp_path, three, least=1, ranks=12)  # than there are slots, as was asked for
    assert more is not None and more.ranks == 8
    whole = hosts_of(tmp_path, "n0:2\nn2:2\n", least=1)
    assert whole is not None and (whole.ranks, whole.hostfile) == (6, whole.hostfile)


class Few(Hosts):
    """Too few of them answer, so many times."""

    def __init__(self, times: int) -> None:
        super().__init__(None, None, "MPICH", (), {})
        self.asked: list[int] = []
        self.times = times

    def with_reachable_hosts(self, request: Request) -> Request | None:
        self.asked.append(1)
        return None if len(self.asked) <= self.times else replace(request, ranks=2)


@pytest.mark.parametrize("times", [1, 6, 9])
def test_too_few_hosts_are_waited_for_until_restarts_are_used_up(play, capsys, times):
    """Longer and longer; nothing was started in vain."""
    pauses = {"first_pause_s": 0.002, "longest_pause_s": 0.01}
    code, starts = play(saved("1"), WELL, hosts=Few(times), restarts=8, **pauses)
    there = times < 8
    assert code == (0 if there else os.EX_UNAVAILABLE)
    assert [start[0] for start in starts] == [["3"], ["2"]][: 1 + there]
    said = capsys.readouterr().err
    waited = re.findall(r"restart \d of 8 in (\S+) s,", said)
    assert waited == ["0.002", "0.004", "0.008", *5 * ["0.01"]][: times + 1]
    assert there or "all 8 restarts are used up" in said
