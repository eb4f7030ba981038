"""Requests of a worker to several servers at once, and the servers' answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..communication import Endpoint
from ..communication.endpoint import Header, OtherLength, Transfer
from ..errors import SharedError, UserError
from .statistics import WorkerStatistics
from .wire import ANSWERS, Kind, Malformed, Message, as_text, from_text, unpacked

HostArray = npt.NDArray[Any]

TRAINING_KINDS = {Kind.PUSH, Kind.PULL, Kind.PUSH_ROWS, Kind.PULL_ROWS, Kind.SET_ROWS}
"""Requests whose bytes are counted. Bytes of checkpoints do not belong to training."""

ERROR_ANSWERS = {Kind.FAILED, Kind.REFUSED}


@dataclass
class Ask:
    """A request to a server, and the memory for the answer's body."""

    server: int  #: number of the server
    message: Message
    body: HostArray | None = None
    into: HostArray | None = None  #: uint8, of the answer's length, if known in advance


@dataclass
class Answer:
    """A server's answer."""

    message: Message
    body: HostArray


class Conversation:
    """Sends requests to servers, and collects the answers.

    Args:
        endpoint: to the servers. Its peers are the servers' ranks, ordered by server number.
        statistics: counts the bytes of training.
        check: raises if waiting for the server on a rank is pointless.

    Local.
    """

    def __init__(
        self, endpoint: Endpoint, statistics: WorkerStatistics, check: Callable[[int], None]
    ) -> None:
        self.statistics, self._endpoint, self._check = statistics, endpoint, check
        self._ranks = endpoint.peers
        self._headers: dict[int, Header] = {}
        self.problem: str | None = None  #: the reason if training cannot go on
        self.left = False  #: True once servers have ended, and requests are refused

    def ask(self, asks: Iterable[Ask]) -> list[Answer]:
        """Send requests, wait for all answers, and return the answers in the order of the requests.

        If any answer is invalid or an error, all `into` stay unchanged.

        Raises:
            SharedError: a worker has failed. All workers receive the same problem.
            UserError: a server has refused a request, or all servers have left.
            RanksLost: a rank has failed, on fault-tolerant ranks.
        """
        asks = list(asks)
        if self.problem is not None:
            raise SharedError(self.problem)
        if self.left:
            raise UserError(
                "the servers have ended with learner.finish(): save, load, evaluate and ask for "
                "rows before it"
            )
        try:
            return self._checked(asks, self._exchange(asks))
        except SharedError as error:  # perhaps from this rank's own server alone
            self.problem = str(error)
            raise

    def _checked(self, asks: list[Ask], answers: list[Answer]) -> list[Answer]:
        """Return the answers, or raise the problem reported by an answer."""
        failed = {
            ask.server: as_text(answer.body)
            for ask, answer in zip(asks, answers, strict=True)
            if answer.message.kind == Kind.FAILED
        }
        if failed:
            self.problem = next(iter(failed.values()))
            text = from_text(self.problem)
            message = Message(kind=Kind.FAIL, body=text.nbytes)
            others = set(range(len(self._ranks))) - failed.keys()  # not yet informed
            self._exchange([Ask(server, message, text) for server in sorted(others)])
            raise SharedError(self.problem)
        for answer in answers:
            if answer.message.kind == Kind.REFUSED:
                raise UserError(as_text(answer.body))
        return answers

    def _exchange(self, asks: list[Ask]) -> list[Answer]:
        sending = []
        for ask in asks:
            rank, header = self._ranks[ask.server], ask.message.packed()
            sending.append(self._endpoint.send(rank, header, ask.body))
            self.statistics.bytes_sent += ask.message.body * self._counts(ask)
        # Receive every header, even after an error: a later request must not meet it.
        messages = [self._answer_to(ask) for ask in asks]
        sound = all(
            isinstance(message, Message) and message.kind not in ERROR_ANSWERS
            for message in messages
        )
        answers, coming = [], []
        for ask, message in zip(asks, messages, strict=True):
            rank = self._ranks[ask.server]
            if isinstance(message, Malformed):
                text = f"the server on rank {rank} has sent a malformed answer: {message}"
                answers.append(Answer(Message(kind=Kind.REFUSED), from_text(text)))
                continue
            separate = not sound or ask.into is None
            body = np.empty(message.body, np.uint8) if separate else cast(HostArray, ask.into)
            self.statistics.bytes_received += message.body * self._counts(ask)
            if message.body:
                coming.append(self._endpoint.receive(rank, body))
            answers.append(Answer(message, body))
        self._finish([*coming, *sending])
        return answers

    def _finish(self, transfers: list[Transfer]) -> None:
        """Wait until all transfers have ended, even if a transfer has the wrong length."""
        try:
            self._endpoint.finish(transfers, "messages to and from servers")
        except OtherLength:
            self._finish(transfers)
            raise UserError("a server's answer differs in length from its announcement") from None

    def _counts(self, ask: Ask) -> bool:
        """True if the request belongs to training, and its bytes leave this rank."""
        return ask.message.kind in TRAINING_KINDS and self._ranks[ask.server] != self._endpoint.rank

    def _answer_to(self, ask: Ask) -> Message | Malformed:
        """Return the header of an answer. If invalid, discard the body and return the reason."""
        rank = self._ranks[ask.server]
        while True:
            with self._endpoint.watched(f"an answer of the server on rank {rank}", rank):
                header = self._endpoint.until(lambda: self._header_of(rank))
            self._endpoint.listen(rank)
            try:
                message = unpacked(header)
                if message.kind == Kind.HEARTBEAT:  # restarts the timeout
                    self._note_heartbeat()
                    continue
                if message.kind in ERROR_ANSWERS:
                    return message
                if message.kind != ANSWERS.get(ask.message.kind):
                    kind, asked = message.kind.name, ask.message.kind.name
                    raise Malformed(f"kind={kind} is no answer to {asked}")
                if ask.into is not None and message.body != len(ask.into):
                    raise Malformed(f"body={message.body} of this answer must be {len(ask.into)}")
                return message
            except Malformed as error:
                self._endpoint.discard(rank)
                return error

    def _note_heartbeat(self) -> None:
        """Called when a server lets this worker wait on."""

    def _header_of(self, rank: int) -> Header | None:
        if rank not in self._headers:  # else its server may have finished since
            for sender, header in self._endpoint.arrivals():
                self._headers[sender] = header
        if rank not in self._headers:
            self._check(rank)
            return None
        return self._headers.pop(rank)

    def abandon(self) -> None:
        """Cancel all transfers after a failure of ranks."""
        self._endpoint.abandon()

    def close(self) -> None:
        """Refuse all later requests."""
        self.left = True
        self._endpoint.close()
