"""An exchange in which encoding, messages, sums and decoding of different pieces overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..communication import Communicator
from ..communication.messages import Naps
from .layout import Piece, Topology
from .reduction import Reduction
from .residuals import Residuals
from .scheduler import (
    DECODE,
    ENCODE,
    ENCODED,
    REDUCE,
    REDUCED,
    SENT,
    VALUES,
    Scheduler,
    Task,
)
from .transport import IsReady, ReductionsOver, Transport

Array = Any  #: a NumPy or CuPy array


class Pipelined(Transport):
    """Sums by pieces, each as `_life` tells it, in the order of a `Scheduler`.

    Attributes:
        messages: of the ranks.

    Local.
    """

    def __init__(
        self, reductions_over: ReductionsOver, topology: Topology, comm: Communicator
    ) -> None:
        self.reductions, self._topology, self._comm = reductions_over(topology), topology, comm
        self.messages = comm.messages()
        self._host, hosts = topology.host_of[comm.rank], len(topology.hosts)
        self._other_hosts = [(self._host + step) % hosts for step in range(1, hosts)]  # as a ring
        self._local_peers = [rank for rank in topology.hosts[self._host] if rank != comm.rank]
        #: By bucket, the pieces by their owners from this rank on.
        self._pieces: list[list[Piece]] = []
        #: Tags, buffers and senders of what is received, in the order in which it is sent.
        self._values: list[tuple[int, Array, int]] = []
        self._encoded: list[tuple[int, Array, int]] = []
        for reduction in self.reductions:
            self._lay_out(reduction)

    def _lay_out(self, reduction: Reduction) -> None:
        rank, size = self._comm.rank, self._comm.size
        pieces = sorted(reduction.pieces, key=lambda piece: (piece.owner - rank - 1) % size)
        self._pieces.append(pieces)
        self._values += [
            (piece.tag, reduction.values_buffer(piece, peer), peer)
            for piece in pieces
            for peer in self._local_peers
            if reduction.leads(piece)
        ]
        encoded = [
            (
                piece.tag,
                reduction.encoded_buffer(piece, host),
                self._topology.local_leader(host, rank),
            )
            for piece in reduction.pieces
            for host in sorted(self._other_hosts)
            if piece.owner == rank
        ]
        encoded.sort(key=lambda message: (rank - message[2]) % size)  # the rank before this first
        self._encoded += encoded

    def sum(
        self, vector: Array, residuals: Residuals | None, is_ready: IsReady | None = None
    ) -> int:
        """See `Transport`."""
        messages, trace = self.messages, self._comm.trace
        messages.enter()
        scheduler = Scheduler(messages)
        buckets = self._begin(scheduler, vector, residuals)
        computing, naps = Naps(computing=True), Naps()
        for number, tasks in enumerate(buckets):
            while is_ready is not None and not is_ready(number):  # it is this rank that is late
                if messages.progress() or scheduler.work():
                    computing.reset()
                else:
                    computing.pause(messages)
            for task in tasks:
                scheduler.count(task, VALUES)
        while scheduler.left or messages.under_way:
            moved, worked = messages.progress(), scheduler.work()
            if moved or worked:
                continue
            naps.reset()
            with trace.span("wait"), messages.watched("exchange"):
                while not messages.progress():
                    naps.pause(messages)
        if scheduler.wire_s:  # beside what this thread does meanwhile
            trace.record("wire", *scheduler.wire_s, row="wire", bytes=scheduler.bytes_sent)
        return scheduler.bytes_sent

    def _begin(
        self, scheduler: Scheduler, vector: Array, residuals: Residuals | None
    ) -> list[list[Task]]:
        """Begin with all pieces, by bucket, and expect what others send of them."""
        buckets: list[list[Task]] = []
        values, encoded = 1 + len(self._local_peers), len(self._topology.hosts)
        for reduction, pieces in zip(self.reductions, self._pieces, strict=True):
            buckets.append([])
            for piece in pieces:
                task = Task(piece, values if reduction.leads(piece) else 1, encoded)
                life = self._life(scheduler, task, reduction, vector, residuals)
                scheduler.begin(task, life)
                buckets[-1].append(task)
        by_tag = {task.piece.tag: task for tasks in buckets for task in tasks}
        for tag, buffer, sender in self._values:
            scheduler.expect(by_tag[tag], buffer, sender, VALUES)
        for tag, buffer, sender in self._encoded:
            scheduler.expect(by_tag[tag], buffer, sender, ENCODED)
        return buckets

    def _life(
        self,
        scheduler: Scheduler,
        task: Task,
        reduction: Reduction,
        vector: Array,
        residuals: Residuals | None,
    ) -> Iterator[int]:
        """A piece at this rank, from its values to their sum over all ranks.

        Yields:
            What it waits for: see `scheduler`.
        """
        rank, trace, piece = self._comm.rank, self._comm.trace, task.piece
        leader = self._topology.local_leader(self._host, piece.owner)
        if leader != rank:
            yield VALUES  # this rank's own
            if residuals is not None:
                residuals.give_non_owned(piece.values, vector)
            scheduler.send(task, vector[piece.values], leader, VALUES)
            yield SENT
            scheduler.receive_result(task, reduction.reduced_buffer(piece, vector), leader)
            yield REDUCED
        else:
            yield ENCODE  # for which the values of all ranks of this host must be here
            if self._local_peers:
                with trace.span("sum"):
                    reduction.local_sum(piece, vector)
            with trace.span("encode"):
                message = reduction.encode(piece, vector, residuals)
            if piece.owner != rank:
                scheduler.send(task, message, piece.owner, ENCODED)
                yield SENT
                message = reduction.reduced_buffer(piece, vector)
                scheduler.expect(task, message, piece.owner, REDUCED)
                yield REDUCED
            else:
                scheduler.count(task, ENCODED)  # its own
                yield ENCODED
                yield REDUCE
                with trace.span("sum"):
                    message = reduction.reduce(piece, vector, residuals)
                for host in self._other_hosts:
                    other_leader = self._topology.local_leader(host, rank)
                    scheduler.send(task, message, other_leader, REDUCED)
            for peer in self._local_peers:
                scheduler.send(task, message, peer, REDUCED)
        yield DECODE
        with trace.span("decode"):
            reduction.decode(piece, vector)
