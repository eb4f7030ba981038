"""Starts ranks as Lightning does: processes with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

A process that has imported PyTorch and the package forks the ranks of all jobs, several jobs at a
time: the imports would take longer than the jobs.

    python forked_ranks.py FOLDER      reads jobs.json there, writes ends.json

Its programs find `train`, which has run once, so that no rank has to load the kernels.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from ports import free_port

import parallel_sgd as psgd
import parallel_sgd.torch
from parallel_sgd.communication.c10d import world

assert parallel_sgd.torch and world  # imported here, and not by every rank

AT_ONCE = 4  #: jobs
LONGEST_S = 100.0  #: of a job; what is left then is killed, and its code is None

ALGORITHMS = {
    "background": psgd.DiLoCo(block_samples=20, overlap_samples=6),
    "server": psgd.DataParallelASGD(sync_period=4),
}


def train(
    comm: psgd.Communicator,
    algorithm: str,
    steps: int = 20,
    ends: Callable[[int], object] = lambda step: False,
) -> None:
    """Take steps, until `ends` is true of one."""
    parameters = psgd.Parameters({"w": np.zeros(300, np.float32)})
    learner = psgd.Learner(parameters, psgd.SGD(lr=0.1), ALGORITHMS[algorithm], comm)
    serves = algorithm == "server" and comm.rank == comm.size - 1
    for step in range(0 if serves else steps):
        if ends(step):
            return
        learner.gradient["w"][:] = comm.rank + 1
        learner.step(samples=2)
    learner.finish()


class Job:
    """The ranks of a job.

    Attributes:
        codes: exit code of each rank that has ended, negative for a signal.
        seconds: from the start to the end of each.
    """

    def __init__(self, folder: Path, number: int, job: dict[str, object]) -> None:
        self.folder, self.number, self.began = folder, number, time.monotonic()
        self.codes: dict[int, int | None] = {}
        self.seconds: dict[int, float] = {}
        self.ranks: dict[int, int] = {}
        #: Ranks that end by themselves in no case: stopped ones. They are killed after the others.
        self.stopped: list[int] = job["stopped"]  # type: ignore[assignment]

    def look(self) -> bool:
        """Collect the ranks that have ended; return True after the last of them."""
        late = time.monotonic() - self.began > LONGEST_S
        left = [rank for rank in self.ranks if rank not in self.codes]
        if late or (left and left == self.stopped):
            for rank in left:
                os.kill(self.ranks[rank], signal.SIGKILL)
        for rank in left:
            process, status = os.waitpid(self.ranks[rank], 0 if late else os.WNOHANG)
            if process:
                self.codes[rank] = None if late else os.waitstatus_to_exitcode(status)
                self.seconds[rank] = time.monotonic() - self.began
        return len(self.codes) == len(self.ranks)

    def end(self) -> list[dict[str, object]]:
        return [
            {
                "code": self.codes[rank],
                "seconds": self.seconds[rank],
                "out": (self.folder / f"{self.number}-{rank}.out").read_text(),
                "err": (self.folder / f"{self.number}-{rank}.err").read_text(),
            }
            for rank in sorted(self.ranks)
        ]


def start(folder: Path, number: int, given: dict[str, object]) -> Job | str:
    """Start a job; in a rank, return its program."""
    job, size, port = Job(folder, number, given), given["ranks"], free_port()
    assert isinstance(size, int)
    for rank in range(size):
        job.ranks[rank] = os.fork()
        if job.ranks[rank]:
            continue
        for name, descriptor in (("out", 1), ("err", 2)):
            flags = os.O_WRONLY | os.O_CREAT
            os.dup2(os.open(folder / f"{number}-{rank}.{name}", flags), descriptor)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ.update(given["environ"])  # type: ignore[call-overload]
        return str(given["program"])
    return job


def main() -> str | None:
    """Run all jobs; in a rank, return its program."""
    folder = Path(sys.argv[1])
    waiting = list(enumerate(json.loads((folder / "jobs.json").read_text())))
    running: list[Job] = []
    ended: dict[int, object] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            started = start(folder, *waiting.pop(0))
            if isinstance(started, str):
                return started
            running.append(started)
        for job in [job for job in running if job.look()]:
            running.remove(job)
            ended[job.number] = job.end()
        time.sleep(0.01)
    (folder / "ends.json").write_text(json.dumps([ended[number] for number in sorted(ended)]))
    return None


for name in ALGORITHMS:
    psgd.simulate(3, lambda comm, name=name: train(comm, name))  # type: ignore[misc]
gc.collect()
gc.freeze()  # no rank copies what it never changes
if program := main():
    exec(compile(program, "program.py", "exec"), {"__name__": "__main__", "train": train})
