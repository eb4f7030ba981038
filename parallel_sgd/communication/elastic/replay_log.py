"""What the ranks have told each other before they train, for those that join them later.

A program does this and that with its ranks before it makes a learner: it reads data together, sees
that all agree, finds out about hosts. A rank in reserve that joins runs the same program, while the
others are in the midst of training. So every rank writes down what collectives have given until
then, and a rank that joins is given the same, as the one had it whose place it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ...kernels import array_module, on_host
from ..communicator import Communicator, Counts
from ..liveness.failure import is_rank_failure, reconfigure_ranks
from ..messages import Array
from ..serialization import packed, unpacked

Result = TypeVar("Result")

MOST_BYTES = 16 << 20
"""Of arrays that are written down: programs read their data each for themselves."""


class WithReplayLog(Communicator):
    """Before a communicator whose ranks survive each other.

    Args:
        reserve: whether the job has begun with ranks in reserve; without, nothing is written down.
        joins: whether this rank was one of them.
    """

    def __init__(self, *, standby: bool, joins: bool) -> None:
        self._standby = standby
        self._record: list[tuple[str, Any]] | None  #: None: the ranks train, and nothing is
        self._record = [] if standby and not joins else None
        self._known = self._record  #: for ranks that join; None: this one has yet to hear it
        self._replay: deque[tuple[str, Any]] | None = None  #: to a rank that has joined
        self._bytes = 0

    @property
    def _inner(self) -> Any:
        """The communicator behind this class."""
        return super()

    def end_replay_log(self) -> None:
        """The ranks begin to train. Local."""
        self._record, self._replay = None, None
        self._hosts = None

    def join(self) -> None:
        """Hear what the others have told each other: on a rank that was in reserve. Collective."""
        try:
            self._share_replay_log()
        except Exception as error:
            if not is_rank_failure(error):
                raise
            reconfigure_ranks(self)

    def _share_replay_log(self) -> None:
        """Tell ranks that have joined and do not know it, also where one that has told it has died
        since. To be called after each `reconfigure`. Collective."""
        if not self._standby:
            return
        knows = self._inner.sum_integers(np.array([self._known is not None], np.int64))
        if knows[0] == self.size:
            return
        told = [unpacked(known) for known in self._inner._allgather_bytes(packed(self._known))]
        if self._known is None:
            self._known = next((known for known in told if known is not None), [])
            self._replay = deque(self._known)

    def _replayed(self, name: str, call: Callable[[], Result], array: Array = None) -> Result:
        """Call it, and write down what it gives; or give what is written down.

        Args:
            array: written by the call.
        """
        if self._replay:
            return cast(Result, self._next_result(name, array))
        if self._replay is not None:
            raise UserError(
                f"a rank in reserve has joined, and calls {name}, which the others have not before "
                "their learner: what is done together must come before it in every run"
            )
        result = call()
        if self._record is not None:
            self._append(name, result if array is None else np.array(on_host(array)))
        return result

    def _append(self, name: str, result: Any) -> None:
        assert self._record is not None
        if isinstance(result, np.ndarray):
            self._bytes += result.nbytes
            result = result if self._bytes <= MOST_BYTES else None
        self._record.append((name, result))

    def _next_result(self, name: str, array: Array) -> Any:
        assert self._replay
        known, result = self._replay.popleft()
        if known != name or (array is not None and result is None):
            raise UserError(
                f"a rank in reserve cannot join: it calls {name} where the others have called "
                f"{known}, or more than {MOST_BYTES >> 20} MiB were communicated"
            )
        if array is not None:
            array[...] = array_module(array).asarray(result)
            return None
        return result

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        call = self._inner._allgather_bytes
        return cast(list[bytes], self._replayed("allgather_object", lambda: call(data)))

    def sum_integers(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        call = self._inner.sum_integers
        total: npt.NDArray[np.int64] = self._replayed("sum_integers", lambda: call(values))
        return total

    def broadcast(self, array: Array, root: int = 0) -> None:
        call = self._inner.broadcast
        self._replayed("broadcast", lambda: call(array, root), array)

    def allgather(self, send: Array, receive: Array, counts: Counts) -> None:
        call = self._inner.allgather
        self._replayed("allgather", lambda: call(send, receive, counts), receive)

    def alltoall(
        self,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
        *,
        most: int | None = None,
    ) -> None:
        call, rest = self._inner.alltoall, (send_counts, receive, receive_counts)
        self._replayed("alltoall", lambda: call(send, *rest, most=most), receive)
