"""Which ranks train and which serve."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

from ..communication import Communicator
from ..communication.launched import requested_servers
from ..errors import SharedError

Role = Literal["auto", "worker", "server"]
ROLES: tuple[Role, ...] = ("auto", "worker", "server")

GIL = (
    "servers=0: a thread of every rank serves a part of the model. Python lets one thread of a "
    "process run at a time, so a computation that holds its lock (pure Python, and not NumPy's "
    "large operations) slows down the others' pushes, to a twentieth in the worst case; servers "
    "on ranks of their own do not have that"
)


@dataclass(frozen=True)
class Group:
    """Who trains and who serves, and the communicators in which they do.

    Attributes:
        world: all ranks.
        workers, servers: their ranks in the world, in the order of their numbers.
        own: the ranks that do what this one does: the workers, or else the servers.
        messages: the world again, for messages between the two.
    """

    world: Communicator
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    own: Communicator
    messages: Communicator

    @property
    def serves(self) -> bool:
        """Whether this rank serves and does not train."""
        return self.world.rank not in self.workers

    def close(self) -> None:
        """Give back the two communicators that are this group's. Collective."""
        self.own.close()
        self.messages.close()

    @property
    def shared(self) -> bool:
        """Whether every rank does both."""
        return self.workers == self.servers

    @property
    def server(self) -> int:
        """This server's number."""
        return self.servers.index(self.world.rank)


def roles(world: Communicator, servers: int | None, role: Role) -> tuple[list[int], list[int]]:
    """The ranks of workers and of servers.

    Args:
        servers: how many; None: as `parallel-sgd run --servers` says, or one.
        role: of this rank: "auto" where the last ranks serve; else every rank says what it is.
    Raises:
        SharedError: on all ranks, where that is not possible.

    Collective.
    """
    requested = world.together(lambda: requested_servers() if servers is None else servers)
    given = world.allgather_object((role, requested))
    asked = [theirs for theirs, _ in given]
    size = world.size
    if set(asked) == {"auto"}:
        world.require_agreement({"servers": requested})
        count = min(1, size - 1) if requested is None else requested
        if count >= size:
            raise SharedError(f"servers={count} must be less than the number of ranks, {size}")
        if count == 0:
            return list(range(size)), list(range(size))
        return list(range(size - count)), list(range(size - count, size))
    if "auto" in asked:
        rank = asked.index("auto")
        raise SharedError(
            f"role='auto' on rank {rank}: where some ranks say whether they are a worker or a "
            "server, all must"
        )
    by_role = {kind: [k for k, theirs in enumerate(asked) if theirs == kind] for kind in ROLES}
    workers, serving = by_role["worker"], by_role["server"]
    if not workers or not serving:
        raise SharedError(f"role={asked[0]!r} on all ranks: there must be workers and servers")
    wanted = {number for _, number in given} - {None, len(serving)}
    if wanted:
        raise SharedError(f"servers={wanted.pop()}, but {len(serving)} ranks have role='server'")
    return workers, serving


def form(world: Communicator, servers: int | None, role: Role) -> Group:
    """Give every rank its role. Collective.

    Raises:
        SharedError: as `roles`.
    """
    workers, serving = roles(world, servers, role)
    if world.rank == 0 and world.size > 1 and workers == serving:
        warnings.warn(GIL, stacklevel=4)  # where the learner is made
    serves = world.rank not in workers
    own = world.split(int(serves))
    return Group(world, tuple(workers), tuple(serving), own, world.duplicate())
