"""`parallel-sgd doctor`: each check, by facts that make it fail and facts that do not."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from parallel_sgd import simulate
from parallel_sgd.__main__ import main
from parallel_sgd.command_line.doctor import checks, command, ranks, speed
from parallel_sgd.command_line.doctor.checks import Finding
from parallel_sgd.command_line.doctor.facts import Facts, collect_facts
from parallel_sgd.command_line.doctor.network import (
    Pair,
    clock_offsets,
    measure_pairs,
    rounds_of_pairs,
)
from parallel_sgd.communication import INTERFACE, without_launcher
from parallel_sgd.errors import UserError
from parallel_sgd.launcher import Mpiexec

SOUND = Facts(
    host="a",
    versions={"parallel_sgd": "1.0", "numpy": "2.4.6", "MPI": "MPICH 5.0.2"},
    cores=4,
    threads=1,
    load=0.3,
    shared_memory=(8 * 10**9, 8 * 10**9),
    addresses=("10.0.0.1",),
    networks=(("eth0", "10.0.0.0/24"),),
    congestion_control="cubic",
    open_files=1024,
    locked_memory=65536,
    axpy=20e9,
    product=80e9,
)
HOSTS = [replace(SOUND, host=host) for host in "abc"]


def pairs_of(names: str, **rates: float) -> list[Pair]:
    """Pairs of hosts at 100 MB/s each way, but from one to another as given: ab=20."""
    return [
        Pair((a, b), (rates.get(a + b, 100) * 1e6, rates.get(b + a, 100) * 1e6), 5e-5)
        for a, b in combinations(names, 2)
    ]


def one_is(**changed: Any) -> list[Facts]:
    return [HOSTS[0], replace(HOSTS[1], **changed), HOSTS[2]]


def test_a_sound_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERFACE, raising=False)
    found = ranks.run_checks(HOSTS, [0.0, 0.01, -0.2], pairs_of("abc"))
    assert {one.level for one in found} == {"ok"}
    assert len({one.check for one in found}) == len(found) == 11
    alone = ranks.run_checks(HOSTS[:1], [0.0], [])
    assert {one.level for one in alone} == {"ok"}


@pytest.mark.parametrize(
    ("check", "facts", "level", "says"),
    [
        (checks.versions, one_is(versions=SOUND.versions | {"parallel_sgd": "0.9"}), "problem",
            "parallel_sgd 1.0 on a, c; 0.9 on b"),
        (checks.versions, one_is(versions=SOUND.versions | {"numpy": "2.0.0"}), "warning",
            "numpy 2.4.6 on a, c; 2.0.0 on b"),
        (checks.cores, [SOUND] * 5, "warning", "5 ranks on a share 4 cores"),
        (checks.cores, [replace(SOUND, threads=3)] * 2, "warning", "2 ranks on a, with 3 threads"),
        (checks.cores, [replace(SOUND, threads=None)] * 2, "warning", "a thread for each core"),
        (checks.load, one_is(load=3.9), "warning", "keep b busy: a load of 3.9 on 4 cores of b"),
        (checks.shared_memory, one_is(shared_memory=(64e6, 20e6)), "warning",
            "/dev/shm of b has 20 MB free of 64, for 1 rank"),
        (checks.shared_memory, one_is(shared_memory=(64e6, 5e6)), "problem", "has 5 MB free"),
        (checks.shared_memory, one_is(shared_memory=None), "problem", "has 0 MB free"),
        (checks.shared_memory, [replace(SOUND, shared_memory=(64e6, 64e6))] * 4, "warning",
            "64 MB free of 64, for 4 ranks"),
        (checks.names, one_is(addresses=()), "warning", "does not resolve its own name: b"),
        (checks.names, one_is(addresses=("127.0.1.1",)), "warning", "127.0.1.1 on b"),
        (checks.congestion, one_is(congestion_control="bbr"), "warning", "b: TCP uses BBR"),
        (checks.limits, one_is(open_files=128), "warning", "b: a process may open 128 files"),
        (checks.limits, one_is(rdma=True), "warning", "b: a process may lock 0.1 MB"),
        (speed.hosts, one_is(axpy=10e9), "warning", "b is slow: memory 10.0 GB/s, .* 20.0"),
        (speed.hosts, one_is(product=8e9), "problem", "b is slow: matrix products 8.0 GFLOP/s"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(
    check: Callable[[Sequence[Facts]], list[Finding]], facts: list[Facts], level: str, says: str
) -> None:
    (found,) = check(facts)
    assert found.level == level
    assert re.search(says, found.says), found.says
    assert found.advice and "\n" not in found.says + found.advice


def test_what_does_not_matter_to_one_host() -> None:
    """Or to none: memory is only locked for RDMA."""
    alone = replace(SOUND, addresses=("127.0.1.1",), congestion_control="bbr", locked_memory=0)
    for check in (checks.names, checks.congestion, checks.limits):
        assert [one.level for one in check([alone])] == ["ok"]
    assert checks.limits(one_is(rdma=True, locked_memory=-1))[0].level == "ok"


def test_several_networks() -> None:
    docker = (("eth0", "10.0.0.0/24"), ("docker0", "172.17.0.0/16"))
    (found,) = checks.networks(one_is(networks=docker), None)
    assert found.level == "warning" and "b: several networks (eth0 10.0.0.0/24, doc" in found.says
    assert found.advice == "choose one: --interface 10.0.0.0/24"
    assert checks.networks(one_is(networks=docker), "eth0")[0].level == "ok"
    assert checks.networks([replace(SOUND, networks=docker)], None)[0].level == "ok"


def test_a_clock_that_is_off() -> None:
    (found,) = checks.clocks(HOSTS, [0.0, -3.2, 0.1])
    assert found.level == "warning" and "the clock of b is -3.2 s from that of a" in found.says


OPEN_MPI, MPICH = Mpiexec("/o/mpiexec", "Open MPI", "5"), Mpiexec("/m/mpiexec", "MPICH", "5")


@pytest.mark.parametrize(
    ("mpiexecs", "first", "level", "says"),
    [
        ([MPICH, OPEN_MPI], "/m/mpiexec", "ok", "its mpiexec is /m/mpiexec"),
        ([MPICH, OPEN_MPI], None, "ok", "its mpiexec is /m/mpiexec"),
        ([MPICH, OPEN_MPI], "/o/mpiexec", "warning", "first mpiexec in PATH is of Open MPI"),
        ([OPEN_MPI], "/o/mpiexec", "problem", r"no mpiexec .*: /o/mpiexec \(Open MPI\)"),
        ([], None, "problem", "there is none"),
    ],
)
def test_mpi_and_mpiexec(mpiexecs: list[Mpiexec], first: str | None, level: str, says: str) -> None:
    (found,) = checks.mpi("MPICH", "5.0.2", mpiexecs, first_in_path=first)
    assert found.level == level
    assert re.search(says, found.says), found.says


@pytest.mark.parametrize(
    ("names", "rates", "levels"),
    [
        ("abc", {"ab": 60, "cb": 60}, {"b receives slowly: 60 MB/s": "warning"}),
        ("abc", {"ab": 20, "cb": 20, "ba": 20, "bc": 20},
            {"b sends slowly: 20 MB/s": "problem", "b receives slowly: 20 MB/s": "problem"}),
        ("abcd", {"ab": 20}, {"from a to b the rate is 20 MB/s, and 100 could be": "problem"}),
        ("ab", {"ba": 50}, {"from b to a the rate is 50 MB/s, and 100 could be": "warning"}),
        ("abcd", {"ab": 90}, {"100 MB/s and 50 us, median of 6 pairs of hosts": "ok"}),
        ("ab", {}, {"100 MB/s and 50 us, median of 1 pair of hosts": "ok"}),
    ],
)  # fmt: skip
def test_slow_links(names: str, rates: dict[str, float], levels: dict[str, str]) -> None:
    found = speed.links(pairs_of(names, **rates))
    assert [one.level for one in found] == list(levels.values())
    for one, says in zip(found, levels, strict=True):
        assert one.says.startswith(says)


def test_a_long_way() -> None:
    pairs = pairs_of("abc")
    pairs[1] = replace(pairs[1], latency_s=4e-4)
    (found,) = speed.links(pairs)
    assert (found.level, found.says[:33]) == ("warning", "between a and c: 400 us one way, ")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_pairs_do_not_disturb_each_other(count: int) -> None:
    rounds = rounds_of_pairs(count)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))
    for pairs in rounds:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
    assert len(rounds) == max(1, count - 1 + count % 2)


def test_ranks_measure_every_pair_of_hosts() -> None:
    """By the first ranks of each; three hosts, of which one has two ranks."""

    def body(comm: Any) -> Any:
        return measure_pairs(comm, ["a", "b", "b", "c"]), clock_offsets(comm)

    (pairs, offsets), *others = simulate(4, body, timeout_s=20)
    assert all(pairs == theirs for theirs, _ in others)
    assert [pair.hosts for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert all(min(pair.bytes_per_s) > 1e6 and pair.latency_s > 0 for pair in pairs)
    assert offsets[0] == 0 and max(map(abs, offsets)) < 1


def test_facts_of_this_machine() -> None:
    facts = collect_facts("here", measures=True)
    assert facts.axpy > 1e8 and facts.product > 1e7
    assert set(facts.versions) == {"parallel_sgd", "python", "numpy", "numba", "mpi4py", "MPI"}
    assert facts.shared_memory is None or facts.shared_memory[0] >= facts.shared_memory[1]
    assert collect_facts("here", measures=False).versions == {}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in set(command.os.environ) - set(without_launcher(command.os.environ)):
        monkeypatch.delenv(name)
    return monkeypatch


def test_ranks_that_do_not_come_are_a_problem(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.setattr(command, "_check_mpi", lambda: [Finding("mpi", "ok", "fits")])
    alone.setattr(sys, "executable", "/bin/false")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(one["check"], one["level"]) for one in found] == [("mpi", "ok"), ("ranks", "problem")]
    assert "2 ranks ended with exit code 1" in found[1]["says"]


def test_without_an_mpi_no_ranks_are_started(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> dict[str, Any]:
        raise UserError("mpi4py must find an MPI library")

    alone.setattr(command, "bound_mpi", none)
    alone.setattr(command, "_run_ranks", None)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("PROBLEM  mpi: mpi4py must find an MPI library\n         to do: pip")


def test_the_worst_comes_last() -> None:
    findings = [
        {"check": "links", "level": "problem", "says": "slow", "advice": "look"},
        {"check": "mpi", "level": "ok", "says": "fits", "advice": ""},
    ]
    pair = {"hosts": ("a", "bb"), "bytes_per_s": (1e8, 2e7), "latency_s": 5e-5}
    assert command.text({"findings": findings, "pairs": [pair]}).splitlines() == [
        "hosts   MB/s there   back  us one way",
        "a   bb         100     20          50",
        "",
        "ok       mpi: fits",
        "PROBLEM  links: slow",
        "         to do: look",
    ]


def test_a_rank_may_not_start_others(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}.items():
        alone.setenv(name, value)
    assert main(["doctor", "-n", "3"]) == 2
    assert "must not be given if MPICH's mpiexec has" in capsys.readouterr().err
