"""Restarts of a job: names, options, hosts, the newest checkpoint, and hints."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from test_launcher import MPICH

from parallel_sgd.communication import job_environment as launched
from parallel_sgd.errors import UserError
from parallel_sgd.launcher import (
    Hosts,
    Request,
    Supervisor,
    job_variables,
    parse,
    plan,
    read_hostfile,
    restarts,
)

HOSTS = ["--restarts", "1", "--hostfile", "hosts"]


def test_a_job_that_slurm_requeues_is_known_without_our_launcher():
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    assert (launched.job_name(environ), launched.restarts(environ)) == (None, 0)
    environ[launched.REQUEUE] = "1"
    assert (launched.job_name(environ), launched.restarts(environ)) == ("slurm-7", 2)
    environ |= {launched.JOB: "mine", launched.RESTART: "1"}
    assert (launched.job_name(environ), launched.restarts(environ)) == ("mine", 1)


def test_the_newest_checkpoint_is_what_was_told_last():
    with Supervisor(3) as supervisor:
        assert supervisor.newest_checkpoint() is None
        for rank, name, seconds in ((0, "later", 2), (1, "earlier", 1)):
            path = Path(supervisor.environ[launched.FOLDER], f"{rank}.checkpoint")
            path.write_text(f"{name}\n")
            os.utime(path, (seconds, seconds))
        assert supervisor.newest_checkpoint() == "later"


@pytest.mark.parametrize(
    ("lines", "any_remote"), [("localhost\n127.0.0.1\n", False), ("localhost\nn0.invalid\n", True)]
)
def test_this_host_is_known_by_name_and_address(tmp_path, lines, any_remote):
    (tmp_path / "hosts").write_text(lines)
    hosts = Hosts(read_hostfile(tmp_path / "hosts"), None, "MPICH", (), {})
    assert hosts.any_remote == any_remote


def test_a_job_has_one_name_also_where_slurm_requeues_it():
    request = Request(2, ("x.py",), restarts=3, restart=2)
    assert job_variables(Request(2, ("x.py",)), {"SLURM_JOB_ID": "5"}) == {}
    slurm = {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "1"}
    name = job_variables(request, slurm)[launched.JOB]
    assert name.startswith("slurm-5-") and job_variables(request, slurm)[launched.RESTART] == "3"
    other = job_variables(replace(request, command=("y.py",)), slurm)
    assert other[launched.JOB] != name  # another command of the same script
    assert job_variables(request, {launched.JOB: "mine"}) == {
        launched.JOB: "mine",
        launched.RESTART: "2",
    }
    requeued = replace(request, restarts=0, restart=0, preempt_on="SIGUSR2", requeue=True)
    assert job_variables(requeued, slurm) == {launched.JOB: name, launched.RESTART: "1"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--min-ranks", "2"], "min_ranks=2 has no effect without --restarts"),
        (["--restarts", "1", "--min-ranks", "2"], "min_ranks=2 has no effect without --hostfile"),
        ([*HOSTS, "--min-ranks", "5"], "min_ranks=5 must be from 1 to 4, that of -n"),
        ([*HOSTS, "--servers", "2", "--min-ranks", "2"], "min_ranks=2 must be from 3"),
        (["--restarts", "-1"], "must be a whole number from 0"),
        (["--requeue"], "requeue=True has no effect without --preempt-on"),
        (["--preempt-on", "SIGKILL"], "must be of SIGUSR1, SIGUSR2, SIGTERM: 'SIGKILL'"),
    ],
)
def test_options_that_are_refused(tmp_path, monkeypatch, options, problem):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("n0 slots=2\nn1 slots=2\n")
    script = tmp_path / "x.py"
    script.touch()
    with pytest.raises(UserError, match=problem):
        parse(["-n", "4", *options, str(script)])


def test_signals_go_to_ranks_with_the_one_that_mpiexec_passes_on(tmp_path):
    script = tmp_path / "x.py"
    script.touch()
    request = parse(["-n", "2", "--preempt-on", "usr2,TERM", "--requeue", str(script)])
    added = plan(request, MPICH, {}, cores=2, root=False).environ
    assert added["PARALLEL_SGD_PREEMPT_ON"] == "SIGUSR2,SIGTERM,SIGUSR1"
    assert added["PARALLEL_SGD_REQUEUE"] == "1"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        *((code, "SIGBUS: shared memory may be full") for code in (7, 135)),
        *((code, "SIGTERM: somebody has ended the rank, or mpiexec") for code in (15, 143)),
        (
            1,
            "Exit code 1: the rank was not killed for its memory. It has called os._exit",
        ),
        (1, "somebody has ended the rank, or mpiexec"),  # as Open MPI's does at a SIGTERM
        *((code, "") for code in (0, 9, 137, 255)),
    ],
)
def test_what_an_exit_code_says_of_a_rank_that_is_gone(code, said):
    told = restarts.exit_code_hint(code)
    assert said in told and bool(told) == bool(said)
