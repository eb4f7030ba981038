"""An exchange in which encoding, messages, sums and decoding of different pieces overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..communication import Communicator
from .layout import Topology
from .reduction import Reduction
from .residuals import Residuals
from .scheduler import (
    ALL_ARRIVED,
    DECODE,
    ENCODE,
    ENCODED,
    REDUCE,
    REDUCED,
    SENT,
    VALUES,
    Barrier,
    Scheduler,
    Task,
)
from .step_sizes import StepSizes
from .transport import IsReady, ReductionsOver, Transport
from .variable_length import VariableLengthReduction, shares_step_sizes

Array = Any  #: a NumPy or CuPy array


class Pipelined(Transport):
    """Sums piece by piece: `_process_piece`, in the order of a `Scheduler`. Creation is local."""

    def __init__(self, reductions: ReductionsOver, topology: Topology, comm: Communicator) -> None:
        self.reductions, self._topology, self._comm = reductions(topology), topology, comm
        self.messages = comm.messages()
        rank, size, hosts = comm.rank, comm.size, len(topology.hosts)
        self._host = host = topology.host_of[rank]
        self._local_peers = [peer for peer in topology.hosts[host] if peer != rank]
        #: The leaders of this rank's own pieces on the other hosts: receivers in the order in which
        #: this rank sends (a ring), senders with their hosts in the order in which messages arrive.
        ring = [(host + step) % hosts for step in range(1, hosts)]
        self._receivers = [topology.local_leader(other, rank) for other in ring]
        senders = zip(self._receivers, ring, strict=True)
        self._senders = sorted(senders, key=lambda sender: (rank - sender[0]) % size)
        #: The pieces of every bucket, by owner: the next rank's pieces first, this rank's own last.
        self._pieces_in_turn = [
            sorted(reduction.pieces, key=lambda piece: (piece.owner - rank - 1) % size)
            for reduction in self.reductions
        ]
        #: For shared step sizes: the number of pieces that this rank leads, and that it owns.
        self._piece_counts: dict[StepSizes, tuple[int, int]] = {}
        for reduction in self.reductions:
            if isinstance(reduction, VariableLengthReduction):
                led, owned = self._piece_counts.get(reduction.step_sizes, (0, 0))
                led += sum(reduction.leads(piece) for piece in reduction.pieces)
                owned += len(reduction.own_pieces)
                self._piece_counts[reduction.step_sizes] = led, owned
        self._steps_are_shared = shares_step_sizes(self.reductions)

    def sum(self, vector: Array, residuals: Residuals | None, is_ready: IsReady | None) -> int:
        """See `Transport`."""
        messages, trace = self.messages, self._comm.trace
        messages.enter()
        scheduler = Scheduler(messages)
        buckets = self._begin(scheduler, vector, residuals)
        computing, waiting = messages.backoff(computing=True), messages.backoff()
        for number, tasks in enumerate(buckets):
            # bounded: for this rank's own backward; for others it is in watched()
            while is_ready is not None and not is_ready(number):  # this rank's gradient is late
                # Shared step sizes are known only once the last bucket is ready.
                if messages.progress() or (not self._steps_are_shared and scheduler.work()):
                    computing.reset()
                else:
                    computing.pause()
            for task in tasks:
                scheduler.count(task, VALUES)
        # bounded: for this rank's own backward; for others it is in watched()
        while scheduler.left or messages.under_way:
            moved, worked = messages.progress(), scheduler.work()
            if moved or worked:
                continue
            waiting.reset()
            with trace.span("wait"), messages.watched("exchange"):
                while not messages.progress():
                    waiting.pause()
        if scheduler.wire_s:  # in a row of its own: it overlaps with this thread's work
            trace.record("wire", *scheduler.wire_s, row="wire", bytes=scheduler.bytes_sent)
        return scheduler.bytes_sent

    def _begin(
        self, scheduler: Scheduler, vector: Array, residuals: Residuals | None
    ) -> list[list[Task]]:
        """Start all pieces, and post receives for their messages. Return the tasks by bucket."""
        buckets: list[list[Task]] = []
        barriers = {
            sizes: (Barrier(led), Barrier(owned))
            for sizes, (led, owned) in self._piece_counts.items()
        }
        values, encoded = 1 + len(self._local_peers), 1 + len(self._senders)
        for reduction, pieces in zip(self.reductions, self._pieces_in_turn, strict=True):
            tasks = []
            for piece in pieces:
                leads = reduction.leads(piece)
                task = Task(piece, values if leads else 1, encoded)
                tasks.append(task)
                shared = None
                if isinstance(reduction, VariableLengthReduction):
                    shared = barriers[reduction.step_sizes]
                steps = self._process_piece(scheduler, task, reduction, vector, residuals, shared)
                scheduler.begin(task, steps)
                for peer in self._local_peers if leads else ():
                    buffer = reduction.values_buffer(piece, peer)
                    scheduler.expect(task, buffer, peer, VALUES)
            owned = [task for task in tasks if task.piece.owner == self._comm.rank]
            for sender, host in self._senders:
                for task in owned:
                    buffer = reduction.encoded_buffer(task.piece, host)
                    scheduler.expect(task, buffer, sender, ENCODED)
            buckets.append(tasks)
        return buckets

    def _process_piece(
        self,
        scheduler: Scheduler,
        task: Task,
        reduction: Reduction,
        vector: Array,
        residuals: Residuals | None,
        barriers: tuple[Barrier, Barrier] | None,
    ) -> Iterator[int]:
        """Take a piece on this rank from its values to their sum over all ranks; see `reduction`.

        Args:
            barriers: two for pieces with shared step sizes: before encoding for the owners, and
                before encoding the sums.
        Yields:
            The next wait: for messages, for a message to be sent, or for a turn; see `scheduler`.
        """
        rank, trace, piece = self._comm.rank, self._comm.trace, task.piece
        leader = self._topology.local_leader(self._host, piece.owner)
        if leader != rank:  # the leader adds up the values of this host
            yield VALUES  # of this rank only: the bucket is ready
            if residuals is not None:
                residuals.give_non_owned(piece.values, vector)
            scheduler.send(task, vector[piece.values], leader, VALUES)
            yield SENT
            scheduler.receive_result(task, reduction.reduced_buffer(piece, vector), leader)
            yield REDUCED
        else:
            yield ENCODE  # a turn, which also needs the values of all ranks of this host
            if self._local_peers:
                with trace.span("sum"):
                    reduction.local_sum(piece, vector)
                if barriers is not None:
                    scheduler.arrive(task, barriers[0])
                    yield ALL_ARRIVED
                    yield ENCODE
            with trace.span("encode"):
                message = reduction.encode(piece, vector, residuals)
            if piece.owner != rank:
                scheduler.send(task, message, piece.owner, ENCODED)
                yield SENT
                message = reduction.reduced_buffer(piece, vector)
                scheduler.expect(task, message, piece.owner, REDUCED)
                yield REDUCED
                if self._local_peers and isinstance(reduction, VariableLengthReduction):
                    message = reduction.message_in(piece, message)
            else:
                scheduler.count(task, ENCODED)  # this rank's own message
                yield ENCODED
                yield REDUCE
                with trace.span("sum"):
                    if isinstance(reduction, VariableLengthReduction):
                        encoded = reduction.encoded_messages(piece)
                        reduction.add_up(piece, residuals, encoded)
                    else:
                        message = reduction.reduce(piece, vector, residuals)
                if isinstance(reduction, VariableLengthReduction) and barriers is not None:
                    scheduler.arrive(task, barriers[1])
                    yield ALL_ARRIVED
                    yield REDUCE
                    with trace.span("encode"):
                        message = reduction.encode_sum(piece, residuals)
                for other_leader in self._receivers:
                    scheduler.send(task, message, other_leader, REDUCED)
            for peer in self._local_peers:
                scheduler.send(task, message, peer, REDUCED)
        yield DECODE
        with trace.span("decode"):
            reduction.decode(piece, vector)
