"""Roles of ranks: workers train, servers serve, and workers wait for each other through servers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, Protocol, get_args

from ..communication import Communicator, Group, Roles
from ..communication.job_environment import requested_role, requested_servers
from ..communication.roles import WHOLE_MINIBATCH
from ..errors import SharedError, SharedPeerFailure, SharedProblem
from ..options import Choice, Options, Whole, WholeOr, option, options
from .client import Client
from .wire import Kind

Role = Literal["auto", "worker", "server"]

GIL = (
    "servers=0: a thread of every rank serves a part of the model. Python runs one thread of a "
    "process at a time, so computation in pure Python (unlike NumPy's large operations) slows down "
    "the pushes of other ranks, to a twentieth in the worst case; servers on ranks of their own "
    "avoid this"
)


REQUEST = "the request of the worker"
"""Name of the request compared between the ranks of a worker."""

STEP = 0  #: the number of a step that sends no request


class _Request(int):
    """The number of a request, in words in error texts."""

    def __repr__(self) -> str:
        return "step" if self == STEP else Kind(self).name.lower().replace("_", " ")


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
        workers: the first rank of each worker in the world, ordered by worker number. These ranks
            exchange messages with the servers.
        servers: ranks of the servers in the world, ordered by server number.
        trainers: ranks of all workers in the world, in order.
        worker: number of this rank's worker; -1 if this rank only serves.
        own: the ranks of this rank's role.
        messages: a duplicate of the world, for messages between workers and servers.
        within: the ranks of this rank's worker. None if every worker is a single rank.
        relay: a duplicate of `within`, for the servers' answers.
        connection: of this rank, set by the algorithm.
    """

    world: Communicator
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    trainers: tuple[int, ...]
    worker: int
    own: Communicator
    messages: Communicator
    within: Communicator | None = None
    relay: Communicator | None = None
    connection: Connected = field(init=False)

    def __post_init__(self) -> None:
        self._rank = self.world.rank  # fixed: the rank in the world changes after failures

    @property
    def serves(self) -> bool:
        return self._rank not in self.trainers

    @property
    def shared(self) -> bool:
        """True if every rank is both worker and server."""
        return self.trainers == self.servers

    @property
    def server(self) -> int:
        """Number of this server."""
        return self.servers.index(self._rank)

    def agree(self, problem: str | None, samples: int) -> int:
        client, of_worker = self.connection.client, self.sum_within(samples, Kind.SUM_SAMPLES)
        return client.in_order(lambda: client.sum_samples(of_worker))

    def agree_on_whole(self, problem: str | None, samples: int) -> None:
        if problem:
            self.fail(problem)
        client = self.connection.client
        self.sum_within(samples, Kind.AGREE_ON_WHOLE, equal={WHOLE_MINIBATCH: samples})
        client.in_order(lambda: client.agree_on_whole(samples))

    def meet(self) -> None:
        if not self.serves:
            client = self.connection.client
            self.sum_within(0, Kind.MEET)
            client.in_order(client.meet)

    def total_if_alike(self, samples: int) -> int:
        size = 1 if self.within is None else self.within.size
        return self.sum_within(samples, STEP) * self.own.size // size

    def sum_within(
        self,
        samples: int,
        request: int,
        problem: str | None = None,
        *,
        equal: Mapping[str, int] | None = None,
    ) -> int:
        """Return the sum of `samples` over the ranks of this rank's worker. Collective over these
        ranks, which wait for each other only here and in requests to servers.

        Args:
            samples: of this rank.
            request: the `Kind` of the request that follows; `STEP` for none.
            problem: of this rank, in one line. Only if a worker has several ranks.
            equal: integers required to be equal on the worker's ranks, by name.
        Raises:
            SharedError: on all ranks of the worker, if any of these ranks has a problem, or if
                required values differ. The servers then know the problem, too.
        """
        if self.within is None:
            assert problem is None
            return samples
        try:
            with self.connection.client.waiting_within():
                return self.within.agree(
                    problem, samples, equal={REQUEST: _Request(request), **(equal or {})}
                )
        except SharedError as error:
            client, text = self.connection.client, str(error)
            if client.sends and not self.connection.finished:
                client.in_order(lambda: self._report_alone(client, text))
            client.problem = text
            raise

    @staticmethod
    def _report_alone(client: Client, text: str) -> None:
        """Report a problem to all servers, for a worker whose ranks all know the problem."""
        with client.alone(), contextlib.suppress(SharedError):  # always: the problem itself
            client.fail(text)

    def meet_to_finish(self) -> None:
        pass  # servers already wait until all workers leave

    def fail(self, problem: str) -> NoReturn:
        if self.connection.finished:
            raise SharedError(problem)
        text, client = problem, self.connection.client
        if not isinstance(problem, SharedProblem):  # a SharedProblem names its ranks itself
            text = f"{problem} (on rank {self.world.rank})"
        if self.within is not None:
            self.sum_within(0, Kind.FAIL, SharedProblem(text))
        client.in_order(lambda: client.fail(text))
        raise SharedError(text)

    def serve(self) -> None:
        self.connection.serve()

    def close(self) -> None:
        """Release this group's communicators. Collective."""
        for comm in (self.relay, self.within, self.own, self.messages):
            if comm is not None:
                comm.close()


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

    ranks_per_worker: int | str = option(
        1,
        WholeOr("host"),
        "ranks that train together as one worker: they sum their gradients among themselves, and "
        "the first of them pushes the sum and pulls the model for all; host: the ranks of each "
        "host. Not with servers=0, tables or --survive",
    )

    def workers(self, comm: Communicator) -> list[list[int]]:
        return self._workers_of(comm, *self.assign(comm))

    def form(self, comm: Communicator, before: Group | None = None) -> ServerGroup:
        serves = None if before is None else before.serves
        trainers, serving = self.assign(comm, serves)
        workers = self._workers_of(comm, trainers, serving)
        if comm.rank == 0 and comm.size > 1 and trainers == serving and before is None:
            warnings.warn(GIL, stacklevel=4)  # points to the line that creates the learner
        own = comm.split(int(comm.rank not in trainers))
        if before is not None:
            before.own.rebind(own)
            own = before.own
        within = relay = None
        numbers = {rank: k for k, ranks in enumerate(workers) for rank in ranks}
        if len(workers) < len(trainers):
            within = comm.split(numbers.get(comm.rank, len(workers)))
            relay = within.duplicate()
        return ServerGroup(
            world=comm,
            workers=tuple(ranks[0] for ranks in workers),
            servers=tuple(serving),
            trainers=tuple(trainers),
            worker=numbers.get(comm.rank, -1),
            own=own,
            messages=comm.duplicate(),
            within=within,
            relay=relay,
        )

    def _workers_of(
        self, comm: Communicator, trainers: Sequence[int], serving: Sequence[int]
    ) -> list[list[int]]:
        """Return the ranks of every worker. Collective.

        Raises:
            UserError: on all ranks, if the ranks cannot be divided so.
        """
        given = self.ranks_per_worker
        if given == 1:
            return [[rank] for rank in trainers]
        what = f"ranks_per_worker={given!r}"
        comm.require_fixed_ranks(f"{what} needs ranks that stay: run without --survive")
        if isinstance(given, int):
            if len(trainers) % given:
                raise SharedError(
                    f"{what} must divide the number of ranks that train, {len(trainers)}"
                )
            workers = [
                [*trainers[begin : begin + given]] for begin in range(0, len(trainers), given)
            ]
        else:
            by_host: dict[str, list[int]] = {}
            for rank in trainers:
                by_host.setdefault(comm.hosts[rank], []).append(rank)
            workers = list(by_host.values())
        if len(workers) < len(trainers) and trainers == serving:
            raise SharedError(
                f"{what} needs servers on ranks of their own, but with servers=0 every rank serves"
            )
        return workers

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
