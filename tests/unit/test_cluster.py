"""The emulated cluster: what is called to make it, what is left alone, what is refused. No root."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks import on_ranks
from parallel_sgd import UserError
from parallel_sgd.__main__ import main
from parallel_sgd.command_line import EmulatedHosts, cluster
from parallel_sgd.command_line.cluster import command, hostfile, links, namespaces
from parallel_sgd.command_line.cluster import hosts as hosts_module
from parallel_sgd.command_line.cluster.mpi import AGENT, mpi_settings
from parallel_sgd.launcher import (
    MPICH,
    OPEN_MPI,
    THREAD_VARIABLES,
    JobEnd,
    parse,
    read_hostfile,
    usable_cores,
)

MPIS = {OPEN_MPI: {"vendor": OPEN_MPI, "version": "5.0.11"}}
MPIS[MPICH] = {"vendor": MPICH, "version": "5.0.2"}
GONE = 2**22 + 1  #: no process has this number: Linux counts to 2**22


class Machine(list[list[Any]]):
    """The commands that were run, of a root with all programs and Open MPI.

    Attributes:
        user: number of the user.
        mpi: which mpi4py is bound to.
        missing: programs that are not there.
        wrong: what programs say that fail.
    """

    def __init__(self):
        self.user, self.mpi, self.running = 0, MPIS[OPEN_MPI], {}
        self.missing, self.wrong = set(), {}

    def run(self, command, **options):
        self.append(list(command))
        said, wrong = "", self.wrong.get(command[0], "")
        if "pids" in command and self.running.setdefault(command[-1], True):
            said = "4242\n"
        return subprocess.CompletedProcess(command, 2 if wrong else 0, said, wrong)

    def kill(self, pid, number):
        self.append(["kill", pid, number])
        self.running.update(dict.fromkeys(self.running, False))


@pytest.fixture
def calls(monkeypatch, temporary_folder):
    """A machine on which commands are noted and not run."""
    machine = Machine()
    there = lambda name, path="": None if name in machine.missing else f"/bin/{name}"  # noqa: E731
    for owner, name, function in (
        (subprocess, "run", machine.run),
        (os, "geteuid", lambda: machine.user),
        (os, "kill", machine.kill),
        (shutil, "which", there),
        (hosts_module, "bound_mpi", lambda: machine.mpi),
    ):
        monkeypatch.setattr(owner, name, function)
    return machine


def example(folder, count=3, slots=1, mpi=OPEN_MPI):
    switch, names = namespaces.names_of(7, count)
    made = EmulatedHosts(names, switch, folder, mpi_settings(MPIS[mpi], folder), slots)
    (folder / "hosts").write_text(made.hostfile)
    return made


NETNS_EXEC = ["netns", "exec"]


@pytest.mark.parametrize("mpi", MPIS)
def test_names_say_who_has_made_the_hosts_and_are_names_of_hosts(tmp_path, mpi):
    switch, names = namespaces.names_of(123, 3)
    assert len({switch, *names}) == 4
    assert all(name.startswith("psgd-hosts-123-") for name in (switch, *names))
    made = example(tmp_path, slots=2, mpi=mpi)
    read = read_hostfile(tmp_path / "hosts")
    assert [(host.name, host.slots) for host in read.hosts] == [(name, 2) for name in made.names]
    assert read.mpiexec_options(mpi)[0] in ("--hostfile", "-f")  # in its own dialect


def test_both_ends_of_every_link_are_limited_and_everything_is_in_namespaces():
    made = links.commands("s", ["a", "b"], 2.5e9)
    limited = [words[2] + " " + words[6] for words in made if words[0] == "tc"]
    assert limited == ["s port1", "a eth0", "s port2", "b eth0"]
    assert all("rate 2500000kbit" in " ".join(words) for words in made if words[0] == "tc")
    assert all({"s", "a", "b"} & set(words) for words in made)
    addresses = [words[5] for words in made if "addr" in words]
    assert len(set(addresses)) == 3
    assert not [words for words in links.commands("s", ["a"], math.inf) if words[0] == "tc"]


def test_every_namespace_sends_as_linux_does_where_nobody_has_changed_it():
    settings = [words for words in links.commands("s", ["a", "b"], 1e9) if words[1:3] == NETNS_EXEC]
    for name in ("s", "a", "b"):
        (line,) = [words[-1] for words in settings if words[3] == name and "cubic" in words[-1]]
        assert "for name in cubic reno; do if echo $name > " in line


def test_only_what_a_process_that_is_gone_has_made_is_left_over():
    listed = (
        "psgd-hosts-11-switch (id: 0)\npsgd-hosts-11-0 (id: 1)\npsgd-hosts-12-0\n"
        "own\nmy-psgd-hosts-11-0\npsgd-other-11-0\npsgd-hosts-9x-0\n"
    )
    left = namespaces.leftovers(listed.splitlines(), {12, 1})
    assert left == ["psgd-hosts-11-switch", "psgd-hosts-11-0"]


def test_leftovers_are_removed_with_their_hostfile_and_named(calls, tmp_path, capsys):
    left = tmp_path / f"psgd-hosts-{GONE}-abc"
    own = tmp_path / f"psgd-hosts-{os.getpid()}-abc"
    files = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for folder, path in zip((left, own, tmp_path / f"psgd-hosts-{GONE}-x"), files, strict=True):
        folder.mkdir()
        (folder / "written").write_text(str(path))
        path.write_text(f"{hostfile.MARK} {GONE}\nhost\n")
    files[2].write_text("node1\n")  # the user has put another in its place
    assert main(["cluster", "--remove"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == sorted(
        f"removed {path}" for path in (files[0], left, tmp_path / f"psgd-hosts-{GONE}-x")
    )
    assert sorted(tmp_path.iterdir()) == sorted([*files[1:], own])
    assert main(["cluster", "--remove"]) == 0
    assert capsys.readouterr().out == "nothing was left behind\n"


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RuntimeError, signal.SIGTERM])
def test_hosts_and_what_runs_in_them_are_removed_whatever_happens(calls, tmp_path, end):
    known = {None: nullcontext(), signal.SIGTERM: pytest.raises(SystemExit, match="143")}
    with known.get(end) or pytest.raises(end):  # noqa: SIM117
        with cluster.emulated_hosts(2, 1e9) as hosts:
            assert (hosts.folder / "hosts").read_text() == "".join(
                f"{name} slots=1\n" for name in hosts.names
            )
            assert (hosts.folder / "agent").stat().st_mode & 0o111
            made = [words[3] for words in calls if words[:3] == ["ip", "netns", "add"]]
            assert made == [hosts.switch, *hosts.names]
            calls.clear()
            if end == signal.SIGTERM:
                signal.raise_signal(end)
            elif end:
                raise end
    removed = [words[3] for words in calls if words[:3] == ["ip", "netns", "del"]]
    assert removed == made
    assert ["kill", 4242, signal.SIGKILL] in calls
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_hosts_that_cannot_be_finished_are_removed_too(calls):
    calls.wrong["tc"] = "Error: Specified qdisc kind is unknown.\n"
    with (
        pytest.raises(UserError, match=r"cannot be made here: tc .*qdisc kind is unknown"),
        cluster.emulated_hosts(2, 1e9),
    ):
        raise AssertionError
    assert sum(words[:3] == ["ip", "netns", "del"] for words in calls) == 3


@pytest.fixture
def interruptible():
    """As from a terminal: what a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_another_signal_waits_until_the_hosts_are_removed():
    done = []

    def removal():
        with namespaces.signals_blocked():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        removal()
    assert done


def refused(count=2, rate=1e9, slots=1):
    with pytest.raises(UserError) as caught, cluster.emulated_hosts(count, rate, slots):
        raise AssertionError
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_missing_is_said_in_one_line_before_anything_is_made(calls):
    assert "hosts=0" in refused(count=0)
    assert "hosts=201 of an emulated cluster must be 1 to 200" in refused(count=201)
    assert "slots=0" in refused(slots=0)
    assert "rate=nan" in refused(rate=math.nan)
    assert "rate=1000 bit/s of emulated links must be 1mbit to 1000gbit" in refused(rate=1e3)
    assert not calls
    for vendor, version in ((OPEN_MPI, "4.1.6"), ("Intel MPI", "2021.11")):
        calls.mpi = {"vendor": vendor, "version": version}
        said = f"need Open MPI 5 or MPICH, and mpi4py is bound to {vendor} {version}"
        assert said in refused()
    assert not [words for words in calls if "add" in words]
    calls.clear()
    calls.missing.add("tc")
    assert "need tc in PATH (Debian: iproute2" in refused()
    calls.user = 1000
    assert "need root" in refused()
    assert not calls


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "a command must be given: -- mpiexec -hostfile hosts python train.py"),
        (["--hosts", "2", "--"], "a command must be given"),
        (["--rate", "fast", "--", "true"], "--rate: must be a rate such as 100mbit or 1gbit"),
        (["--colour", "--", "true"], "unrecognized arguments: --colour"),
        (["--hosts", "2", "--", "true"], "emulated hosts need root"),
        (["--remove"], "emulated hosts need root"),
        (["--hosts", "0", "--", "true"], "--hosts: must be a whole number from 1 to 1048576: '0'"),
        (["--slots", "x", "--", "true"], "--slots: must be a whole number from 1 to 1048576: 'x'"),
        (["--hostfile", "no/hosts", "--", "true"], "hostfile='no/hosts' must be in a folder that"),
        (["--hostfile", "mine", "--", "true"], "hostfile='mine' must not exist, or have been left"),
    ],
)
def test_the_command_refuses_in_one_line(calls, monkeypatch, tmp_path, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    calls.user = 1000
    (tmp_path / "mine").write_text("node1 slots=4\n")
    assert main(["cluster", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"parallel-sgd: error: {said}")
    assert not calls and [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").read_text() == "node1 slots=4\n"


@pytest.mark.parametrize("before", [["--"], []])
def test_the_command_keeps_its_own_options(calls, monkeypatch, tmp_path, capsys, before):
    run = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "run_job", lambda words, environ: run.append(words) or JobEnd(3))
    assert main(["cluster", "--hosts", "1", *before, "mpiexec", "-n", "2", "--", "x"]) == 3
    assert run[0][4:] == ["mpiexec", "-n", "2", "--", "x"]
    assert "1 host, slots=1, links of 1000 Mbit/s, in hosts: mpiexec" in capsys.readouterr().err


def test_a_hostfile_of_others_is_left_alone(tmp_path):
    path, folder = tmp_path / "hosts", tmp_path / "folder"
    folder.mkdir()
    with hostfile.hostfile_written(path, "host slots=1\n", folder):
        assert path.read_text().endswith("\nhost slots=1\n")
        with pytest.raises(UserError, match=f"belongs to emulated hosts of process {os.getpid()}"):
            hostfile.require_free_path(path)
        path.write_text("node1\n")
    assert path.read_text() == "node1\n"
    with pytest.raises(UserError, match="give another name"):
        hostfile.require_free_path(path)
    path.write_text(f"{hostfile.MARK} {GONE}\nhost\n")  # its record is gone with the folder
    with hostfile.hostfile_written(path, "host slots=1\n", folder):
        pass
    assert not path.exists()


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_are_started_by_our_launcher_one_on_each_slot(monkeypatch, tmp_path, mpi):
    started = {}

    def run(command, env, check):
        started.update(command=command, env=env)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(on_ranks.subprocess, "run", run)
    made = example(tmp_path, slots=2, mpi=mpi)
    monkeypatch.setattr(on_ranks, "emulated_hosts", lambda count, rate: nullcontext(made))
    with pytest.raises(UserError, match=r"6 ranks of benchmarks\.x ended with exit code 3"):
        on_ranks.on_hosts(3, 1e9, "x", {"a": 1}, environ={"OMP_NUM_THREADS": "5"})
    command = started["command"]
    assert command[:4] == ["ip", "netns", "exec", made.switch]
    assert {**made.environment, "OMP_NUM_THREADS": "5"}.items() <= started["env"].items()
    request = parse(command[command.index("run") + 1 :])
    assert request.ranks == 6 and request.command[:3] == ("-m", "benchmarks.on_ranks", "x")
    assert request.hostfile is not None
    assert request.hostfile.most_ranks_on_a_host(6) == 2
    options = shlex.join(request.mpiexec_options)
    if mpi == OPEN_MPI:
        assert f"--prtemca plm_ssh_agent {tmp_path / 'agent'}" in options
        assert "--mca btl tcp,sm,self --mca btl_tcp_if_include eth0" in options
    else:
        assert f"-launcher ssh -launcher-exec {tmp_path / 'agent'} -iface br0" in options
        assert "-genv FI_PROVIDER tcp" in options


def test_the_environment_makes_a_plain_mpiexec_work(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    for hosts in (1, 2):
        variables = example(tmp_path, hosts).environment
        assert variables["NUMBA_NUM_THREADS"] == str(max(1, usable_cores() // hosts))
    assert variables["PRTE_MCA_plm_ssh_agent"] == str(tmp_path / "agent")
    assert variables["PRTE_MCA_rmaps_default_mapping_policy"] == "slot:oversubscribe"
    assert variables["OMPI_MCA_btl"] == "tcp,sm,self" and variables["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert variables["OMP_NUM_THREADS"] == "7"
    variables = example(tmp_path, mpi=MPICH).environment
    assert variables["HYDRA_LAUNCHER_EXEC"] == str(tmp_path / "agent")
    assert variables["FI_PROVIDER"] == "tcp" and set(THREAD_VARIABLES) < set(variables)


def test_a_host_by_its_number(calls, tmp_path):
    made = example(tmp_path)
    assert made.addresses == ("10.77.0.2", "10.77.0.3", "10.77.0.4")
    assert made.on(2)[:4] == ["ip", "netns", "exec", made.names[2]]
    made.cut(0)
    made.mend(2)
    assert [words[5:] for words in calls] == [["port1", "down"], ["port3", "up"]]
    for does in (made.on, made.cut, made.mend):
        with pytest.raises(IndexError):
            does(3)


def test_the_agent_is_called_as_ssh_is(tmp_path):
    agent, ip = tmp_path / "agent", tmp_path / "ip"
    agent.write_text(AGENT)
    ip.write_text("#!/bin/sh\n[ $4 != grep ] || exit $CUT\nprintf '%s\\n' \"$@\"\n")
    ip.chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "CUT": "0"}
    for options in ([], ["-x", "-q"]):
        called = ["sh", str(agent), *options, "host", "PATH=/x", ";", "run", '"two words"']
        said = subprocess.check_output(called, text=True, env=environ).splitlines()
        assert said[:3] == ["netns", "exec", "host"]
        assert said[-4:] == ["host", "sh", "-c", 'PATH=/x ; run "two words"']
    cut = subprocess.run(called, env=environ | {"CUT": "1"}, capture_output=True)
    assert (cut.returncode, cut.stdout) == (255, b"")


def test_the_rate_of_payload_on_a_link():
    assert cluster.payload_rate(1e9) == pytest.approx(119.55e6, rel=1e-4)
