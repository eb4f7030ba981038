"""Explore all configurations for a time: `make explore SECONDS=...`.

The seed of the first schedule is printed. Each fault is printed with the configuration and the name
of its schedule, by which `--configuration NAME --only SCHEDULE` repeats it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

ROUND = 20  #: schedules of a configuration at a time


def seed_of_today() -> int:
    """The same for all who explore on this day of the calendar."""
    return int(datetime.now(UTC).strftime("%Y%m%d")) * 1_000_000


def work(share: tuple[int, int], names: list[str], seed: int, until: float) -> list[dict[str, Any]]:
    """Explore every so many-th configuration, until a time. Return the counts of each."""
    import numpy as np
    from explored import CONFIGURATIONS

    from parallel_sgd.testing import ScheduleFailed

    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    cores = sorted(os.sched_getaffinity(0))
    # One thread runs at a time: on one core the next one need not be woken elsewhere.
    os.sched_setaffinity(0, {cores[share[0] % len(cores)]})
    counts: dict[str, dict[str, Any]] = {}
    number, of = share
    for name in names[number::of]:
        counts[name] = {"name": name, "schedules": 0, "points": 0, "failures": 0, "seconds": 0.0}
        counts[name] |= {"outcomes": Counter(), "faults": []}
    while time.monotonic() < until:
        # The one with the least time so far. Slow configurations run fewer schedules.
        count = min(counts.values(), key=lambda row: row["seconds"])
        began, at = time.monotonic(), seed + count["schedules"]
        end = at + ROUND
        while at < end:
            try:
                done = CONFIGURATIONS[count["name"]].explore(schedules=end - at, seed=at)
            except ScheduleFailed as error:
                print(f"\n{count['name']}: {error}", flush=True)
                count["faults"].append(error.schedule)
                ran = max(int(error.schedule.split(":")[1].split(",")[0]) - at, 0)
                count["schedules"] += ran + 1
                at += ran + 1
                continue
            at = end
            count["schedules"] += done.schedules
            count["points"] += done.points
            count["failures"] += done.failures
            count["outcomes"].update(done.outcomes)
        count["seconds"] += time.monotonic() - began
    return list(counts.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--configuration", action="append", default=None, metavar="NAME")
    parser.add_argument("--only", default=None, metavar="SCHEDULE")
    parser.add_argument("--out", default=None, help="a file for the counts, as JSON")
    given = parser.parse_args()
    from explored import CONFIGURATIONS

    names = given.configuration or list(CONFIGURATIONS)
    if given.only:
        print(CONFIGURATIONS[names[0]].explore(only=given.only))
        return 0
    seed = seed_of_today() if given.seed is None else given.seed
    print(f"{len(names)} configurations for {given.seconds:g} s; seed {seed}", flush=True)
    until = time.monotonic() + given.seconds
    processes = max(1, min(given.processes, len(names)))
    shares = [((k, processes), names, seed, until) for k in range(processes)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        rows = [row for rows in pool.map(work, *zip(*shares, strict=True)) for row in rows]
    for row in rows:
        ends = ", ".join(f"{number} {name}" for name, number in sorted(row["outcomes"].items()))
        print(
            f"{row['name']}: {row['schedules']} schedules, {row['points']} points, "
            f"{row['failures']} failures of ranks, {row['seconds']:.0f} s: {ends}"
        )
    faults = sum(len(row["faults"]) for row in rows)
    total = sum(row["schedules"] for row in rows)
    print(f"{total} schedules of {len(rows)} configurations; {faults} faults; seed {seed}")
    if given.out:
        Path(given.out).write_text(json.dumps({"seed": seed, "rows": rows}, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
