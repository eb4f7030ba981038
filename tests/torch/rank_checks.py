"""Checks that ranks do together in a job of torchrun: one start for many checks.

A program of such checks has functions of no arguments, which every rank calls in the same order,
and ends with ``perform(...)``. Of each check a rank writes into a file how the check ended. After
the first that failed on a rank, this rank does no more, since the other ranks are elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from limits import patience

ROOT = Path(__file__).parents[2]
PASSED = "passed"
TIMEOUT_S = 120  #: of a job


def rank_environment(**more: str) -> dict[str, str]:
    """Without what tells a process that it is a rank of a job, as pytest may be one."""
    from parallel_sgd.communication import without_launcher

    paths = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return without_launcher(os.environ) | own | more


def outcomes(program: str, ranks: int, folder: Path, *arguments: str) -> dict[str, list[str]]:
    """Start a program on some ranks; return how each check ended, on each rank that ended it."""
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    path = str(Path(__file__).parent / program)
    started = time.monotonic()
    done = subprocess.run(
        [*launch, "--nproc-per-node", str(ranks), path, str(folder), *arguments],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * patience(),
    )
    print(done.stdout, done.stderr, sep="\n")
    print(f"{program} on {ranks} ranks: {time.monotonic() - started:.1f} s")
    found: dict[str, list[str]] = {}
    for rank in range(ranks):
        for name, outcome in json.loads((folder / f"checks.{rank}").read_text()).items():
            found.setdefault(name, []).append(outcome)
    assert done.returncode == (any(o != PASSED for each in found.values() for o in each))
    return found


def require(found: Mapping[str, list[str]], name: str, ranks: int) -> None:
    """The check was done on all ranks, and passed."""
    ended = found.get(name, [])
    failed = [outcome for outcome in ended if outcome != PASSED]
    assert not failed, "\n".join(failed)
    assert len(ended) == ranks, f"{name} was not done by {ranks - len(ended)} ranks"


def wait_for_threads_of_pytorch() -> None:
    """Let the threads of gloo release the tensors of the latest collective.

    They need Python's lock for that, and a thread that asks for the lock while Python ends aborts
    the process.
    """
    time.sleep(0.5)


def perform(checks: Mapping[str, Callable[[], object]], rank: int, folder: Path) -> None:
    """Do all checks in order, until one fails on this rank."""
    done: dict[str, str] = {}
    for name, check in checks.items():
        begun = time.monotonic()
        try:
            check()
            done[name] = PASSED
        except BaseException:
            done[name] = f"{name} on rank {rank}:\n{traceback.format_exc()}"
        if rank == 0:
            print(f"{name}: {time.monotonic() - begun:.2f} s", flush=True)
        (folder / f"checks.{rank}").write_text(json.dumps(done))
        if done[name] != PASSED:
            wait_for_threads_of_pytorch()
            sys.exit(1)
    wait_for_threads_of_pytorch()
