"""Emulated hosts: what is called to make them, what is left alone, and what is refused. No root."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from contextlib import nullcontext

import pytest

from benchmarks import emulated_hosts, on_ranks, parameter_server
from benchmarks.emulated_hosts import EmulatedHosts
from benchmarks.parameter_server import links
from parallel_sgd import UserError
from parallel_sgd.command_line.hostfiles import read_hostfile
from parallel_sgd.command_line.launcher import parse


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Commands, of a root with all programs and Open MPI, that are noted and not run."""
    called = []

    def run(command, **options):
        called.append(list(command))
        said = "4242\n" if "pids" in command else ""
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(emulated_hosts.subprocess, "run", run)
    monkeypatch.setattr(emulated_hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(emulated_hosts.os, "kill", lambda pid, _: called.append(["kill", pid]))
    monkeypatch.setattr(emulated_hosts.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(emulated_hosts, "bound_mpi", lambda: {"vendor": "Open MPI"})
    monkeypatch.setattr(emulated_hosts.tempfile, "tempdir", str(tmp_path))
    return called


def test_names_say_who_has_made_the_hosts_and_are_names_of_hosts(tmp_path):
    switch, names = emulated_hosts.names_of(123, 3)
    assert len({switch, *names}) == 4
    assert all(name.startswith("psgd-hosts-123-") for name in (switch, *names))
    path = tmp_path / "hosts"
    path.write_text("".join(f"{name} slots=1\n" for name in names))
    assert tuple(host.name for host in read_hostfile(path).hosts) == names


def test_both_ends_of_every_link_are_limited_and_everything_is_in_namespaces():
    made = emulated_hosts.commands("s", ["a", "b"], 2.5)
    limited = [words[2] + " " + words[6] for words in made if words[0] == "tc"]
    assert limited == ["s port1", "a eth0", "s port2", "b eth0"]
    assert all("rate 2500000kbit" in " ".join(words) for words in made if words[0] == "tc")
    assert all({"s", "a", "b"} & set(words) for words in made)
    addresses = [words[5] for words in made if "addr" in words]
    assert len(set(addresses)) == 3


def test_only_what_a_process_that_is_gone_has_made_is_left_over():
    listed = (
        "psgd-hosts-11-switch (id: 0)\npsgd-hosts-11-0 (id: 1)\npsgd-hosts-12-0\n"
        "own\nmy-psgd-hosts-11-0\npsgd-other-11-0\npsgd-hosts-9x-0\n"
    )
    found = emulated_hosts.leftovers(listed.splitlines(), {12, 1})
    assert found == ["psgd-hosts-11-switch", "psgd-hosts-11-0"]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_hosts_and_what_runs_in_them_are_removed_whatever_happens(calls, tmp_path, error):
    with nullcontext() if error is None else pytest.raises(error):  # noqa: SIM117
        with emulated_hosts.emulated_hosts(2, 1.0) as hosts:
            assert (hosts.folder / "hosts").read_text() == "".join(
                f"{name} slots=1\n" for name in hosts.names
            )
            made = [words[3] for words in calls if words[:3] == ["ip", "netns", "add"]]
            assert made == [hosts.switch, *hosts.names]
            calls.clear()
            if error:
                raise error
    removed = [words[3] for words in calls if words[:3] == ["ip", "netns", "del"]]
    assert removed == made
    assert calls.count(["kill", 4242]) == 3
    assert not list(tmp_path.iterdir())


def test_hosts_that_cannot_be_finished_are_removed_too(calls, monkeypatch):
    noted = emulated_hosts.subprocess.run

    def run(command, **options):
        done = noted(command, **options)
        if command[0] == "tc":
            done.returncode, done.stderr = 2, "Error: Specified qdisc kind is unknown.\n"
        return done

    monkeypatch.setattr(emulated_hosts.subprocess, "run", run)
    with (
        pytest.raises(UserError, match=r"cannot be made here: tc .*qdisc kind is unknown"),
        emulated_hosts.emulated_hosts(2, 1.0),
    ):
        raise AssertionError
    assert sum(words[:3] == ["ip", "netns", "del"] for words in calls) == 3


def refused(count=2, gbit=1.0):
    with pytest.raises(UserError) as caught, emulated_hosts.emulated_hosts(count, gbit):
        raise AssertionError
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_missing_is_said_in_one_line_before_anything_is_made(calls, monkeypatch):
    assert "count=0" in refused(count=0)
    assert "gbit=nan" in refused(gbit=float("nan"))
    monkeypatch.setattr(emulated_hosts, "bound_mpi", lambda: {"vendor": "MPICH"})
    assert "need Open MPI, and mpi4py is bound to MPICH" in refused()
    monkeypatch.setattr(emulated_hosts.shutil, "which", lambda name: None if name == "tc" else name)
    assert "need tc in PATH (Debian: iproute2" in refused()
    monkeypatch.setattr(emulated_hosts.os, "geteuid", lambda: 1000)
    assert "need root" in refused()
    assert not calls


def test_ranks_are_started_by_our_launcher_inside_one_on_each_host(monkeypatch, tmp_path):
    switch, names = emulated_hosts.names_of(7, 3)
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    started = {}

    def run(command, env, timeout, check):
        started.update(command=command, env=env)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(on_ranks.subprocess, "run", run)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with pytest.raises(UserError, match=r"3 ranks of benchmarks\.x ended with exit code 3"):
        EmulatedHosts(names, switch, tmp_path).run("x", {"a": 1})
    command = started["command"]
    assert command[:4] == ["ip", "netns", "exec", switch]
    assert int(started["env"]["OMP_NUM_THREADS"]) >= 1
    request = parse(command[command.index("run") + 1 :])
    assert request.ranks == 3 and request.command[:3] == ("-m", "benchmarks.on_ranks", "x")
    assert request.hostfile is not None
    assert request.hostfile.most_ranks_on_a_host(3) == 1
    options = shlex.join(request.mpiexec_options)
    assert f"--prtemca plm_ssh_agent {tmp_path / 'agent'}" in options
    assert "--mca btl tcp,self --mca btl_tcp_if_include eth0" in options


def test_the_limit_of_the_links():
    assert emulated_hosts.payload_rate(1) == pytest.approx(119.55e6, rel=1e-4)
    pulled = 4 << 20
    burst = emulated_hosts.BURST
    one, more = links.limit(1, pulled, pulled, 1), links.limit(3, pulled, pulled, 1)
    assert one == pytest.approx(119.55e6 / (2 * (pulled - burst)), rel=1e-4)
    assert more == pytest.approx(119.55e6 / pulled, rel=1e-4)  # both directions at once
    assert links.limit(1, 1000, pulled, 1) == pytest.approx(2 * one)
    assert links.numbers(4) == [1, 3] and links.numbers(2) == [1]


def test_the_report_on_links(monkeypatch):
    updates = {f"learner, {n}, {bits}": 9.0 for n in (1, 3) for bits in (32, 1)}
    updates |= {name.replace("learner", "bare"): 10.0 for name in updates}
    found = {"updates": updates, "where": {"1": {"wire": 0.07}, "3": {"wire": 0.1}}}
    asked = []

    class Hosts:
        def __init__(self, count, gbit):
            asked.append((count, gbit))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, module, options):
            asked.append((module, options["values"]))
            return found

    monkeypatch.setattr(parameter_server, "emulated_hosts", Hosts)
    parser = argparse.ArgumentParser()
    parameter_server.add_arguments(parser)
    report = parameter_server.main(parser.parse_args(["--emulate-gbit", "1"]))
    assert asked == [(4, 1.0), ("parameter_server.links", 1 << 20)]
    ratios = {row.name: row.ratio for row in report.rows}
    assert len(ratios) == len(report.rows)
    assert ratios["learner.step, 32 bit, 3 workers"] == pytest.approx(0.9)
    assert ratios["learner.step, 1 bit, 1 worker"] == pytest.approx(0.9)
    with pytest.raises(UserError, match="hosts=1 must be at least 2"):
        parameter_server.main(parser.parse_args(["--emulate-gbit", "1", "--hosts", "1"]))
