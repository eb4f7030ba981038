"""A server's loop: receives requests, changes the model, and answers until all workers leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import runtime
from ..communication import Endpoint
from ..communication.endpoint import as_bytes
from ..communication.liveness.finish import ON_ITS_WAY_S
from ..embedding import ServedTables
from ..errors import PeerFailure, SharedError, UserError
from .direct_requests import DIRECT_REQUESTS
from .order import Order
from .requests import Answers, Request, Requests
from .served import ServedModel
from .statistics import LENGTH, NANO, WAIT
from .waits import deadlock, disagreement, of_kind
from .wire import ANSWERS, Kind, Malformed, Message, as_text, from_text

Array = npt.NDArray[Any]

PRESENCE_EVERY_S = 0.5  #: interval of checks for ended programs
REPORT_PROBLEM_FOR_S = 3.0  #: limit for reporting a problem to workers after `stop`
HEARTBEATS = 4  #: heartbeats per `timeout_s` to workers that wait for a held answer
UNORDERED = {Kind.WRITE_TABLES, Kind.ASK_WRITTEN, Kind.COUNT_TABLES}
"""Requests without effect on training, sent by time. Valid at any time, also in a replay."""


class Server:
    """Serves a part of the model, and of every table, to all workers.

    Args:
        endpoint: to the workers. Its peers are the workers' ranks, ordered by worker number.
        answers: to the workers.
        model: the part.
        tables: the parts of the tables.
        order: of the requests.

    Run the server by `serve`. Local.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        answers: Answers,
        model: ServedModel,
        tables: ServedTables,
        order: Order,
    ) -> None:
        self._endpoint, self.model, self.tables = endpoint, model, tables
        self._order = order
        self._ranks: Sequence[int] = endpoint.peers
        self._requests, self._answers = Requests(endpoint), answers
        self._ready: list[Request] = []
        self._held: dict[int, Request] = {}  # requests with a held answer, by worker
        self._live = set(range(len(self._ranks)))
        self._problem: str | None = None
        self._informed: set[int] = set()  # workers that know the problem
        self._finished: set[int] = set()  # workers with their last answer
        self._statistics = np.zeros((len(self._ranks), LENGTH), np.int64)
        self._workers_checked_s = self._handled_s = self._presence_checked_s = runtime.monotonic()
        self._left_since: dict[int, float] = {}  # workers whose program has ended
        self._stopped: float | None = None  # time of `stop`

    def stop(self) -> None:
        """End `serve` soon, for a server without workers."""
        self._stopped = self._stopped or runtime.monotonic()

    @property
    def _is_over(self) -> bool:
        """True after `stop`. If training has failed: REPORT_PROBLEM_FOR_S after `stop`.

        The delay lets workers learn of the problem.
        """
        if self._stopped is None:
            return False
        return self._problem is None or runtime.monotonic() - self._stopped > REPORT_PROBLEM_FOR_S

    def serve(self) -> None:
        """Answer requests until every worker has left.

        Raises:
            SharedError: a worker has failed. All workers know.
            UserError: a worker has been silent for the endpoint's `timeout_s`, or the order of the
                requests cannot be written.
            RanksLost: a rank has failed, on fault-tolerant ranks.
        """
        unwritable: UserError | None = None
        try:
            self._serve()
        finally:
            try:
                self._order.close()
            except UserError as error:  # raised only if there is no worse error
                unwritable = error
            finally:
                self._endpoint.close()
        if self._problem:
            raise SharedError(self._problem)
        if unwritable:
            raise unwritable

    def _serve(self) -> None:
        idle, moving = self._endpoint.backoff(), self._endpoint.backoff(moving=True)
        # bounded: _check_workers, in every round
        while self._live - self._finished - self._informed and not self._is_over:
            if self._move():
                idle.reset()
                moving.reset()
            elif self._requests.coming or self._answers.sending:
                moving.pause()
            else:
                idle.pause()
            self._check_workers()
        if not self._is_over:
            self._answers.finish()
        # bounded: for this rank's writing of a file
        self.tables.wait()

    def abandon(self) -> None:
        """Cancel all transfers, after a failure of ranks has ended `serve`."""
        self._endpoint.abandon()
        # bounded: for this rank's writing of a file
        self.tables.wait()

    def _move(self) -> bool:
        """Do all work that needs no waiting. Return True if there was any."""
        arrived = self._requests.arrived()
        for request in arrived:
            if request.problem is None:
                self._ready.append(request)
            else:
                self._answer(request, from_text(str(request.problem)), Kind.REFUSED)
        handled = self._handle_next()
        self._answers.move()
        return bool(arrived or handled)

    def _handle_next(self) -> bool:
        """Handle the next request in order, if it has arrived. Return True if so."""
        turn = None if self._problem else self._order.next()
        may = (r for r in self._ready if turn in (None, r.worker) or r.message.kind in UNORDERED)
        request = next(may, None)
        if request is None:
            self._require_turn(turn)
            return False
        self._ready.remove(request)
        if request.message.kind not in UNORDERED:
            self._order.answered(request.worker)
            self._handled_s = runtime.monotonic()
        request.begun_ns = runtime.perf_counter_ns()
        if self._problem and request.message.kind != Kind.FAIL:
            self._send_problem(request)
            return True
        try:
            HANDLERS[request.message.kind](self, request)
        except UserError as error:
            self._answer(request, from_text(str(error)), Kind.REFUSED)
        except MemoryError as error:
            kind, rank = request.message.kind.name, self._endpoint.rank
            text = f"the server on rank {rank} has not enough memory for {kind}: {error}"
            self._answer(request, from_text(text), Kind.REFUSED)
        return True

    def _handle_push(self, request: Request) -> None:
        """Handle a push. The push must be the worker's next, based on this server's model."""
        worker, message, model = request.worker, request.message, self.model
        needed = model.push_bytes(message.bits)
        if needed is None:
            raise Malformed(f"bits={message.bits:g} of this push are none of gradient_bits")
        required = {
            "clock": model.clocks[worker] + 1,
            "version": model.pulled[worker],
        }
        for name, number in required.items():
            if getattr(message, name) != number:
                raise Malformed(f"{name}={getattr(message, name)} of this push must be {number}")
        fewest, most = needed if message.samples else (0, 0)
        if not fewest <= message.body <= most:
            required_bytes = f"{most}" if fewest == most else f"at most {most}"
            raise Malformed(f"body={message.body} of this push must be {required_bytes}")
        if worker not in model.live:
            raise Malformed("a worker that has finished cannot push")
        if message.count:
            model.skip(worker)
            self._give_model(request)
            self._release()
            return
        request.staleness = model.push(
            worker, request.body, message.samples, message.factor, message.bits
        )
        self._step_tables()
        self._hold(request)

    def _step_tables(self) -> None:
        """In mode "sync": change the tables after a change of the model.

        An error ends training, because the remaining tables have changed.
        """
        ended = self.model.take_ended_round()
        if ended is None:
            return
        try:
            self.tables.step(*ended, mean=self.model.rules.merge == "mean")
        except (UserError, MemoryError) as error:
            rank = self._endpoint.rank
            self._end_training(f"the server on rank {rank} cannot train its tables: {error}")

    def _give_model(self, request: Request) -> None:
        x = self.model.give(request.worker)
        self._answer(request, as_bytes(x), of=x)

    def _hold(self, request: Request) -> None:
        """Hold back an answer until the workers it depends on have come."""
        if self._problem:
            self._send_problem(request)
            return
        request.ended_ns = request.heartbeat_ns = runtime.perf_counter_ns()
        self._held[request.worker] = request
        self._release()

    def _release(self) -> None:
        """Answer held requests that need not wait any more. End training after a deadlock."""
        meeting = of_kind(self._held, Kind.MEET)
        for worker, request in sorted(self._held.items()):
            if request.message.kind == Kind.PUSH and self.model.may_answer(worker, meeting):
                del self._held[worker]
                self._give_model(request)
        if self._held:
            for kind in (Kind.SUM_SAMPLES, Kind.AGREE_ON_WHOLE, Kind.MEET, Kind.LEAVE):
                self._end_meeting(kind)
            busy = self._live - self._finished - self._informed - self._held.keys()
            clocks, mode = self.model.clocks, self.model.rules.mode
            problem = deadlock(self._held, busy, self._ranks, clocks, mode)
            if problem:  # heartbeats would let the workers wait for ever
                self._end_training(problem)

    def _end_meeting(self, kind: Kind) -> None:
        """Answer all requests of `kind`, once every worker has sent such a request.

        SUM_SAMPLES does not wait for workers that have left.
        """
        waiting = {k: r for k, r in sorted(self._held.items()) if r.message.kind == kind}
        rest = self.model.live if kind == Kind.SUM_SAMPLES else self._live
        if not waiting or not rest <= waiting.keys():
            return
        problem = disagreement(waiting, self._ranks) if kind == Kind.AGREE_ON_WHOLE else None
        if problem:
            self._end_training(problem)
            return
        samples, last = sum(request.message.samples for request in waiting.values()), None
        if kind == Kind.LEAVE:
            now = runtime.perf_counter_ns()
            for worker, request in waiting.items():
                self._statistics[worker, WAIT] += now - request.ended_ns
            samples = self.model.samples
            last = np.concatenate([as_bytes(self.model.x), as_bytes(self._statistics)])
            self._finished |= waiting.keys()
        for worker, request in waiting.items():
            del self._held[worker]
            self._answer(request, last, samples=samples)

    def _handle_leave(self, request: Request) -> None:
        if request.message.body != self._statistics[0].nbytes:
            raise Malformed(f"body={request.message.body} of the statistics is not possible")
        self._statistics[request.worker] = request.body.view(np.int64)
        self.model.leave(request.worker)
        self._step_tables()
        self._hold(request)

    def _handle_fail(self, request: Request) -> None:
        self._end_training(as_text(request.body))
        self._send_problem(request)

    def _end_training(self, problem: str) -> None:
        """Report a problem to all waiting workers now, and to the rest at their next request."""
        self._problem = self._problem or problem
        for worker in list(self._held):
            self._send_problem(self._held.pop(worker))

    def _send_problem(self, request: Request) -> None:
        self._informed.add(request.worker)
        self._answer(request, from_text(self._problem or ""), Kind.FAILED)

    def _answer_directly(self, request: Request) -> None:
        handle = DIRECT_REQUESTS[request.message.kind]
        self._answer(request, handle(self.model, self.tables, request))

    def _answer(
        self,
        request: Request,
        body: Array | None = None,
        kind: Kind | None = None,
        *,
        samples: int | None = None,
        of: Array | None = None,
    ) -> None:
        """Begin to send an answer, and listen to the worker again.

        Args:
            of: the vector whose memory the body is. None if the body has memory of its own.
        """
        now, worker = runtime.perf_counter_ns(), request.worker
        request.begun_ns = request.begun_ns or now
        request.ended_ns = request.ended_ns or now
        message = Message(
            kind=ANSWERS[request.message.kind] if kind is None else kind,
            clock=self.model.clocks[worker],
            version=self.model.version,
            samples=self.model.samples if samples is None else samples,
            body=0 if body is None else body.nbytes,
            staleness=request.staleness,
            queued_ns=request.begun_ns - request.arrived_ns,
            applied_ns=request.ended_ns - request.begun_ns,
            held_ns=now - request.ended_ns,
        )
        self._requests.release(request)
        self._endpoint.listen(self._ranks[worker])
        self._answers.send(worker, message, body, of=of)

    def _check_workers(self) -> None:
        """Send heartbeats to waiting workers at intervals. Find silent or finished workers."""
        now, timeout_s = runtime.monotonic(), self._endpoint.timeout_s
        every = timeout_s / HEARTBEATS
        if now - self._presence_checked_s > PRESENCE_EVERY_S:
            self._presence_checked_s = now
            self._require_presence(now)
        if now - self._workers_checked_s < every / 4:
            return
        self._workers_checked_s, heard = now, self._requests.heard
        self._order.write()
        for request in [*self._held.values(), *self._ready]:  # `_ready`: in a replay
            heard[request.worker] = now
            if runtime.perf_counter_ns() - request.heartbeat_ns > every * NANO:
                request.heartbeat_ns = runtime.perf_counter_ns()
                self._answers.send(request.worker, Message(kind=Kind.HEARTBEAT))
        for worker in self._live - self._finished - self._informed:
            if now - heard[worker] <= timeout_s:
                continue
            rank = self._ranks[worker]
            if self._endpoint.continues_without(rank):
                heard[worker] = now
                continue
            self._endpoint.show_stacks(
                rank, f"has received nothing from rank {rank} for {timeout_s:g} s"
            )
            raise PeerFailure(
                f"a server has received nothing from the worker on rank {rank} for "
                f"timeout_s={timeout_s:g} s: the worker has stopped, has ended without "
                "learner.finish(), or is busy with something else; ending the job"
            )

    def _require_presence(self, now: float) -> None:
        """Check that no worker's program has ended without `leave`."""
        left = self._endpoint.finished_peers()
        for worker in self._live - self._finished - self._informed:
            rank = self._ranks[worker]
            if rank in left and now - self._left_since.setdefault(worker, now) > ON_ITS_WAY_S:
                raise UserError(
                    f"the program of the worker on rank {rank} has ended without learner.finish(); "
                    "ending the job"
                )

    def _require_turn(self, turn: int | None) -> None:
        """In a replay: check that the worker whose turn it is can send a request, and does."""
        if turn is None or not self._ready:
            return
        timeout_s = self._endpoint.timeout_s
        if turn in self._held:
            why = "waits for other workers itself"
        elif runtime.monotonic() - self._handled_s > timeout_s:
            why = f"has asked for nothing for timeout_s={timeout_s:g} s, while other workers wait"
        else:
            return
        raise UserError(
            f"replay: the recorded order has the worker on rank {self._ranks[turn]} next, "
            f"which {why}: this is not the run that was recorded"
        )


HANDLERS: dict[Kind, Callable[[Server, Request], None]] = {
    Kind.PUSH: Server._handle_push,
    Kind.PULL: Server._give_model,
    Kind.MEET: Server._hold,
    Kind.SUM_SAMPLES: Server._hold,
    Kind.AGREE_ON_WHOLE: Server._hold,
    Kind.LEAVE: Server._handle_leave,
    Kind.FAIL: Server._handle_fail,
    **dict.fromkeys(DIRECT_REQUESTS, Server._answer_directly),
}
