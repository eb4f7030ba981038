"""Run histories of operations for a time: `make explore-histories SECONDS=...`.

The seed is printed, and the shortest history that fails.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from itertools import count, cycle
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

AT_A_TIME = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    from histories import run_machine
    from run_explored import seed_of_today
    from test_failure_history import FailureHistory
    from test_learner_history import LearnerHistory
    from test_served_history import ServedHistory

    machines = [LearnerHistory, FailureHistory, ServedHistory]
    warnings.simplefilter("ignore")
    first = seed_of_today() if given.seed is None else given.seed
    until = time.monotonic() + given.seconds
    for number, machine in zip(count(first), cycle(machines)):
        if time.monotonic() >= until:
            print(f"{AT_A_TIME * (number - first)} histories; seed {first}")
            return
        print(f"{machine.__name__}: seed {number}", flush=True)
        run_machine(machine, AT_A_TIME, 10, first=number)


if __name__ == "__main__":
    main()
