"""Ranks that are killed at a call of their communicator: as threads, and over MPI.

A call is a collective, a reconfiguration, the making of a communicator, or a message that is sent.
Each rank counts its calls in the same way in both worlds, from the time at which it has made its
learner, and for each communicator alone: threads of a rank call communicators of their own.

As a program, this file is a rank over MPI: see `agrees_with_mpi`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

from explored import CONFIGURATIONS  # noqa: E402
from explored_sessions import Session  # noqa: E402

from parallel_sgd import runtime  # noqa: E402
from parallel_sgd.communication import Communicator  # noqa: E402

COLLECTIVES = ("allgather", "alltoall", "broadcast", "sum_integers", "_allgather_bytes")
MAKE_COMMUNICATORS, MAKE_CHANNELS = ("duplicate", "split"), ("messages", "endpoint")
OF_A_COMMUNICATOR = (*COLLECTIVES, "_reconfigure", *MAKE_COMMUNICATORS, *MAKE_CHANNELS)
LATE_S = 1.0  #: enough for all other ranks to come to where they wait for this one
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Kill:
    """The end of a rank, before a call of its own.

    Args:
        rank: its number in the world.
        name: of the communicator: see `Calls`.
        number: of the call, from 1.
        late: the rank sleeps before, until all others wait for it. So they have done all that they
            can do without it, and the outcome does not depend on the order.
    """

    rank: int
    name: str
    number: int
    late: bool

    def __str__(self) -> str:
        late = ", late" if self.late else ""
        return f"rank {self.rank} at call {self.number} of {self.name}{late}"


@dataclass
class Calls:
    """The calls of a rank.

    Args:
        rank: its number in the world.
        kills: of all ranks.
        die: ends this rank at once.

    Attributes:
        counts: of calls, by name of the communicator: "world"; "world/1" for the first that is made
            of it; and with "messages" or "endpoint" for what these send.
        made: communicators, by the name of what they are made of.
        log: name, number and method of each call.
    """

    rank: int
    kills: Sequence[Kill]
    die: Callable[[int], object]
    world: Communicator
    counts: Counter[str] = field(default_factory=Counter)
    made: Counter[str] = field(default_factory=Counter)
    log: list[tuple[str, int, str]] = field(default_factory=list)

    def call(self, name: str, method: str) -> None:
        """Count a call, before it is made."""
        if not self.world.learners:
            return
        self.counts[name] += 1
        self.log.append((name, self.counts[name], method))
        for kill in self.kills:
            if (kill.rank, kill.name, kill.number) == (self.rank, name, self.counts[name]):
                if kill.late:
                    runtime.sleep(LATE_S)
                self.die(self.rank)


def counting(counted: Any, calls: Calls, name: str, methods: Sequence[str]) -> Any:
    """Let the methods of a communicator, channel or endpoint be counted. Return it."""
    kind = type(counted)
    body = {method: counted_method(kind, method) for method in methods}
    counted.__class__ = type(kind)(f"Counted{kind.__name__}", (kind,), body)
    counted.calls, counted.call_name, counted.inside_a_call = calls, name, False
    return counted


def counted_method(kind: type, method: str) -> Callable[..., Any]:
    """Return a method that counts, and calls that of the class behind."""
    behind = getattr(kind, method)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.inside_a_call:  # a call of MPI may be made of further ones
            return behind(self, *args, **options)
        calls, name = self.calls, self.call_name
        if method in MAKE_CHANNELS:
            made = behind(self, *args, **options)
            return counting(made, calls, f"{method} of {name}", ("send",))
        calls.call(name, method.strip("_"))
        self.inside_a_call = True
        try:
            result = behind(self, *args, **options)
        finally:
            self.inside_a_call = False
        if method in MAKE_COMMUNICATORS:
            calls.made[name] += 1
            counting(result, calls, f"{name}/{calls.made[name]}", OF_A_COMMUNICATOR)
        return result

    return call


def program_of(name: str, folder: Path) -> Callable[[Communicator], Any]:
    """Return the program of an explored configuration.

    Args:
        folder: of a session, the same on all ranks.
    """
    program, _ = CONFIGURATIONS[name].make()
    if isinstance(program, Session):
        program.folder = folder
        return partial(program, epochs=1)
    return program


def run(
    program: Callable[[Communicator], Any],
    comm: Communicator,
    kills: Sequence[Kill],
    die: Callable[[int], object],
    logs: dict[int, Calls] | None = None,
) -> dict[str, Any]:
    """Run a program on a rank. Return what the rank has at its end, as JSON can hold it."""
    rank = comm.world_ranks[comm.rank]
    calls = Calls(rank, kills, die, comm)
    if logs is not None:
        logs[rank] = calls
    counting(comm, calls, "world", OF_A_COMMUNICATOR)
    ended = program(comm)
    facts: dict[str, Any] = {}
    for name, value in vars(ended).items():
        if name == "flat":
            facts["model"] = hashlib.sha256(value.tobytes()).hexdigest()[:16]
        elif isinstance(value, int | list):
            facts[name] = value
        elif name == "recovery":
            facts |= value
    return facts | {"calls": dict(sorted(calls.counts.items()))}


def kill_this_process(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    name, kills = json.loads(sys.argv[1])
    comm = Communicator.world(timeout_s=TIMEOUT_S)
    report = Path(f"rank-{comm.rank}.json")
    try:
        facts = run(
            program_of(name, Path("session")),
            comm,
            [Kill(**kill) for kill in kills],
            kill_this_process,
        )
    except Exception as error:
        report.write_text(json.dumps({"error": type(error).__name__, "text": str(error)}))
        raise
    report.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
