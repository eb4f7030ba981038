"""Compare ranks as threads with ranks over MPI that are killed at the same call.

    .venv/openmpi/bin/python tests/exploration/agrees_with_mpi.py --cases 50

Each case is drawn by its seed: a program of `explored`, three or four ranks, and one or two ranks
that are killed at a call. The case is run as threads in several random orders, and over Open MPI
with `--survive`. What the remaining ranks have at their end must be the same to the bit: the model,
the clock, the samples trained again, and the ranks that are left. Where the orders show several
outcomes, that of MPI must be among them. The calls that each rank has made are compared, too: their
number may depend on the order in which the threads of a rank hear of a failure.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]

from killed import TIMEOUT_S, Calls, Kill, program_of, run  # noqa: E402
from limits import patience  # noqa: E402

from parallel_sgd.communication import simulate_recovery, without_launcher  # noqa: E402
from parallel_sgd.communication.background import uncollected  # noqa: E402
from parallel_sgd.runtime import SimulatedFailure  # noqa: E402
from parallel_sgd.testing.exploration.explore import _no_collection  # noqa: E402
from parallel_sgd.testing.exploration.faults import SLOW_S, Planned  # noqa: E402
from parallel_sgd.testing.exploration.scheduler import Schedule, Strategy  # noqa: E402
from parallel_sgd.testing.exploration.strategies import (  # noqa: E402
    Deviations,
    Priorities,
    RandomOrder,
)

PROGRAMS = (
    "sync",
    "1 bit",
    "4 bits, overlap",
    "block momentum",
    "8 bits, double buffering",
    "session, ranks",
    "2 bits, entropy, pipelined",
    "block momentum, overlap, 8 bits",
    "PowerSGD",
    "DiLoCo",
    "2 servers",
    "sync rounds, 2 servers",
)
SCHEDULES = 20  #: of a case
MORE = 4  #: times as many, before an outcome over MPI counts as none of theirs
LATE, TWICE = 0.7, 0.25  #: shares of late kills, and of cases with two
LAUNCH_S = 90.0  #: longest time of a job on an idle machine

Facts = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A program with ranks that are killed.

    Args:
        program: name of a configuration in `explored`.
    """

    seed: int
    program: str
    ranks: int
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        kills = " and ".join(map(str, self.kills))
        return f"case {self.seed}: {self.program}, {self.ranks} ranks, {kills}"


def as_threads(
    case: Case, strategy: Strategy, planned: Planned, logs: dict[int, Calls] | None = None
) -> tuple[Facts, Schedule]:
    """Run a case as threads in an order. Return the outcome, and what was run."""
    schedule, results = Schedule(strategy, planned), list[Any]()
    before = uncollected()

    def die(rank: int) -> NoReturn:
        schedule.failed.append(rank)  # nothing that it does from now on is seen
        raise SimulatedFailure

    with tempfile.TemporaryDirectory() as folder, _no_collection():
        program = program_of(case.program, Path(folder))

        def main() -> None:
            results.extend(
                simulate_recovery(
                    case.ranks,
                    lambda comm: run(program, comm, case.kills, die, logs),
                    timeout_s=TIMEOUT_S,
                )
            )

        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            try:
                schedule.run(main)
            except Exception as error:
                return {"error": type(error).__name__, "text": str(error)}, schedule
    unheard = [task.error() for task in uncollected() if task not in before]
    assert not unheard, f"nobody has asked for the error of a thread: {unheard}"
    ended = {str(rank): facts for rank, facts in enumerate(results) if facts is not None}
    return ended, schedule


def explored(case: Case, first: int, schedules: int) -> Counter[str]:
    """Run a case in random orders. Return how often each outcome was seen."""
    _, plain = as_threads(case, Deviations({}), Planned())
    outcomes = Counter[str]()
    for number in range(first, first + schedules):
        random = Random(f"{case.seed} {number}")
        planned = Planned(random=random)
        if random.random() < 0.3:
            planned.slow, planned.slow_s = random.choice((0.01, 0.1, 0.5)), random.choice(SLOW_S)
        order = RandomOrder(random) if number % 2 else Priorities(random, plain.points)
        outcomes[text_of(as_threads(case, order, planned)[0])] += 1
    return outcomes


def text_of(outcome: Facts, *, calls: bool = True) -> str:
    """Return an outcome as a text; of an error, its class.

    Args:
        calls: with the number of calls of each rank.
    """
    if "error" in outcome:
        return json.dumps({"error": outcome["error"]})
    left_out = () if calls else ("calls",)
    shown = {
        rank: {name: fact for name, fact in facts.items() if name not in left_out}
        for rank, facts in outcome.items()
    }
    return json.dumps(shown, sort_keys=True)


def without_calls(texts: Iterable[str]) -> set[str]:
    return {text_of(json.loads(text), calls=False) for text in texts}


def drawn(seed: int, programs: Sequence[str] = PROGRAMS) -> Case:
    """Draw a case. Each kill is at a call that the rank comes to, if those before are late."""
    random = Random(seed)
    program, ranks = programs[seed % len(programs)], random.choice((3, 4))
    victims = random.sample(range(ranks), 2 if random.random() < TWICE else 1)
    kills: tuple[Kill, ...] = ()
    for victim in victims:
        logs: dict[int, Calls] = {}
        certain = tuple(Kill(kill.rank, kill.name, kill.number, True) for kill in kills)
        as_threads(Case(seed, program, ranks, certain), Deviations({}), Planned(), logs)
        log = logs[victim].log
        # Before all ranks have made a learner, a launcher starts anew. And in a second failure:
        begin = 1 + next((k for k, call in enumerate(log) if call[2] == "reconfigure"), 0)
        name, number, _ = random.choice(log[begin - bool(kills) :])
        kills += (Kill(victim, name, number, random.random() < LATE),)
    return Case(seed, program, ranks, kills)


def over_mpi(case: Case) -> Facts:
    """Run a case over MPI. Return the outcome."""
    given = json.dumps([case.program, [asdict(kill) for kill in case.kills]])
    command = [sys.executable, "-m", "parallel_sgd", "run", "-n", str(case.ranks), "--survive"]
    environ = without_launcher(os.environ) | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        with output.open("wb") as file:
            job = subprocess.Popen(
                [*command, str(HERE / "killed.py"), given],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                code: int | str = job.wait(LAUNCH_S * patience())
            except subprocess.TimeoutExpired:
                code = "none in time"
                with suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        reports = {
            path.stem.removeprefix("rank-"): json.loads(path.read_text())
            for path in sorted(Path(folder).glob("rank-*.json"))
        }
        said = output.read_text(errors="replace")
    for report in reports.values():
        if "error" in report:
            return report
    if code != 0:
        return {"error": f"exit code {code}", "text": said[-3000:]}
    return reports


@dataclass
class Compared:
    """A case in both worlds.

    Attributes:
        outcomes: of the explored schedules, how often each was seen.
        mpi: the outcome over MPI.
    """

    case: Case
    outcomes: Counter[str]
    mpi: Facts

    @property
    def agrees(self) -> bool:
        return text_of(self.mpi, calls=False) in without_calls(self.outcomes)

    @property
    def exact(self) -> bool:
        """True if all orders have the same outcome, and it is that of MPI."""
        return self.agrees and len(without_calls(self.outcomes)) == 1

    @property
    def same_calls(self) -> bool:
        """True if in an order with the outcome of MPI each rank makes as many calls."""
        return text_of(self.mpi) in self.outcomes

    def row(self) -> dict[str, Any]:
        """Return the case in a form for JSON, with what a remaining rank has at its end."""
        case = self.case
        kept = ("model", "samples", "ranks", "samples_trained_again", "residual_values_lost")
        one = next(iter(self.mpi.values())) if "error" not in self.mpi else self.mpi
        return {
            "seed": case.seed,
            "program": case.program,
            "ranks": case.ranks,
            "kills": [str(kill) for kill in case.kills],
            "schedules": self.outcomes.total(),
            "outcomes": len(without_calls(self.outcomes)),
            "agrees": self.agrees,
            "same_calls": self.same_calls,
            "mpi": {name: one[name] for name in (*kept, "error") if name in one},
        }


def compare(case: Case, schedules: int = SCHEDULES) -> Compared:
    """Run a case in both worlds; in more orders, if none has the outcome over MPI."""
    outcomes = explored(case, 0, schedules)
    compared = Compared(case, outcomes, over_mpi(case))
    if not compared.agrees and not all(kill.late for kill in case.kills):
        outcomes += explored(case, schedules, MORE * schedules)
    return compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--out", default=None, help="a file for the results, as JSON")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    done: list[Compared] = []
    for seed in range(given.seed, given.seed + given.cases):
        began = time.monotonic()
        compared = compare(drawn(seed))
        done.append(compared)
        word = "exact" if compared.exact else "agrees" if compared.agrees else "DIFFERS"
        seconds = time.monotonic() - began
        print(
            f"{compared.case}: {len(without_calls(compared.outcomes))} outcomes of "
            f"{compared.outcomes.total()} schedules; MPI {word}"
            f"{'' if compared.same_calls else ', not in its calls'} ({seconds:.0f} s)",
            flush=True,
        )
        if not compared.agrees:
            for text, times in compared.outcomes.most_common():
                print(f"  threads, {times} times: {text}")
            print(f"  MPI: {text_of(compared.mpi)}\n{compared.mpi.get('text', '')}", flush=True)
        if given.out:
            write(Path(given.out), done)
    print(counts_of(done))
    return 0 if all(one.agrees for one in done) else 1


def counts_of(done: Sequence[Compared]) -> dict[str, int]:
    return {
        "cases": len(done),
        "agree": sum(one.agrees for one in done),
        "agree, with one outcome in all orders": sum(one.exact for one in done),
        "agree, also in the number of calls": sum(one.same_calls for one in done),
    }


def write(path: Path, done: Sequence[Compared]) -> None:
    """Write the results, a line for each case."""
    head = {
        "title": "Ranks killed at the same call, as threads and over MPI",
        "mpi": f"Open MPI {version('openmpi')}",
        "counts": counts_of(done),
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    rows = ",\n".join(f"  {json.dumps(one.row())}" for one in done)
    path.write_text("\n".join(["{", *lines, ' "rows": [', rows, " ]", "}"]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
