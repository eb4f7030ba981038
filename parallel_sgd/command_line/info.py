"""Show MPI, mpiexec, cores and GPUs of this environment: `parallel-sgd info`.

With --servers also show the placement of a model's parameters on parameter servers. With --links
also measure the links between ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import platform
import re
import textwrap
import zipfile
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from numpy.lib import format as npy

from ..argument_parser import Parser
from ..communication.entry_point import abort_on_error
from ..communication.job_environment import (
    launched_local_size,
    launched_rank,
    launched_size,
    launcher_name,
    launcher_supports,
    same_mpi_family,
)
from ..errors import UserError
from ..files import opened
from ..launcher import MOST_RANKS, all_cores, bound_mpi, find_mpiexecs, identify, usable_cores
from ..parameter_server.placement import DISPATCH, place
from ..validation import checked_path, integer, line_of, require_use
from .links import add_link_options, link_lines, measure_links, require_link_options


def main(argv: Sequence[str]) -> int:
    """Run `parallel-sgd info`, and return 0. Under mpiexec only rank 0 prints."""
    args = _parser().parse_args(argv)
    require_link_options(args)
    if launched_rank() and not args.links:
        return 0
    others_measure = args.links and launched_size() is not None
    with abort_on_error() if others_measure else contextlib.nullcontext():
        placement = _placement(args)  # on every rank, so that all refuse or none does
        links = measure_links(args) if args.links else None
    if launched_rank():
        return 0
    optional = {"placement": placement, "links": links}
    sections = collect() | {
        name: section for name, section in optional.items() if section is not None
    }
    print(json.dumps(sections, indent=2) if args.json else _table(sections), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="parallel-sgd info",
        description="Show MPI, mpiexec and whether they fit, cores and ranks, GPUs, and versions. "
        "Under mpiexec only rank 0 prints.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    group = parser.add_argument_group(
        "placement", "the placement of a model's parameters on parameter servers"
    )
    add = group.add_argument
    add("--servers", type=int, metavar="N", help="show the placement on N servers")
    add(
        "--model",
        metavar="FILE.npz",
        help="place the parameters in this file: model.npz of a run's folder",
    )
    add(
        "--shapes",
        action="extend",
        nargs="+",
        metavar="NAME=SHAPE",
        help="place parameters of these shapes: W1=784x128 b1=128",
    )
    rules = ", ".join(DISPATCH)
    add("--placement", metavar="RULE", help=f"{rules} (default: {next(iter(DISPATCH))})")
    add("--min-block", type=int, metavar="N", help="at least N values in a slice (default: 8192)")
    add(
        "--whole-parameters",
        action="store_true",
        default=None,
        help="do not cut parameters into slices",
    )
    add_link_options(parser)
    return parser


def collect() -> dict[str, dict[str, Any]]:
    """Return all facts about this environment, by section.

    An unknown value is a line with the reason.

    Local. Starts MPI in a separate process, and CUDA (through CuPy) in this process.
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
    """Return the version of this package."""
    package = importlib.import_module(__package__.partition(".")[0])
    return str(getattr(package, "__version__", _version("parallel_sgd")))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _mpi() -> dict[str, Any]:
    try:
        mpi = bound_mpi(initialize=True)
    except UserError as error:
        return {"error": str(error)}
    aware = mpi.get("cuda_aware")
    why = {True: "yes", False: "no (this library was built without)", None: "unknown"}
    return {
        "vendor": mpi["vendor"],
        "version": mpi["version"],
        "standard": mpi["standard"],
        "library": mpi["library"] or "unknown",
        "thread_level": mpi.get("thread_level", "unknown (MPI did not start)"),
        "cuda_aware": why[aware],
    }


def _mpiexec(vendor: str | None) -> dict[str, Any]:
    """Describe the mpiexec for `parallel-sgd run`, or else the first mpiexec found."""
    mpiexecs = []
    for path in find_mpiexecs():
        try:
            mpiexecs.append(identify(path))
        except UserError as error:
            return {"path": path, "error": str(error)}
    if not mpiexecs:
        return {"error": "no mpiexec is beside python or in PATH"}
    fits = [m for m in mpiexecs if vendor and same_mpi_family(m.vendor or "", vendor)]
    chosen = (fits or mpiexecs)[0]
    facts: dict[str, Any] = {
        "path": chosen.path,
        "vendor": chosen.vendor or "unknown",
        "version": chosen.version or "unknown",
        "matches_mpi": bool(fits),
    }
    if fits and mpiexecs[0] not in fits:
        facts["passed_over"] = f"{mpiexecs[0].path} ({mpiexecs[0].vendor or 'unknown vendor'})"
    return facts


def _cores(vendor: str | None) -> dict[str, Any]:
    usable, size, local = usable_cores(), launched_size(), launched_local_size()
    facts: dict[str, Any] = {"in_this_machine": all_cores(), "usable_by_this_process": usable}
    if size is None:
        facts |= {
            "launcher": "none: one rank has all cores; mpiexec shares them among its ranks",
            "ranks": 1,
            "cores_per_rank": usable,
        }
    else:
        name = launcher_name()
        facts |= {"launcher": name, "ranks": size}
        if vendor and name and not launcher_supports(name, vendor):
            facts["launcher_matches_mpi"] = False
        if local:
            facts |= {
                "ranks_on_this_node": local,
                "cores_per_rank": min(usable, max(1, all_cores() // local)),
            }
    return facts


def _gpus() -> dict[str, Any]:
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError:
        return {"found": "unknown (cupy is not installed)"}
    except Exception as error:  # any error of a broken CUDA installation
        return {"found": f"unknown (cupy cannot be imported: {line_of(error)})"}
    facts: dict[str, Any] = {"cupy": cupy.__version__}
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
        for index in range(count):
            properties = runtime.getDeviceProperties(index)
            facts[str(index)] = (
                f"{properties['name'].decode()}, {properties['totalGlobalMem'] / 2**30:.0f} GiB, "
                f"sm_{properties['major']}{properties['minor']}"
            )
    except Exception as error:  # no driver, no device or no permission: various classes
        return facts | {"found": f"none ({line_of(error)})"}
    return facts if count else facts | {"found": "none"}


def _placement(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the placement of the given model on parameter servers, or None without --servers."""
    options = ("model", "shapes", "placement", "min_block", "whole_parameters")
    if args.servers is None:
        for name in options:
            if getattr(args, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} needs --servers, their number")
        return None
    if (args.model is None) == (args.shapes is None):
        raise UserError(
            "--servers needs the parameters, from one of --model FILE.npz and "
            "--shapes W1=784x128 b1=128 ..."
        )
    require_use("--min-block", args.min_block, None, not args.whole_parameters, "slices")
    integer("--servers", args.servers, 1, MOST_RANKS)
    rule = next(iter(DISPATCH)) if args.placement is None else args.placement
    placement = place(
        _shapes_in(args.model) if args.shapes is None else _shapes_from(args.shapes),
        args.servers,
        dispatch=rule,
        slice_parameters=not args.whole_parameters,
        **({} if args.min_block is None else {"min_block": args.min_block}),
    )
    values = [placement.values(server) for server in range(args.servers)]
    return {
        "rule": rule,
        "values": sum(values),
        "largest": placement.largest,
        "smallest": placement.smallest,
        "servers": [
            {
                "slices": len(slices),
                "values": own,
                "float32_mb": own * 4 / 1e6,
                "share": own / max(1, sum(values)),
                "names": [slice_.label for slice_ in slices],
            }
            for own, slices in zip(values, placement.servers, strict=True)
        ],
    }


def _shapes_from(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse shapes by name, from texts like W1=784x128."""
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, numbers = text.rpartition("=")
        if not name or not re.fullmatch(r"[0-9]{1,18}(x[0-9]{1,18})*", numbers):
            raise UserError(f"--shapes: {text!r} must be like W1=784x128 or b1=128")
        if name in shapes:
            raise UserError(f"--shapes: {text!r} must name a parameter once: {name!r} came before")
        shapes[name] = tuple(map(int, numbers.split("x")))
    return shapes


def _shapes_in(model: str) -> dict[str, tuple[int, ...]]:
    """Read shapes by name from the array headers of a .npz file. No values are read."""
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    shapes: dict[str, tuple[int, ...]] = {}
    path = checked_path("--model", model, "file")
    try:
        with opened(str(path), path) as content, zipfile.ZipFile(content) as archive:
            for member in archive.namelist():
                with archive.open(member) as file:
                    shape, _, dtype = readers[npy.read_magic(file)](file)
                name = member.removesuffix(".npy")
                if dtype.kind == "i" and not shape:  # a counter among a PyTorch model's buffers
                    continue
                if dtype.kind != "f":
                    raise UserError(f"{path} must hold parameters: {name!r} is of {dtype}")
                shapes[name] = shape
    except UserError:
        raise
    except Exception as error:  # a damaged file raises various errors
        raise UserError(f"{path} must be a well-formed .npz file: {line_of(error)}") from None
    if not shapes:
        raise UserError(f"{path} must hold at least one parameter")
    return shapes


def _table(sections: dict[str, dict[str, Any]]) -> str:
    """Return sections as aligned text."""
    if "placement" in sections:
        sections = sections | {"placement": _placement_lines(sections["placement"])}
    if "links" in sections:
        sections = sections | {"links": link_lines(sections["links"])}
    width = max(len(name) for section in sections.values() for name in section)
    lines = []
    for title, section in sections.items():
        lines.append({"mpi": "MPI", "gpus": "GPUs"}.get(title, title))
        for name, value in section.items():
            shown = {True: "yes", False: "NO"}[value] if isinstance(value, bool) else str(value)
            first, *more = shown.split("\n")
            lines.append(f"  {name.replace('_', ' '):<{width}}  {first}")
            lines += [" " * (width + 4) + line for line in more]
    return "\n".join(lines)


def _placement_lines(placement: dict[str, Any]) -> dict[str, str]:
    """Return the section on placement as lines of text."""
    lines = {"rule": placement["rule"], "all servers": _amount(placement["values"])}
    for server, held in enumerate(placement["servers"]):
        count, names = len(held["names"]), ", ".join(held["names"])
        wrapped = textwrap.wrap(names, 76, break_long_words=False, break_on_hyphens=False)
        slices = (
            f"{count} slice{'s' * (count != 1)}, {_amount(held['values'])}, {held['share']:.1%}"
        )
        lines[f"server {server}"] = "\n".join([slices, *wrapped])
    largest, smallest = placement["largest"], placement["smallest"]
    ratio = f" ({largest / smallest:.2f} times as many)" if smallest else ""
    lines["largest and smallest"] = f"{largest:,} and {smallest:,} values{ratio}"
    return lines


def _amount(values: int) -> str:
    return f"{values:,} values ({values * 4 / 1e6:.2f} MB in float32)"
