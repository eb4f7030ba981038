"""The worker's client: pushes to all servers at once, and pulls from all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .. import runtime
from ..communication import Endpoint, InBackground
from ..communication.endpoint import as_bytes
from ..compression import Allowance, EntropyCoded
from ..kernels import array_module, finish_on_device, on_device, on_host
from .conversation import Answer, Ask, Conversation
from .parts import Part
from .statistics import LENGTH, NANO, WorkerStatistics, unpacked_statistics
from .wire import Kind, Message, from_text

Array = Any  #: a NumPy or CuPy array
HostArray = npt.NDArray[Any]
Result = TypeVar("Result")


Marks = npt.NDArray[np.bool_]


@dataclass
class PendingPush:
    """A push under way (see `Client.push`).

    Attributes:
        clock: number of this push.
        first_residual: [n], the residual before the first attempt. None if the codec is lossless or
            the ranks are not fault-tolerant.
        residual_before: [n], the residual before the latest attempt.
        applied: [n], True for values on servers from any attempt. None: no value.
        arrived: [n], True for values on servers from the latest attempt. None: no value.
    """

    vector: Array
    residual: Array | None
    samples: int
    factor: float
    out: Array
    bits: float
    clock: int
    first_residual: Array | None = None
    residual_before: Array | None = None
    applied: Marks | None = None
    arrived: Marks | None = None

    def record_failure(self, arrived: Marks, missing: Marks) -> None:
        """Record the values present on servers after ranks have failed.

        Args:
            arrived: [n], True for values of the latest attempt known to be on servers.
            missing: [n], True for values of the push on no remaining server.
        """
        for known in (self.applied, self.arrived):
            if known is not None:
                arrived_before = known & ~missing
                known[...] = arrived_before | arrived
        self.applied = arrived.copy() if self.applied is None else self.applied
        self.arrived = arrived.copy() if self.arrived is None else self.arrived

    def retry_vector(self) -> Array:
        """Return the vector for the next attempt: 0 for values already on servers.

        Each value of the residual is reset according to the attempts that have arrived: to the
        current residual after the latest attempt, to the residual before the latest attempt after
        an earlier attempt, and to the first residual after none.
        """
        vector, residual, before = self.vector, self.residual, self.residual_before
        xp = array_module(vector)
        assert self.applied is not None, "record_failure() comes before each retry"
        applied = xp.asarray(self.applied)
        if residual is not None and before is not None:
            earlier = xp.where(applied, before, self.first_residual)
            residual[...] = xp.where(xp.asarray(self.arrived), residual, earlier)
            before[...] = residual
        self.arrived = None
        if not self.applied.any():
            return vector
        return xp.where(applied, vector.dtype.type(0), vector)


@dataclass
class RepeatablePush(PendingPush):
    """A push of fault-tolerant ranks. Keeps the residual before it, for another attempt."""

    def __post_init__(self) -> None:
        if self.residual is not None:
            self.first_residual = self.residual.copy()
            self.residual_before = self.residual.copy()


class Client(Conversation):
    """A worker's requests to all servers.

    Requests run in program order. This includes requests of the background thread (`begin`).

    Args:
        parts: of the model, one for each server.
        endpoint, check: as for any `Conversation`.
        kind_of_push: the class of pushes.
        residual_decay: factor of the residual before every push with samples: see `Exchange`.

    Every method that sends requests raises as `ask` does. All methods are local.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        parts: Sequence[Part],
        check: Callable[[int], None],
        kind_of_push: type[PendingPush] = PendingPush,
        residual_decay: float = 1.0,
    ) -> None:
        super().__init__(endpoint, WorkerStatistics(), check)
        self.parts, self.servers, self._kind_of_push = tuple(parts), len(parts), kind_of_push
        self._residual_decay = residual_decay
        self._begun: InBackground[Any] | None = None  # the latest background work
        self._asking = runtime.Lock()
        self._owner = threading.get_ident()
        self.clock = 0  #: pushes so far, including those without samples
        self.row_clock = 0  #: pushes of rows so far
        self.versions = [0] * self.servers  #: of the model on this worker, by server
        self.samples = 0  #: seen by all workers, by the servers' latest answer
        self.factor = 1.0  #: of the learning rate, for pushes of rows
        self.blocked_s = 0.0  #: seconds of the main thread spent in `in_order` and `waiting_within`
        self.waited_s = 0.0  #: those in `waiting_within` that the statistics lack
        self.pending_push: PendingPush | None = None  #: the push under way
        self.bytes_relayed = 0  #: of servers' answers, sent to other ranks of this worker
        self.sends = True  #: False if another rank of this worker sends the requests

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Open a `with` block for requests of this rank alone, if a worker has several ranks."""
        yield

    @contextmanager
    def waiting_within(self) -> Iterator[None]:
        """Time a `with` block as waiting for other ranks of this worker. For the main thread."""
        begin = runtime.perf_counter()
        try:
            yield
        finally:
            waited = runtime.perf_counter() - begin
            self.blocked_s += waited
            self.waited_s += waited

    def count_waiting_within(self) -> None:
        """Add the time in `waiting_within` to the statistics. Not beside work in the background."""
        self.statistics.seconds.wait += self.waited_s
        self.waited_s = 0.0

    def begin(self, work: Callable[[], Result]) -> InBackground[Result]:
        """Run `work` in a background thread. Later requests wait for the result."""
        before = self._begun

        def in_turn() -> Result:
            if before is not None:
                # bounded: for requests of this rank, each in watched()
                before.wait()
            return self._locked(work)

        # If ranks have failed, each later request raises that, too.
        self._begun = begun = InBackground("to servers", in_turn, reports=False)
        return begun

    def in_order(self, work: Callable[[], Result]) -> Result:
        """Run `work`, which sends requests, after all background work has ended."""
        begin = runtime.perf_counter()
        try:
            if self._begun is not None:
                # bounded: for requests of this rank, each in watched()
                self._begun.wait()
            return self._locked(work)
        finally:
            if threading.get_ident() == self._owner:  # not in the background
                self.blocked_s += runtime.perf_counter() - begin

    def _locked(self, work: Callable[[], Result]) -> Result:
        with self._asking:
            return work()

    def push(
        self,
        vector: Array,
        residual: Array | None,
        samples: int,
        factor: float,
        out: Array,
        bits: float = 32,
    ) -> None:
        """Push a vector, and pull the resulting model.

        Args:
            vector: [n], the values to push; not changed.
            residual: float32 [n], the quantization error of pushes so far; updated. None with
                lossless codecs.
            samples: in `vector`. With 0 samples the vector is not sent.
            factor: of the learning rate.
            out: [n], written. May be the model itself, but not `vector`.
            bits: per value of the push.
        """
        if samples and self.sends and residual is not None and self._residual_decay != 1:
            with on_device(vector):
                residual *= self._residual_decay
        self.pending_push = self._kind_of_push(
            vector, residual, samples, factor, out, bits, self.clock + 1
        )
        self._push(self.pending_push, vector)

    def retry_push(self, pending: PendingPush) -> None:
        """Repeat a push interrupted by failed ranks, without the values already on servers."""
        self._push(pending, pending.retry_vector())

    def _push(self, pending: PendingPush, vector: Array) -> None:
        begin = runtime.perf_counter()
        residual, samples, out = pending.residual, pending.samples, pending.out
        self.clock, applied, bits = pending.clock, pending.applied, pending.bits
        asks = []
        allowance_of = cache(partial(self._allowance, vector, residual, bits))
        with on_device(vector):
            for server, part in enumerate(self.parts):
                known = applied is not None and part.all_of(applied)
                body = None
                if samples and not known and self.sends:
                    body = part.encoded(vector, residual, bits, allowance_of)
                message = Message(
                    kind=Kind.PUSH,
                    clock=self.clock,
                    version=self.versions[server],
                    samples=0 if known else samples,
                    count=int(known),
                    body=0 if body is None else body.nbytes,
                    factor=pending.factor,
                    bits=bits,
                )
                asks.append(Ask(server, message, body, part.into(out)))
            answers = self._take(asks, out)
        self.add_seconds(answers, runtime.perf_counter() - begin)
        if samples:
            self.statistics.pushes += 1
            self.statistics.samples += samples
            self.statistics.count(max(answer.message.staleness for answer in answers))
        self.pending_push = None

    def _allowance(
        self, vector: Array, residual: Array | None, bits: float, codec: EntropyCoded
    ) -> Allowance:
        """Return the quantization step of a push, the same for all servers."""
        assert residual is not None
        parts = (part.pairs(codec, vector, residual, bits) for part in self.parts)
        return Allowance(codec, [pair for pairs in parts for pair in pairs])

    def pull(self, out: Array) -> None:
        """Pull the model into `out` [n]."""
        message = Message(kind=Kind.PULL)
        with on_device(out):
            parts = enumerate(self.parts)
            self._take([Ask(server, message, into=part.into(out)) for server, part in parts], out)

    def _take(self, asks: list[Ask], out: Array) -> list[Answer]:
        """Request every server's part of the model, and write the parts to `out` [n]."""
        answers = self.ask(asks)
        for part in self.parts:
            part.put_received(out)
        finish_on_device(out)
        self.versions = [answer.message.version for answer in answers]
        self.samples = answers[0].message.samples
        self.statistics.version = self.versions[0]
        return answers

    def add_seconds(self, answers: list[Answer], seconds: float) -> None:
        """Add an exchange to the statistics: seconds of waiting, of applying, and on the wire."""
        messages, spent = [answer.message for answer in answers], self.statistics.seconds
        waited = max((m.queued_ns + m.held_ns for m in messages), default=0) / NANO
        applied = max((m.applied_ns for m in messages), default=0) / NANO
        spent.wait += waited
        spent.apply += applied
        spent.wire += max(0.0, seconds - waited - applied)

    def meet(self) -> None:
        """Wait until all workers have called `meet`.

        The request goes to every server, so that no server makes workers wait for this worker's
        next push.

        Raises:
            SharedError: a worker has left, so the meeting can never happen.
        """
        begin = runtime.perf_counter()
        self.add_seconds(self.ask_all(Kind.MEET), runtime.perf_counter() - begin)

    def sum_samples(self, samples: int) -> int:
        """Return the sum of all workers' samples in a step. Waits for workers still training."""
        begin, message = runtime.perf_counter(), Message(kind=Kind.SUM_SAMPLES, samples=samples)
        answers = self.ask([Ask(0, message)])
        self.add_seconds(answers, runtime.perf_counter() - begin)
        return answers[0].message.samples

    def agree_on_whole(self, samples: int) -> None:
        """Wait until all workers have the same whole minibatch of `samples` samples.

        The request goes to every server, so that each server hears from this worker in every step.

        Raises:
            SharedError: the workers' sample counts differ.
        """
        begin, message = runtime.perf_counter(), Message(kind=Kind.AGREE_ON_WHOLE, samples=samples)
        answers = self.ask(Ask(server, message) for server in range(self.servers))
        self.add_seconds(answers, runtime.perf_counter() - begin)

    def leave(self, out: Array) -> list[WorkerStatistics]:
        """Announce the last push, wait for all workers to do so, and pull the final model.

        Args:
            out: [n], written.
        Returns:
            The statistics of all workers.
        """
        own = as_bytes(self.statistics.packed())
        message = Message(kind=Kind.LEAVE, clock=self.clock, body=own.nbytes)
        with on_device(out):
            answers = self.ask(Ask(server, message, own) for server in range(self.servers))
            for part, answer in zip(self.parts, answers, strict=True):
                n = part.bytes
                part.into(out)[...] = answer.body[:n]
                part.put_received(out)
            finish_on_device(out)
        self.samples = answers[0].message.samples
        self.versions = [answer.message.version for answer in answers]
        self.left = True
        table = answers[0].body[self.parts[0].bytes :].copy().view(np.int64)
        return [unpacked_statistics(numbers) for numbers in table.reshape(-1, LENGTH)]

    def fail(self, problem: str) -> None:
        """Report to all servers, and through the servers to all workers, why training cannot go on.

        Raises:
            SharedError: always.
        """
        self.ask_all(Kind.FAIL, from_text(problem))

    def next_row_clock(self) -> int:
        """Return the number of the next push of rows. Servers detect repeated pushes by it."""
        self.row_clock += 1
        return self.row_clock

    def push_parts(
        self, kind: Kind, vectors: Sequence[Array], counters: Sequence[HostArray] = ()
    ) -> None:
        """Send each server its parts of the vectors [n], and its entry of `counters`, if given."""
        on_cpu = [on_host(vector) for vector in vectors]
        asks = []
        for server, part in enumerate(self.parts):
            arrays = [*map(part.cut, on_cpu), *counters[server : server + 1]]
            body = np.concatenate([as_bytes(array) for array in arrays])
            asks.append(Ask(server, Message(kind=kind, body=body.nbytes), body))
        self.ask(asks)

    def abandon(self) -> None:
        self._end_begun()
        super().abandon()

    def close(self) -> None:
        """Wait for background work, and refuse all later requests."""
        self._end_begun()
        super().close()

    def _end_begun(self) -> None:
        """Wait for background work. An exception that nobody has asked for is dropped."""
        if self._begun is not None:
            self._begun.error()
            self._begun = None

    def ask_all(self, kind: Kind, body: HostArray | None = None) -> list[Answer]:
        """Send the same request to every server."""
        message = Message(kind=kind, body=0 if body is None else body.nbytes)
        return self.ask(Ask(server, message, body) for server in range(self.servers))
