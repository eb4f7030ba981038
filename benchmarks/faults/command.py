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
emulated hosts, and full disks, need root. `--survive` on any MPI but Open MPI 5 is skipped with a
message.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from itertools import chain, zip_longest
from pathlib import Path

from parallel_sgd import UserError
from parallel_sgd.launcher.hosts import OPEN_MPI
from parallel_sgd.launcher.mpiexec import bound_mpi

from ..report import Report, load, positive
from .families import FAMILIES
from .job import isolate, namespaces_left
from .results import Outcome, Results, Summary
from .run import Bench
from .scenarios import SCENARIOS
from .soak import Soak, Soaked, measure
from .target import Scenario

SOAK_MINUTES = 60
RUNS = 3  #: for each fault that is wanted, at most: some are at their end before it strikes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", nargs="?", choices=("kills", "soak"), default="kills", help="(default: kills)")
    add("--only", nargs="+", choices=SCENARIOS, metavar="SCENARIO", help=", ".join(SCENARIOS))
    add("--families", nargs="+", choices=FAMILIES, metavar="NAME", help=", ".join(FAMILIES))
    faults = "of each scenario and family, at least (default: 3)"
    add("--faults", type=positive, default=3, metavar="N", help=faults)
    add("--minutes", type=float, metavar="M", help="begin nothing after so many; soak: how long")
    add("-n", "--ranks", type=positive, default=4, help="of each job (default: 4)")
    add("--seed", type=int, default=0, help="of victims and moments (default: 0)")


def read(options: argparse.Namespace) -> Report:
    """Read the results of runs under faults, or of a soak."""
    if "outcomes" in Path(options.table).read_text():
        return Summary(load(options.table, Results))
    return Soaked(load(options.table, Soak))


def main(options: argparse.Namespace) -> Report:
    if options.ranks < 3:
        raise UserError(f"ranks={options.ranks} must be at least 3: one is lost, and two go on")
    alone = isolate()
    if not alone:
        _say("not as root: what others leave in /dev/shm is counted, too")
    with tempfile.TemporaryDirectory(prefix="faults-") as name:  # short: paths of MPI's sockets
        if options.what == "soak":
            seconds = 60 * (options.minutes or SOAK_MINUTES)
            return Soaked(measure(Path(name), options.ranks, seconds))
        return kills(options, Path(name), alone)


def kills(options: argparse.Namespace, folder: Path, root: bool) -> Summary:
    """Carry out scenarios and families in turn, until each has its faults."""
    mpi = bound_mpi()
    possible: list[list[tuple[str, str]]] = []
    names = options.families or FAMILIES
    for key in options.only or SCENARIOS:
        scenario = SCENARIOS[key]
        if reason := problem(scenario, str(mpi["vendor"]), root):
            _say(f"{key} is skipped: {reason}")
        else:
            own = [(key, name) for name in names if name in scenario.families]
            first = len(possible) % max(1, len(own))  # each begins with another family
            possible.append([*own[first:], *own[:first]])
    asked = {"faults": options.faults, "ranks": options.ranks, "seed": options.seed}
    results = Results(asked | {"mpi": f"{mpi['vendor']} {mpi['version']}"})
    struck = Counter[tuple[str, str]]()
    deadline = time.monotonic() + 60 * (options.minutes or 1e9)
    with Bench(folder, options.ranks, options.seed) as bench:
        try:
            for number in range(RUNS * options.faults):
                for key, name in filter(None, chain(*zip_longest(*possible))):
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
    results.namespaces = namespaces_left()
    return Summary(results)


def problem(scenario: Scenario, vendor: str, root: bool) -> str | None:
    """Say why a scenario is not possible here; None if possible."""
    if scenario.survive and vendor != OPEN_MPI:
        return f"--survive needs Open MPI 5, and this is {vendor}"
    return "it needs root" if (scenario.root or scenario.hosts) and not root else None


def _say(what: str) -> None:
    print(f"faults: {what}", file=sys.stderr, flush=True)
