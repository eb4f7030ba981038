"""Record the results of collectives before training, and replay the results on joining ranks.

Before a program makes a learner, its ranks communicate: the ranks read data together, check
agreement, exchange host names. A joining standby rank runs the same program while the remaining
ranks are training. So every rank records the results of its collectives until training begins. A
joining rank gets the recorded results of the replaced rank.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from ...errors import RanksLost, UserError
from ...kernels import array_module, on_host
from ..communicator import Communicator
from ..messages import Array
from ..serialization import packed, unpacked
from .retry import reconfigure_ranks

Result = TypeVar("Result")

MOST_BYTES = 16 << 20
"""Most bytes of recorded arrays. Programs read their data on each rank, without collectives."""


def _recorded(method: str, *, name: str | None = None, writes: str = "") -> Any:
    """Return a collective of `WithReplayLog`: the method of the communicator behind, recorded.

    Args:
        method: name of the method.
        name: name of the collective; default: that of the method.
        writes: the argument that the method writes, an array; default: its result is recorded.
    """
    names = [*inspect.signature(getattr(Communicator, method)).parameters][1:]
    place = names.index(writes) if writes else len(names)

    def collective(self: WithReplayLog, *args: Any, **options: Any) -> Any:
        call = partial(getattr(self._inner, method), *args, **options)
        array = args[place] if place < len(args) else options.get(writes)
        return self._replayed(name or method, call, array)

    return collective


class WithReplayLog(Communicator):
    """Adds recording and replay to a fault-tolerant communicator.

    Args:
        standby: the job started with standby ranks; otherwise nothing is recorded.
        joins: this rank was a standby rank.
    """

    def __init__(self, *, standby: bool, joins: bool) -> None:
        self._standby, self.joined = standby, joins
        self._record: list[tuple[str, Any]] | None  #: None: not recording
        self._record = [] if standby and not joins else None
        self._log = self._record  #: the log for joining ranks; None: not received yet
        self._replay: deque[tuple[str, Any]] | None = None  #: results still to replay
        self._bytes = 0

    @property
    def _inner(self) -> Any:
        """The communicator class behind this class."""
        return super()

    def end_replay_log(self) -> None:
        """Stop recording and replay: training begins. Local."""
        self._record, self._replay = None, None
        self._hosts = None

    def join(self) -> None:
        """Receive the replay log, on a joining standby rank. Collective."""
        try:
            self._share_replay_log()
        except RanksLost:
            reconfigure_ranks(self)

    def _share_replay_log(self) -> None:
        """Send the replay log to newly joined ranks. Safe to call again if a sender fails.

        Called after each `reconfigure`. Collective.
        """
        if not self._standby:
            return
        have_log = self._inner.sum_integers(np.array([self._log is not None], np.int64))
        if have_log[0] == self.size:
            return
        logs = [unpacked(known) for known in self._inner._allgather_bytes(packed(self._log))]
        if self._log is None:
            self._log = next((known for known in logs if known is not None), [])
            self._replay = deque(self._log)

    def _replayed(self, name: str, call: Callable[[], Result], array: Array = None) -> Result:
        """Make a call and record its result, or return the recorded result.

        Args:
            name: name of the collective.
            call: the collective.
            array: array written by the call.
        Raises:
            UserError: the recorded call has a different name, or there is no recorded call left.
        """
        if self._replay:
            return cast(Result, self._next_result(name, array))
        if self._replay is not None:
            raise UserError(
                f"a standby rank has joined and calls {name}, but the other ranks have made no "
                "further collective call before their learner: every run must make the same calls "
                "before it"
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
                f"a standby rank cannot join: it calls {name}, but the other ranks have called "
                f"{known}, or more than {MOST_BYTES >> 20} MiB were communicated"
            )
        if array is not None:
            array[...] = array_module(array).asarray(result)
            return None
        return result

    _allgather_bytes = _recorded("_allgather_bytes", name="allgather_object")
    sum_integers = _recorded("sum_integers")
    broadcast = _recorded("broadcast", writes="array")
    allgather = _recorded("allgather", writes="receive")
    alltoall = _recorded("alltoall", writes="receive")
