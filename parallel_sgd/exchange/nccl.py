"""Sums over GPUs by NCCL: of all ranks, or of those of each host, which then send one message.

Within a host NCCL sums what its ranks have. Of that sum every rank takes the pieces whose owners
are at its place, and exchanges them with the ranks at the same place on the other hosts, in the
stages of every exchange; then NCCL brings the results to all ranks of the host. Where nothing is
lost on the way, and unless hosts are asked for, one all-reduce of NCCL does it all.

NCCL adds in an order of its own: sums equal those of other transports to rounding, and repeat
where NCCL repeats. All ranks have the same bits.

Tested with a stand-in for CuPy only: this has not run on a GPU, nor with NCCL.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..communication import Communicator
from ..communication.staging import is_done, recorded
from ..errors import SharedError, UserError
from ..kernels import array_module, on_device
from ..parameters import Parameters
from .pipeline import Pipeline
from .residuals import Residuals
from .routes import Routes
from .stages import PlainStages, Stages

Array = Any  #: a CuPy array, contiguous and one-dimensional


class Nccl:
    """NCCL's collectives of some ranks, each with a GPU of its own.

    Args:
        comm: the ranks.
        like: an array on this rank's GPU, float32 or float64.
        own: whether `comm` is for this alone, and is closed with it.
    Raises:
        SharedError: NCCL cannot start on rank 0.

    Creation is collective, and takes NCCL up to some seconds. Each method is collective too: it
    waits for what the current stream was told before, and returns when NCCL is done. NCCL uses a
    stream of its own, so that a sum in the background does not hold up what others compute. A wait
    longer than `timeout_s` ends the job, as does an error of NCCL.
    """

    def __init__(self, comm: Communicator, like: Array, *, own: bool = False) -> None:
        self._xp, self.size = array_module(like), comm.size
        self._ranks = comm if own else None
        self._nccl = _module(self._xp)
        self._type = {
            np.dtype(np.float32): self._nccl.NCCL_FLOAT32,
            np.dtype(np.float64): self._nccl.NCCL_FLOAT64,
        }[like.dtype]
        self._messages = comm.messages()  # only bounds waits: nothing is sent
        made = comm.together(lambda: self._identity() if comm.rank == 0 else None)
        identity = comm.allgather_object(made)[0]
        with on_device(like):
            self._stream = self._xp.cuda.Stream(non_blocking=True)
            self._messages.enter()
            with self._messages.watched("the start of NCCL"):
                self._comm = self._nccl.NcclCommunicator(comm.size, identity, comm.rank)

    def close(self) -> None:
        """Give back what NCCL has on the GPU, and the ranks' communicator. Collective."""
        self._comm.destroy()
        if self._ranks is not None:
            self._ranks.close()

    def groups(self, routes: Routes) -> Routes:
        """All ranks as NCCL groups them: one group, or a group for each host. Local."""
        everybody = self.size == len(routes.host_of)
        return Routes.over([0] * self.size) if everybody else routes

    def all_reduce(self, values: Array) -> None:
        """Replace `values` by their sum over the ranks."""
        place, add = values.data.ptr, self._nccl.NCCL_SUM
        self._begin()
        self._comm.allReduce(place, place, values.size, self._type, add, self._stream.ptr)
        self._finish("NCCL's all-reduce")

    def share(self, parts: Sequence[tuple[Array, int]]) -> None:
        """Make each array what it is on one of the ranks.

        Args:
            parts: arrays with that rank, in the same order on all.
        """
        self._begin()
        self._nccl.groupStart()
        for values, root in parts:
            place = values.data.ptr
            self._comm.broadcast(place, place, values.size, self._type, root, self._stream.ptr)
        self._nccl.groupEnd()
        self._finish("NCCL's broadcast")

    def _identity(self) -> Any:
        try:
            return self._nccl.get_unique_id()
        except self._nccl.NcclError as error:
            raise UserError(f"transport='nccl' needs NCCL, which cannot start: {error}") from None

    def _begin(self) -> None:
        now = recorded(self._xp, self._xp.cuda.get_current_stream())
        self._stream.wait_event(now)

    def _finish(self, name: str) -> None:
        event, backoff = recorded(self._xp, self._stream), self._messages.backoff()
        self._messages.enter()
        with self._messages.watched(name):
            while not is_done(self._xp, event):
                try:
                    self._comm.check_async_error()
                except self._nccl.NcclError:
                    self._comm.abort()  # it would never end, and wait for that at our end
                    raise
                self._messages.progress()
                backoff.pause()


@dataclass(frozen=True)
class PlaceRoutes(Routes):
    """The hosts as the ranks at one place of each see them.

    Attributes:
        hosts: of each, the rank at this place.
        owners: the ranks at this place, whose pieces they exchange.
    """

    owners: frozenset[int]

    @classmethod
    def of(cls, routes: Routes, rank: int) -> PlaceRoutes:
        """Those of a rank, where all hosts have as many."""
        place = routes.hosts[routes.host_of[rank]].index(rank)
        ranks = [host[place] for host in routes.hosts]
        return cls(tuple((each,) for each in ranks), routes.host_of, frozenset(ranks))

    def gatherer(self, host: int, owner: int) -> int:
        """The rank at this place; for other owners nobody (-1) whom this rank knows."""
        return self.hosts[host][0] if owner in self.owners else -1


class NcclExchange:
    """Sums vectors of one layout; takes a `Pipeline`'s place in an `Exchange`.

    Args:
        stages: of every bucket, made with `PlaceRoutes`; of their pieces, those that this rank does
            not exchange are taken from them.
        routes: over hosts, of as many ranks each if NCCL sums within hosts.
        comm: the ranks; nothing else may send messages on it meanwhile.
        nccl: over all ranks, or those of this host.

    Local.
    """

    def __init__(
        self, stages: Sequence[Stages], routes: Routes, comm: Communicator, nccl: Nccl
    ) -> None:
        self.stages, self.comm, self._nccl = stages, comm, nccl
        routes = nccl.groups(routes)
        self._alone = len(routes.hosts) == 1 and all(isinstance(s, PlainStages) for s in stages)
        places = {rank: place for host in routes.hosts for place, rank in enumerate(host)}
        #: By bucket: the stripes, each with the place of its owner.
        self._stripes = [
            [
                (stripe.values, places[owner])
                for owner, stripe in enumerate(each.stripes)
                if stripe.values.stop > stripe.values.start
            ]
            for each in stages
        ]
        for each in stages:
            each.pieces = [piece for piece in each.pieces if each.gathers(piece)]
        self._pipeline = Pipeline(stages, PlaceRoutes.of(routes, comm.rank), comm)
        self._place, self._sent_by_nccl = places[comm.rank], 0

    @property
    def bytes_sent(self) -> int:
        """By this rank to others; by NCCL as much as in rings."""
        return self._pipeline.bytes_sent + self._sent_by_nccl

    def sum(
        self,
        vector: Array,
        residuals: Residuals | None,
        is_ready: Callable[[int], bool] | None = None,
        *,
        stray: bool = False,
    ) -> None:
        """As `Pipeline.sum`, but for the order in which the ranks of a host are added."""

        def is_summed(bucket: int) -> bool:
            if is_ready is not None and not is_ready(bucket):
                return False
            self._sum_within(bucket, vector, residuals if stray else None)
            return True

        if self._alone:
            backoff = self._pipeline.messages.backoff()
            for bucket in range(len(self.stages)):
                while not is_summed(bucket):  # it is this rank that is late
                    backoff.pause()
            return
        self._pipeline.sum(vector, residuals, is_summed)
        if self._nccl.size > 1:
            for each in self._stripes:
                with self.comm.trace.span("wire"):
                    self._nccl.share([(vector[values], place) for values, place in each])
                self._sent_by_nccl += sum(
                    (values.stop - values.start) * vector.itemsize
                    for values, place in each
                    if place == self._place
                )

    def _sum_within(self, bucket: int, vector: Array, stray: Residuals | None) -> None:
        """Over the ranks of this host.

        Args:
            stray: residuals; those that this rank does not exchange are added, and forgotten.
        """
        size, values = self._nccl.size, vector[self.stages[bucket].bucket.values]
        for stripe, place in self._stripes[bucket]:
            if stray is not None and place != self._place:
                vector[stripe] += stray.own[stripe]
                stray.own[stripe] = 0
        if size > 1:
            with self.comm.trace.span("wire"):
                self._nccl.all_reduce(values)
            self._sent_by_nccl += 2 * (size - 1) * values.nbytes // size


def start_nccl(
    parameters: Parameters, comm: Communicator, hierarchical: bool | str, *, lossless: bool
) -> tuple[Routes, Nccl]:
    """Which ranks sum among themselves before they send, and NCCL over these, or over all.

    Args:
        parameters: on this rank's GPU.
        hierarchical: "auto" goes by hosts where something is lost on the way.
        lossless: whether nothing ever is.
    Raises:
        SharedError: what NCCL needs is not here.

    Collective.
    """
    if not lossless and hierarchical is False:
        raise SharedError(
            "hierarchical=False must be True or 'auto' with transport='nccl' and fewer than "
            "32 bits: NCCL sums within hosts, and bits are saved between them"
        )
    _require_gpus(parameters.flat, comm)
    if lossless and hierarchical is not True:
        return Routes.flat(comm.size), Nccl(comm, parameters.flat)
    routes = Routes.over(comm.hosts)
    names = [comm.hosts[ranks[0]] for ranks in routes.hosts]
    counts = dict(zip(names, map(len, routes.hosts), strict=True))
    if len(set(counts.values())) > 1:
        most, fewest = max(names, key=counts.__getitem__), min(names, key=counts.__getitem__)
        raise SharedError(
            "transport='nccl' needs as many ranks on every host to exchange between hosts, but "
            f"{most} has {counts[most]} and {fewest} has {counts[fewest]}"
        )
    return routes, Nccl(comm.split(routes.host_of[comm.rank]), parameters.flat, own=True)


def _require_gpus(like: Array, comm: Communicator) -> None:
    """Refuse, on all ranks, what NCCL cannot work with."""
    xp, problem = array_module(like), None
    if xp is np:
        problem = "transport='nccl' needs CuPy parameters, but these are NumPy's"
    elif not _module(xp).available:
        problem = (
            "transport='nccl' needs NCCL, which CuPy does not find: pip install nvidia-nccl-cu12, "
            "or nvidia-nccl-cu13, by your CUDA"
        )
    comm.raise_together(problem)
    gpus = comm.allgather_object(xp.cuda.runtime.deviceGetPCIBusId(like.device.id))
    found: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(zip(comm.hosts, gpus, strict=True)):
        found.setdefault(place, []).append(rank)
    for (host, gpu), ranks in found.items():
        if len(ranks) > 1:
            used = len({bus for name, bus in found if name == host})
            raise SharedError(
                "transport='nccl' needs a GPU for each rank, but on "
                f"{host} {comm.hosts.count(host)} ranks have {used}: ranks "
                f"{', '.join(map(str, ranks))} share {gpu}"
            )


def _module(xp: Any) -> Any:
    """`cupy.cuda.nccl`, which `import cupy` does not load."""
    return importlib.import_module(f"{xp.__name__}.cuda.nccl")
