"""What a rank finds out about its host."""

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

from ...launcher.cores import usable_cores
from ...launcher.interfaces import interfaces
from ...launcher.mpiexec import bound_mpi
from ...version import __version__

ROUNDS = 7  #: of a measurement, of which the best counts


@dataclass(frozen=True)
class Facts:
    """Of one rank, and its host.

    Attributes:
        versions: of what should be the same everywhere, by name.
        threads: that this rank's libraries start, by the environment; None: one for each core.
        load: processes that wanted a core in the last minute, this job's start included.
        shared_memory: bytes of /dev/shm, and how many of them are free; None: it has none.
        addresses: of its own name; none where the name does not resolve.
        networks: its interfaces that are up and no loopback, with their networks.
        congestion_control: by what TCP finds out how fast to send; "" where it is not told.
        open_files, locked_memory: limits of this process (-1: none); bytes of memory.
        rdma: whether it has adapters that lock memory.
        axpy, product: bytes and operations a second, of a host's first rank; 0 for the others.
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
    """This rank's. Local. Cost: some tenths of a second where it measures.

    Args:
        host: its name, as the ranks compare it.
        measures: whether it is the first of its host, which finds out how fast that is, and what
            is installed.

    Raises:
        UserError: mpi4py finds no MPI library in a process of its own.
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
            (one.name, str(one.address.network)) for one in interfaces() if not one.loopback
        ),
        congestion_control=_text("/proc/sys/net/ipv4/tcp_congestion_control"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        rdma=any(Path("/sys/class/infiniband").glob("*")),
        axpy=_axpy() if measures else 0.0,
        product=_product() if measures else 0.0,
    )


def _versions() -> dict[str, str]:
    mpi = bound_mpi()
    installed = {"parallel_sgd": __version__, "python": platform.python_version()}
    for name in ("numpy", "numba", "mpi4py"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "none"
    return {**installed, "MPI": f"{mpi['vendor']} {mpi['version']}"}


def _threads() -> int | None:
    """The largest number that a library is told."""
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
    """Bytes a second of x += y, in arrays that no cache holds."""
    x, y = np.zeros(8 << 20, np.float32), np.ones(8 << 20, np.float32)
    return 3 * x.nbytes / _best_s(lambda: np.add(x, y, out=x))


def _product() -> float:
    """Floating-point operations a second of a product of matrices."""
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
