"""Collect facts about a rank's host."""

from __future__ import annotations

import os
import platform
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np

from ...communication import interfaces
from ...communication.job_environment import TORCHRUN_RANKS
from ...launcher import bound_mpi, usable_cores
from ...version import __version__

ROUNDS = 7  #: repetitions of a measurement; the best counts


@dataclass(frozen=True)
class Facts:
    """Facts about a rank and its host.

    Attributes:
        host: the name of the host.
        versions: version by name, for software that should be the same on all hosts.
        cores: the number of cores usable by this rank.
        threads: the number of threads of this rank's libraries, from the environment; None: one for
            each core.
        load: mean number of processes running or waiting for a core in the last minute, including
            this job's start.
        shared_memory: size and free space of /dev/shm, in bytes; None if absent.
        addresses: the addresses of the host's own name; empty if the name does not resolve.
        networks: the interfaces in use except loopbacks, with their networks.
        congestion_control: the congestion control of TCP; "" if unknown.
        open_files, locked_memory: limits of this process (-1: none); locked memory in bytes.
        rdma: True if the host has RDMA adapters, and so needs locked memory.
        axpy, product: bytes and operations per second, on the first rank of a host; else 0.
    """

    host: str
    versions: dict[str, str] = field(default_factory=dict)
    cores: int = 1
    threads: int | None = None
    load: float = 0.0
    shared_memory: tuple[int, int] | None = None
    addresses: tuple[str, ...] = ()
    networks: tuple[tuple[str, str], ...] = ()
    congestion_control: str = ""
    open_files: int = -1
    locked_memory: int = -1
    rdma: bool = False
    axpy: float = 0.0
    product: float = 0.0


def collect_facts(host: str, *, measures: bool) -> Facts:
    """Collect the facts of this rank. Local. Cost: some tenths of a second if it measures.

    Args:
        host: the name of the host, as compared between ranks.
        measures: True on the first rank of a host: also measure the host's speed, and read the
            versions.

    Raises:
        UserError: mpi4py finds no MPI library in a separate process.
    """
    return Facts(
        host=host,
        versions=_versions() if measures else {},
        cores=usable_cores(),
        threads=_threads(),
        load=os.getloadavg()[0],
        shared_memory=_shared_memory("/dev/shm"),
        addresses=_addresses(socket.gethostname()),
        networks=tuple(
            (interface.name, str(interface.address.network))
            for interface in interfaces()
            if not interface.loopback
        ),
        congestion_control=_text("/proc/sys/net/ipv4/tcp_congestion_control"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        rdma=any(Path("/sys/class/infiniband").glob("*")),
        axpy=_axpy() if measures else 0.0,
        product=_product() if measures else 0.0,
    )


def _versions() -> dict[str, str]:
    by_torchrun = TORCHRUN_RANKS in os.environ
    installed = {"parallel_sgd": __version__, "python": platform.python_version()}
    for name in ("numpy", "numba", "torch" if by_torchrun else "mpi4py"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "none"
    if by_torchrun:
        return installed
    mpi = bound_mpi()
    return {**installed, "MPI": f"{mpi['vendor']} {mpi['version']}"}


def _threads() -> int | None:
    """Return the largest number of threads set for a library, or None."""
    names = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    given = [int(value) for value in map(os.environ.get, names) if value and value.isdecimal()]
    return max(given, default=None)


def _shared_memory(path: str) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _addresses(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _axpy() -> float:
    """Return the bytes per second of x += y, with arrays too large for any cache."""
    x, y = np.zeros(8 << 20, np.float32), np.ones(8 << 20, np.float32)
    return 3 * x.nbytes / _best_s(lambda: np.add(x, y, out=x))


def _product() -> float:
    """Return the floating-point operations per second of a matrix product."""
    a = np.ones((512, 512), np.float32)
    out = np.empty_like(a)
    return 2 * 512**3 / _best_s(lambda: np.matmul(a, a, out=out))


def _best_s(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return max(min(seconds), 1e-9)
