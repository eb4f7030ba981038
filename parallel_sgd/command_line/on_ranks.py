"""Start ranks that measure, and read what these have found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..communication import Communicator
from ..communication.entry_point import abort_on_error
from ..launcher import read_hostfile


def slots_of(hostfile: str | None) -> int | None:
    """Return the number of slots in a hostfile, or None without a hostfile."""
    return None if hostfile is None else read_hostfile(hostfile).total_slots()


def ask_ranks(
    module: str, ranks: int, hostfile: str | None, options: Sequence[str] = ()
) -> dict[str, Any] | int:
    """Run a module on ranks started for it.

    Args:
        module: calls `answer`.
        ranks: number of ranks.
        hostfile, options: as for `parallel-sgd run`.
    Returns:
        The findings of the ranks, or the exit code if there are none.
    """
    hosts = [] if hostfile is None else ["--hostfile", hostfile]
    run = [sys.executable, "-m", "parallel_sgd", "run", "-n", str(ranks), *hosts, *options]
    # bounded: that job's ranks have a timeout_s
    job = subprocess.run(
        [*run, "-m", module],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = [line for line in job.stdout.splitlines() if line.startswith("{")]
    if job.returncode != 0 or not lines:
        return job.returncode
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def answer(measure: Callable[[], dict[str, Any]]) -> None:
    """Print the findings of all ranks: the main program of a module for `ask_ranks`. Collective."""
    with abort_on_error():
        found = measure()
        if Communicator.world().rank == 0:
            print(json.dumps(found, allow_nan=False), flush=True)
