"""Faults at random moments: ranks killed and stopped, links cut, disks full; and a long soak.

Every run is a short training of the digits on a few ranks, with a fault. Counted are runs that come
out as expected (all remaining ranks go on; or the job ends, not 0, in seconds; or the job resumes
from its newest checkpoint), work lost, and seconds from the fault to the first step after the
fault. Counted as failures are wrong results (ranks with different models, a model that should equal
that of an undisturbed run bit for bit and does not, a worse loss), jobs that hang, and leftovers
(processes, shared memory, temporary folders, network namespaces).

  python -m benchmarks faults --faults 100 --only survive   100 to each family
  python -m benchmarks faults --minutes 30                  all scenarios in turn
  python -m benchmarks faults soak --minutes 60             memory, descriptors and threads

The same seed has the same victims, and moments as far as a machine's pace repeats. The MPI is that
of this Python. As root each run has a private /dev/shm, so files of more programs do not count;
emulated hosts, and full disks, need root. Scenarios with options unknown to this version's
`parallel-sgd run`, and `--survive` on any MPI but Open MPI 5, are skipped with a message.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from parallel_sgd import UserError
from parallel_sgd.launcher.hosts import OPEN_MPI
from parallel_sgd.launcher.mpiexec import bound_mpi

from ..report import Report, positive
from .bench import Bench
from .child import Settings
from .families import FAMILIES
from .job import adopt_orphans
from .leftovers import namespaces_left, own_shared_memory
from .outcome import Outcome
from .scenarios import SCENARIOS, Scenario
from .soak import Soaked, measure
from .summary import Results, Summary
from .summary import read as read_file

Item = TypeVar("Item")

FAULTS, RANKS, SOAK_MINUTES = 3, 4, 60

#: Runs for each fault that is wanted, at most: some are at their end before it strikes.
RUNS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", nargs="?", choices=("kills", "soak"), default="kills", help="(default: kills)")
    add("--only", nargs="+", choices=SCENARIOS, metavar="SCENARIO", help=", ".join(SCENARIOS))
    add("--families", nargs="+", choices=FAMILIES, metavar="NAME", help=", ".join(FAMILIES))
    add(
        "--faults",
        type=positive,
        default=FAULTS,
        metavar="N",
        help="of each scenario and family, at least (default: 3)",
    )
    add("--minutes", type=float, metavar="M", help="begin nothing after so many; soak: how long")
    add("-n", "--ranks", type=positive, default=RANKS, help="of each job (default: 4)")
    add("--seed", type=int, default=0, help="of victims and moments (default: 0)")
    add("--keep", metavar="FOLDER", help="for the folders of runs that went wrong")


def read(options: argparse.Namespace) -> Report:
    return read_file(options.table)


def main(options: argparse.Namespace) -> Report:
    if options.ranks < 3:
        raise UserError(f"ranks={options.ranks} must be at least 3: one is lost, and two go on")
    adopt_orphans()
    alone = own_shared_memory()
    if not alone:
        _say("not as root: what others leave in /dev/shm is counted, too")
    with _folder(options.keep) as folder:
        if options.what == "soak":
            return Soaked(measure(folder, options.ranks, 60 * (options.minutes or SOAK_MINUTES)))
        return _kills(options, folder, alone)


def _kills(options: argparse.Namespace, folder: Path, alone: bool) -> Summary:
    mpi, possible = bound_mpi(), []
    known = subprocess.run(
        [sys.executable, "-m", "parallel_sgd", "run", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for key in options.only or SCENARIOS:
        problem = _problem(SCENARIOS[key], known, str(mpi["vendor"]), alone)
        if problem:
            _say(f"{key} is skipped: {problem}")
            continue
        names = options.families or FAMILIES
        possible.append([(key, name) for name in names if name in SCENARIOS[key].families])
    rows = in_turn(possible)
    asked = {"faults": options.faults, "ranks": options.ranks, "seed": options.seed}
    results = Results(asked | {"mpi": f"{mpi['vendor']} {mpi['version']}"})
    struck = Counter[tuple[str, str]]()
    deadline = time.monotonic() + 60 * (options.minutes or 1e9)
    with Bench(
        folder,
        ranks=options.ranks,
        seed=options.seed,
        keep=options.keep is not None,
        settings=Settings("", ""),
    ) as bench:
        try:
            for number in range(RUNS * options.faults):
                for key, name in rows:
                    if time.monotonic() > deadline or struck[key, name] >= options.faults:
                        continue
                    try:
                        outcome = bench.disturbed(SCENARIOS[key], key, name, number)
                    except (OSError, RuntimeError) as error:  # hours of others are kept
                        failed = f"no run: {type(error).__name__}: {error}"
                        outcome = Outcome(key, name, number, [failed])
                    _say(outcome.line())
                    results.outcomes.append(outcome)
                    struck[key, name] += 0 if outcome.missed else len(outcome.faults)
        except KeyboardInterrupt:
            _say("ended by Ctrl-C: this is what there is")
    results.namespaces = namespaces_left(os.getpid())
    return Summary(results)


def in_turn(lists: Sequence[Sequence[Item]]) -> list[Item]:
    """Interleave lists; each list begins with a different place.

    >>> in_turn(["abc", "def", "g"])
    ['a', 'e', 'g', 'b', 'f', 'c', 'd']
    """
    turns = range(max(map(len, lists), default=0))
    return [
        items[(turn + number) % len(items)]
        for turn in turns
        for number, items in enumerate(lists)
        if turn < len(items)
    ]


def _problem(scenario: Scenario, known: str, vendor: str, root: bool) -> str | None:
    """Say why a scenario is not possible here; None if possible.

    Args:
        known: the text of `parallel-sgd run --help`.
    """
    for option in scenario.needs:
        if option not in known:
            return f"this `parallel-sgd run` has no {option}"
    if "--survive" in scenario.needs and vendor != OPEN_MPI:
        return f"--survive needs Open MPI 5, and this is {vendor}"
    return "it needs root" if scenario.root and not root else None


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    """Make the folder of all runs: in the user's folder, or removed at the end."""
    if keep is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(prefix="runs-", dir=keep)).resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="faults-"))  # short: MPI's sockets have paths below it
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say(what: str) -> None:
    print(f"faults: {what}", file=sys.stderr, flush=True)
