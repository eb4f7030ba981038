"""A rank of either side: it waits without a sound, and takes steps when the conductor says so.

Both sides run this very loop, with a `Trainer` each.
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
    """One contender's model in training on this rank."""

    def step(self, x: Array, y: Array) -> float:
        """Train on this rank's minibatch; its mean loss before that, not finite where training
        has diverged."""

    def values(self) -> Array:
        """The parameters, in the order and the shapes of ours, as one vector."""

    def finish(self) -> None:
        """Complete what is under way. Collective."""


Make = Callable[[str, str, float, int], Trainer]
"""A trainer of a contender and a task, both by name, with a learning rate and the seed of the
initial model. Collective."""


class Member:
    """What a rank does at the conductor's commands.

    Args:
        rank, ranks: this one's number on its side, and how many there are.
        make: see `Make`.
        barrier: all ranks of this side are here.
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
        """Take so many steps, all ranks at once.

        Returns:
            "seconds": of all of them; "losses": of each; "digest": of the model after the last;
            "peak_bytes": the most memory that this process has had until then.
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
        """The test loss in nats, with the same model and code on both sides. Local."""
        assert self.trainer is not None
        task = TASKS[self.task]
        if self.task not in self.test:
            assert task.test is not None
            self.test[self.task] = task.test()
        return {"loss": task.test_loss(self.trainer.values(), *self.test[self.task])}

    def memory(self) -> dict[str, Any]:
        """How much this process has now. Local."""
        return {"bytes": memory_bytes("VmRSS")}

    def end(self) -> dict[str, Any]:
        """Finish with the contender, and forget it: others may need the memory."""
        assert self.trainer is not None
        self.trainer.finish()
        self.trainer = None
        gc.collect()  # a learner's parts know each other
        return {}

    def follow(self, path: str, side: str) -> None:
        """Do what the conductor says through its socket, until it closes that."""
        follow(self, self.rank, path, side)


def memory_bytes(name: str) -> int:
    """Of this process: "VmRSS", what it has, or "VmHWM", the most that it ever had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(size) << 10  # from KiB


def follow(member: object, rank: int, path: str, side: str) -> None:
    """Call the methods of a member that the conductor names, until it closes its socket."""
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
