"""Where a rank's time goes: intervals with a name, on the clock of `time.perf_counter`.

Whoever works or waits says so through its communicator, ``with comm.trace.span("encode"): ...``. By
default nothing is kept, which costs about 0.15 µs; `Trace` keeps it, in memory. Everything here is
local: `parallel_sgd.training.trace_file` writes the file of all ranks.

    compute    the user's, between two steps of the learner: data and gradient
    step       of the learner, whole, with what is in it:
    exchange   a sum over all ranks, with encode, wire, sum and decode
    wait       for the other ranks
    update     the optimizer's step
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, NamedTuple, Protocol

__all__ = ["MOST_EVENTS", "NO_TRACE", "Event", "Span", "Trace"]

MOST_EVENTS = 100_000
"""So many intervals of a rank are kept, some 20 MB; later ones are only counted."""


class Event(NamedTuple):
    """One interval.

    Attributes:
        begin_s, end_s: `time.perf_counter` of this rank.
        thread: its name; "main" for the one that made the trace; or a row of its own.
        facts: numbers and texts that say more.
    """

    name: str
    begin_s: float
    end_s: float
    thread: str
    facts: dict[str, Any]


class Span(Protocol):
    """What `Trace.span` returns: the body of the `with` is the interval."""

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class _NoSpan:
    """Does nothing: one is enough for all, in any thread."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...


_NO_SPAN: Span = _NoSpan()


class Trace:
    """Keeps the intervals of one rank, from any of its threads.

    Attributes:
        events: in the order in which they ended, at most `MOST_EVENTS`.
        left_out: how many came after those.

    Local. Cost: about 2 µs and 200 bytes an interval.

    >>> trace = Trace()
    >>> with trace.span("encode"):
    ...     pass
    >>> trace.record("wire", 1.0, 1.5, bytes=4096)
    >>> [(event.name, event.thread, event.facts) for event in trace.events]
    [('encode', 'main', {}), ('wire', 'main', {'bytes': 4096})]
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.skipped = 0
        self._main = threading.get_ident()
        self._counting = threading.Lock()

    def span(self, name: str) -> Span:
        """For a `with`, whose body is the interval, also where it ends with an error. Local."""
        return _Recorded(self, name)

    def collective(self) -> Span:
        """For a `with`, whose body is a collective on arrays: who adds up wants to know. Local."""
        return _NO_SPAN

    def record(
        self, name: str, begin_s: float, end_s: float, *, row: str = "", **facts: Any
    ) -> None:
        """Keep an interval that is known afterwards.

        Args:
            begin_s, end_s: of `time.perf_counter`.
            row: where to show what overlaps with this thread's other intervals; its own by default.
            facts: what else to show, as JSON can hold it.

        Local.
        """
        if len(self.events) >= MOST_EVENTS:
            with self._counting:
                self.skipped += 1
            return
        here = threading.get_ident() == self._main
        thread = row or ("main" if here else threading.current_thread().name)
        self.events.append(Event(name, begin_s, end_s, thread, facts))


class _Recorded:
    """A span of a trace that records."""

    __slots__ = ("_begin_s", "_name", "_trace")

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._trace.record(self._name, self._begin_s, time.perf_counter())


class _NoTrace(Trace):
    """Keeps nothing."""

    def span(self, name: str) -> Span:
        return _NO_SPAN

    def record(
        self, name: str, begin_s: float, end_s: float, *, row: str = "", **facts: Any
    ) -> None:
        pass


NO_TRACE = _NoTrace()
"""The trace of a communicator unless it was given another."""
