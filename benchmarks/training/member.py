"""A rank of either side: waits quietly, and takes steps at the conductor's commands.

Both sides run this loop, with a `Trainer` each.
"""

from __future__ import annotations

import gc
import json
import socket
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from .tasks import SEED, TASKS, Array


class Trainer(Protocol):
    """A contender's model in training on this rank."""

    def step(self, x: Array, y: Array) -> float:
        """Train on this rank's minibatch; return the mean loss before the step, not finite after
        divergence."""

    def values(self) -> Array:
        """Return the parameters as a vector, in the order and shapes of our models."""

    def finish(self) -> None:
        """Complete all work under way. Collective."""


Make = Callable[[str, str, float, int], Trainer]
"""A trainer of a contender and a task, both by name, with a learning rate and the seed of the
initial model. Collective."""


class Member:
    """A rank at the conductor's commands.

    Args:
        rank, ranks: number of this rank on its side, and count of ranks.
        make: see `Make`.
        barrier: waits for all ranks of this side.
    """

    def __init__(self, rank: int, ranks: int, make: Make, barrier: Callable[[], object]) -> None:
        self.rank, self.ranks, self.make, self.barrier = rank, ranks, make, barrier
        self.trainer: Trainer | None = None
        self.task, self.seed, self.taken = "", SEED, 0
        self.data: dict[tuple[str, int], tuple[Array, Array]] = {}  #: by task and seed
        self.test: dict[str, tuple[Array, Array]] = {}

    def begin(self, contender: str, task: str, lr: float, seed: int = SEED) -> dict[str, Any]:
        """Take up a contender, from the task's initial model."""
        self.task, self.seed, self.taken = task, seed, 0
        if (task, seed) not in self.data:
            self.data[task, seed] = TASKS[task].minibatches(self.rank, self.ranks, seed)
        self.trainer = self.make(contender, task, lr, seed)
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        """Take `count` steps, all ranks at once.

        Returns:
            "seconds": of all steps; "losses": of each; "digest": of the last model; "peak_bytes":
            the most memory of this process until then.
        """
        assert self.trainer is not None
        x, y = self.data[self.task, self.seed]
        losses = []
        self.barrier()
        begin = time.perf_counter()
        for t in range(self.taken, self.taken + count):
            losses.append(self.trainer.step(x[t % len(x)], y[t % len(y)]))
        seconds = time.perf_counter() - begin
        self.barrier()  # what others still wait for is sent
        self.taken += count
        peak = memory_bytes("VmHWM")  # without the copies for the digest
        digest = zlib.crc32(self.trainer.values().data)
        return {"seconds": seconds, "losses": losses, "digest": digest, "peak_bytes": peak}

    def evaluate(self) -> dict[str, Any]:
        """Return the test loss in nats, with the same model and code on both sides. Local."""
        assert self.trainer is not None
        task = TASKS[self.task]
        if self.task not in self.test:
            assert task.test is not None
            self.test[self.task] = task.test()
        return {"loss": task.test_loss(self.trainer.values(), *self.test[self.task])}

    def memory(self) -> dict[str, Any]:
        """Return the memory of this process. Local."""
        return {"bytes": memory_bytes("VmRSS")}

    def end(self) -> dict[str, Any]:
        """Finish the contender, and free its memory."""
        assert self.trainer is not None
        self.trainer.finish()
        self.trainer = None
        gc.collect()  # a learner's parts know each other
        return {}

    def follow(self, path: str, side: str) -> None:
        """Obey the conductor's commands, until the end of its socket."""
        follow(self, self.rank, path, side)


def memory_bytes(name: str) -> int:
    """Return the memory of this process: "VmRSS" now, or "VmHWM" at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(size) << 10  # from KiB


def follow(member: object, rank: int, path: str, side: str) -> None:
    """Call the methods named by the conductor, until the end of its socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw") as lines:
            _write(lines, {"side": side, "rank": rank})
            for line in lines:
                command, options = json.loads(line)
                _write(lines, getattr(member, command)(**options))


def _write(lines: Any, content: Any) -> None:
    lines.write(json.dumps(content) + "\n")
    lines.flush()
