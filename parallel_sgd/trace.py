"""Traces of a rank's time: named intervals on the clock of `time.perf_counter`.

Code marks its work and its waits through its communicator, ``with comm.trace.span("encode"): ...``.
By default nothing is kept, at a cost of about 0.15 µs; a `Trace` keeps the intervals in memory.
Everything here is local: `parallel_sgd.training.trace_file` writes the file of all ranks.

    compute    the user's, between two steps of the learner: data and gradient
    step       of the learner, whole, including:
    exchange   a sum over all ranks, with encode, wire, sum and decode
    wait       for the other ranks
    update     the optimizer's step
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from . import runtime

__all__ = ["MOST_EVENTS", "NO_TRACE", "Event", "Span", "Trace"]

MOST_EVENTS = 100_000
"""Most intervals kept for a rank, some 20 MB; later intervals are only counted."""


class Event(NamedTuple):
    """A named interval.

    Attributes:
        begin_s, end_s: `time.perf_counter` of this rank.
        thread: its name; "main" for the thread of the trace's creation; or a custom row.
        facts: numbers and texts with details.
    """

    name: str
    begin_s: float
    end_s: float
    thread: str
    facts: dict[str, Any]


class Span(Protocol):
    """The context manager returned by `Trace.span`: the body of the `with` is the interval."""

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class _NoSpan:
    """Does nothing; a single instance serves all threads."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...


_NO_SPAN: Span = _NoSpan()


class Trace:
    """Keeps the intervals of one rank, from any of its threads.

    Attributes:
        events: in the order of their ends.
        most_events: the number of intervals to keep.
        skipped: number of later events.

    Local. Cost: about 2 µs and 200 bytes an interval.

    >>> trace = Trace()
    >>> with trace.span("encode"):
    ...     pass
    >>> trace.record("wire", 1.0, 1.5, bytes=4096)
    >>> [(event.name, event.thread, event.facts) for event in trace.events]
    [('encode', 'main', {}), ('wire', 'main', {'bytes': 4096})]
    """

    def __init__(self, most_events: int = MOST_EVENTS) -> None:
        self.most_events = most_events
        self.events: list[Event] = []
        self.skipped = 0
        self._main = threading.get_ident()
        self._counting = threading.Lock()

    def span(self, name: str) -> Span:
        """Return a context manager that records its body as an interval, even after an error.
        Local."""
        return _Recorded(self, name)

    def collective(self) -> Span:
        """Return a context manager for a collective on arrays: used by subclasses with statistics.
        Local."""
        return _NO_SPAN

    def record(
        self, name: str, begin_s: float, end_s: float, *, row: str = "", **facts: Any
    ) -> None:
        """Record an interval after its end.

        Args:
            begin_s, end_s: of `time.perf_counter`.
            row: shows an interval that overlaps with this thread's other intervals; by default the
                thread's row.
            facts: details to show, in a form that JSON can hold.

        Local.
        """
        if len(self.events) >= self.most_events:
            with self._counting:
                self.skipped += 1
            return
        here = threading.get_ident() == self._main
        thread = row or ("main" if here else threading.current_thread().name)
        self.events.append(Event(name, begin_s, end_s, thread, facts))


class _Recorded:
    __slots__ = ("_begin_s", "_name", "_trace")

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name

    def __enter__(self) -> None:
        self._begin_s = runtime.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._trace.record(self._name, self._begin_s, runtime.perf_counter())


class _NoTrace(Trace):
    def span(self, name: str) -> Span:
        return _NO_SPAN

    def record(
        self, name: str, begin_s: float, end_s: float, *, row: str = "", **facts: Any
    ) -> None:
        pass


NO_TRACE = _NoTrace()
"""The default trace of a communicator."""
