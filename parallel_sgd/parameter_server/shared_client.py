"""The client of a worker of several ranks: one rank asks the servers, for all ranks of the worker.

The ranks of a worker make the same requests in the same order. The first rank sends each request,
and broadcasts the answer, so every rank continues as if the servers had answered it. Between
workers and servers a model therefore travels once for a worker, whatever the number of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..communication import Communicator, Endpoint
from ..errors import SharedError, UserError
from .client import Client
from .conversation import Answer, Ask
from .parts import Part
from .wire import Message, unpacked

WAITS, ANSWERED, FAILED, REFUSED = "waits", "answered", "failed", "refused"


class SharedClient(Client):
    """A client of all ranks of a worker.

    Args:
        relay: the ranks of this worker. Rank 0 of them sends the requests. Used by requests only,
            which run in program order.
        endpoint, parts, check, residual_decay: as for any `Client`.

    All methods that send requests are collective over the ranks of the worker, except within
    `alone`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        parts: Sequence[Part],
        check: Callable[[int], None],
        relay: Communicator,
        *,
        residual_decay: float = 1.0,
    ) -> None:
        super().__init__(endpoint, parts, check, residual_decay=residual_decay)
        self._relay, self.sends, self._alone = relay, relay.rank == 0, False

    @contextmanager
    def alone(self) -> Iterator[None]:
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def ask(self, asks: Iterable[Ask]) -> list[Answer]:
        """Have the worker's first rank send requests, and return the answers on all its ranks.

        Raises:
            SharedError, UserError: as `Conversation.ask`, on all ranks of the worker.
        """
        asks = list(asks)
        if self._alone:
            return super().ask(asks)
        if self.sends:
            return self._ask_for_all(asks)
        return self._await_answers(asks)

    def _ask_for_all(self, asks: list[Ask]) -> list[Answer]:
        try:
            answers = super().ask(asks)
        except UserError as error:
            kind = FAILED if isinstance(error, SharedError) else REFUSED
            self._relay.allgather_object([kind, str(error)])
            raise
        headers = [answer.message.packed().tolist() for answer in answers]
        self._relay.allgather_object([ANSWERED, [headers, [len(a.body) for a in answers]]])
        for ask, answer in zip(asks, answers, strict=True):
            if len(answer.body):
                self._relay.broadcast(answer.body)
                copies = self._relay.size - 1 if self._counts(ask) else 0
                self.bytes_relayed += copies * answer.body.nbytes
        return answers

    def _await_answers(self, asks: list[Ask]) -> list[Answer]:
        kind: str = WAITS
        content: Any = ""
        # The first rank ends every wait, or repeats it with each heartbeat of a server.
        while kind == WAITS:
            kind, content = self._relay.allgather_object(None)[0]
        if kind == FAILED:
            self.problem = content
            raise SharedError(content)
        if kind == REFUSED:
            raise UserError(content)
        answers = []
        for ask, header, length in zip(asks, *content, strict=True):
            body = np.empty(length, np.uint8) if ask.into is None else ask.into
            if length:
                self._relay.broadcast(body)
            message = unpacked(np.array(header, np.int64))
            assert isinstance(message, Message)
            answers.append(Answer(message, body))
        return answers

    def _note_heartbeat(self) -> None:
        if not self._alone:
            self._relay.allgather_object([WAITS, ""])
