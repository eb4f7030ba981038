"""Roles of ranks: workers train, servers serve, and workers wait for each other through servers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, Protocol, get_args

from ..communication import Communicator, Group, Roles
from ..communication.job_environment import requested_role, requested_servers
from ..errors import SharedError, SharedPeerFailure, SharedProblem
from ..options import Choice, Options, Whole, option, options
from .client import Client

Role = Literal["auto", "worker", "server"]

GIL = (
    "servers=0: a thread of every rank serves a part of the model. Python runs one thread of a "
    "process at a time, so computation in pure Python (unlike NumPy's large operations) slows down "
    "the pushes of other ranks, to a twentieth in the worst case; servers on ranks of their own "
    "avoid this"
)


class Connected(Protocol):
    """The part of a `Connection` used by its group."""

    finished: bool

    @property
    def client(self) -> Client: ...

    def serve(self) -> None: ...


@dataclass
class ServerGroup(Group):
    """Workers and servers, with their communicators.

    Attributes:
        workers: ranks of the workers in the world, ordered by worker number.
        servers: ranks of the servers in the world, ordered by server number.
        own: the ranks of this rank's role.
        messages: a duplicate of the world, for messages between workers and servers.
        connection: of this rank, set by the algorithm.
    """

    world: Communicator
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    own: Communicator
    messages: Communicator
    connection: Connected = field(init=False)

    def __post_init__(self) -> None:
        self._rank = self.world.rank  # fixed: the rank in the world changes after failures

    @property
    def serves(self) -> bool:
        return self._rank not in self.workers

    @property
    def shared(self) -> bool:
        """True if every rank is both worker and server."""
        return self.workers == self.servers

    @property
    def server(self) -> int:
        """Number of this server."""
        return self.servers.index(self._rank)

    def agree(self, problem: str | None, samples: int) -> int:
        client = self.connection.client
        return client.in_order(lambda: client.sum_samples(samples))

    def agree_on_whole(self, problem: str | None, samples: int) -> None:
        if problem:
            self.fail(problem)
        client = self.connection.client
        client.in_order(lambda: client.agree_on_whole(samples))

    def meet(self) -> None:
        if not self.serves:
            client = self.connection.client
            client.in_order(client.meet)

    def meet_to_finish(self) -> None:
        pass  # servers already wait until all workers leave

    def fail(self, problem: str) -> NoReturn:
        if self.connection.finished:
            raise SharedError(problem)
        text, client = problem, self.connection.client
        if not isinstance(problem, SharedProblem):  # a SharedProblem names its ranks itself
            text = f"{problem} (on rank {self.world.rank})"
        client.in_order(lambda: client.fail(text))
        raise SharedError(text)

    def serve(self) -> None:
        self.connection.serve()

    def close(self) -> None:
        """Release this group's two communicators. Collective."""
        self.own.close()
        self.messages.close()


@options
class ParameterServers(Options, Roles):
    """Options of roles: some ranks serve, and the rest train."""

    together = False

    servers: int | None = option(
        None,
        Whole(),
        "number of ranks that serve, the last ranks; 0: every rank serves in a thread beside its "
        "training. If not given: as `parallel-sgd run --servers` says, or 1",
    )
    role: Role = option(
        "auto",
        Choice(*get_args(Role)),
        "worker or server for this rank, if each is started apart (mpiexec -n 1 ... --role server "
        ": -n 4 ... --role worker); auto: as PARALLEL_SGD_ROLE (or TRAINING_ROLE=TRAINER, "
        "PSERVER) in its environment says, else by servers",
        compare=False,
    )

    def workers(self, comm: Communicator) -> list[int]:
        return self.assign(comm)[0]

    def form(self, comm: Communicator, before: Group | None = None) -> ServerGroup:
        serves = None if before is None else before.serves
        workers, serving = self.assign(comm, serves)
        if comm.rank == 0 and comm.size > 1 and workers == serving and before is None:
            warnings.warn(GIL, stacklevel=4)  # points to the line that creates the learner
        own = comm.split(int(comm.rank not in workers))
        if before is not None:
            before.own.rebind(own)
            own = before.own
        return ServerGroup(comm, tuple(workers), tuple(serving), own, comm.duplicate())

    def assign(
        self, world: Communicator, served: bool | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the ranks of workers and of servers.

        Args:
            served: after a failure of ranks: True if this rank has only served so far. None for a
                rank that has just joined.
        Raises:
            SharedError: on all ranks, if the roles are inconsistent.

        Collective.
        """
        requested, role = world.together(
            lambda: (
                requested_servers() if self.servers is None else self.servers,
                (requested_role() if self.role == "auto" else None) or self.role,
            )
        )
        given = world.allgather_object((role, requested, served, world.joined))
        roles = [role for role, *_ in given]
        size, fewer = world.size, world.generation > 0  # ranks have failed before training
        if any(served is not None for _, _, served, _ in given):
            trained = [served is False for _, _, served, _ in given]
            if not any(trained):  # a rank that began with a failed worker can still train
                trained = [not joined and known is None for *_, known, joined in given]
            return self._assign_after_failure(trained)
        if set(roles) == {"auto"}:
            world.require_agreement({"servers": requested})
            count = min(1, size - 1) if requested is None else requested
            count = min(count, size - 1) if fewer else count
            if count >= size:
                raise SharedError(f"servers={count} must be less than the number of ranks, {size}")
            ranks = list(range(size))
            return (ranks[:-count], ranks[-count:]) if count else (ranks, ranks)
        if "auto" in roles:
            rank = roles.index("auto")
            raise SharedError(
                f"role='auto' on rank {rank}: if some ranks are given a role, all ranks must be"
            )
        workers, serving = (
            [k for k, asked in enumerate(roles) if asked == role] for role in ("worker", "server")
        )
        if fewer:
            return self._assign_after_failure([role == "worker" for role in roles])
        if not workers or not serving:
            raise SharedError(f"role={roles[0]!r} on all ranks: there must be workers and servers")
        wanted = {number for _, number, *_ in given} - {None, len(serving)}
        if wanted:
            raise SharedError(
                f"servers={wanted.pop()}, but {len(serving)} ranks have role='server'"
            )
        return workers, serving

    @staticmethod
    def _assign_after_failure(trains: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Assign roles after a failure of ranks.

        Ranks that trained go on training. All other ranks serve, including new ones. If no such
        rank is left, every worker also serves.

        Raises:
            SharedPeerFailure: no rank that trained is left.
        """
        workers = [rank for rank, works in enumerate(trains) if works]
        servers = [rank for rank, works in enumerate(trains) if not works]
        if not workers:
            raise SharedPeerFailure("all workers have failed, and only servers remain")
        return workers, servers or workers
