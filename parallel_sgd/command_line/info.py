"""`parallel-sgd info`: what this environment has to work with, and whether its parts fit."""

from __future__ import annotations

import importlib
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from ..communication.launched import (
    launched_local_size,
    launched_rank,
    launched_size,
    launcher_name,
    launcher_starts,
    same_mpi_family,
)
from ..errors import UserError
from .cores import all_cores, usable_cores
from .mpi_runtime import bound_mpi, find_mpiexecs, identify
from .parser import Parser

__all__ = ["collect", "main", "package_version"]


def main(argv: Sequence[str]) -> int:
    """`parallel-sgd info`: returns 0; under mpiexec rank 0 speaks for all."""
    parser = Parser(
        prog="parallel-sgd info",
        description="Show MPI, mpiexec and whether they fit, cores and ranks, GPUs, and versions. "
        "Under mpiexec, rank 0 shows it.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    given = parser.parse_args(argv)
    if launched_rank():
        return 0
    found = collect()
    print(json.dumps(found, indent=2) if given.json else _table(found), flush=True)
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """All that is known, by section; a value that could not be found out is a line that says why.

    Local. Starts MPI in a process of its own, and CUDA (through CuPy) in this one.
    """
    mpi = _mpi()
    return {
        "versions": {
            "parallel_sgd": package_version(),
            "python": platform.python_version(),
            **{name: _version(name) for name in ("numpy", "numba", "mpi4py")},
        },
        "mpi": mpi,
        "mpiexec": _mpiexec(mpi.get("vendor")),
        "cores": _cores(mpi.get("vendor")),
        "gpus": _gpus(),
    }


def package_version() -> str:
    """The version of this package."""
    package = importlib.import_module(__package__.partition(".")[0])
    return str(getattr(package, "__version__", _version("parallel_sgd")))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _mpi() -> dict[str, Any]:
    try:
        found = bound_mpi(initialize=True)
    except UserError as error:
        return {"error": str(error)}
    aware = found.get("cuda_aware")
    why = {True: "yes", False: "no (this library was built without)", None: "unknown"}
    return {
        "vendor": found["vendor"],
        "version": found["version"],
        "standard": found["standard"],
        "library": found["library"] or "unknown",
        "thread_level": found.get("thread_level", "unknown (MPI did not start)"),
        "cuda_aware": why[aware],
    }


def _mpiexec(vendor: str | None) -> dict[str, Any]:
    """The mpiexec that `parallel-sgd run` would take, or else the first there is."""
    every = []
    for path in find_mpiexecs():
        try:
            every.append(identify(path))
        except UserError as error:
            return {"path": path, "error": str(error)}
    if not every:
        return {"error": "there is none beside python or in PATH"}
    fits = [each for each in every if vendor and same_mpi_family(each.vendor or "", vendor)]
    chosen = (fits or every)[0]
    found: dict[str, Any] = {
        "path": chosen.path,
        "vendor": chosen.vendor or "unknown",
        "version": chosen.version or "unknown",
        "matches_mpi": bool(fits),
    }
    if fits and every[0] not in fits:
        found["passed_over"] = f"{every[0].path} ({every[0].vendor or 'unknown vendor'})"
    return found


def _cores(vendor: str | None) -> dict[str, Any]:
    usable, size, local = usable_cores(), launched_size(), launched_local_size()
    found: dict[str, Any] = {"in_this_machine": all_cores(), "usable_by_this_process": usable}
    if size is None:
        found |= {
            "launcher": "none: one rank has all cores; mpiexec shares them among its ranks",
            "ranks": 1,
            "cores_per_rank": usable,
        }
    else:
        name = launcher_name()
        found |= {"launcher": name, "ranks": size}
        if vendor and name and not launcher_starts(name, vendor):
            found["launcher_matches_mpi"] = False
        if local:
            found |= {
                "ranks_on_this_node": local,
                "cores_per_rank": min(usable, max(1, all_cores() // local)),
            }
    return found


def _gpus() -> dict[str, Any]:
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError:
        return {"found": "unknown (cupy is not installed)"}
    except Exception as error:  # whatever a broken CUDA installation brings
        return {"found": f"unknown (cupy cannot be imported: {_first_line(error)})"}
    found: dict[str, Any] = {"cupy": cupy.__version__}
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
        for index in range(count):
            properties = runtime.getDeviceProperties(index)
            found[str(index)] = (
                f"{properties['name'].decode()}, {properties['totalGlobalMem'] / 2**30:.0f} GiB, "
                f"sm_{properties['major']}{properties['minor']}"
            )
    except Exception as error:  # no driver, no device, no permission: each its own class
        return found | {"found": f"none ({_first_line(error)})"}
    return found if count else found | {"found": "none"}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _table(sections: dict[str, dict[str, Any]]) -> str:
    """Sections as aligned text."""
    width = max(len(name) for section in sections.values() for name in section)
    lines = []
    for title, section in sections.items():
        lines.append({"mpi": "MPI", "gpus": "GPUs"}.get(title, title))
        for name, value in section.items():
            shown = {True: "yes", False: "NO"}[value] if isinstance(value, bool) else value
            lines.append(f"  {name.replace('_', ' '):<{width}}  {shown}")
    return "\n".join(lines)
