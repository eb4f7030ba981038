"""A line on what synchronizing costs, every so many synchronizations: CNTK's `syncPerfStats`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..trace import Span, Trace

COLLECTIVE = "collective"
TOGETHER = ("exchange", "wait", COLLECTIVE)  #: intervals in which ranks need each other


class SyncPerformance(Trace):
    """Adds up what the learner's rank does, as it is told to a trace, and passes it on.

    A synchronization is a step since whose predecessor an exchange of all ranks has ended, or in
    which the learner's thread took part in a collective on arrays: every step of `DataParallelSGD`,
    or the last one of a block, and of an algorithm of one's own whatever it communicates by. (One
    that has other means than its communicator says so: ``with comm.trace.span("exchange")``.)

    Its time has three parts. Computing is what passes between the steps since the synchronization
    before. Aggregation is what the learner's thread spends in exchanges and in waiting for the
    others. The update is the rest of all steps. What runs in the background counts only where it is
    waited for. The first synchronization is left out: buffers are touched for the first time in it.

    Args:
        every: so many synchronizations make a line, at least 1.
        passed_on: the trace that gets everything, too.
        rank, ranks: whose lines they are, and how many train.
        asynchronous: whether ranks train at their own paces: then nothing is said of the others'
            samples.

    Make it in the learner's thread. Local. Cost: about a microsecond an interval.

    Source: CNTK's SimpleDistGradAggregator ("Actual gradient aggregation time") and MASGDPerfStats
    ("seconds since last report, seconds on comm.; samples processed by workers, by me"). There a
    line is of the latest synchronization, or only the samples are of all since the line before.
    """

    def __init__(
        self, every: int, passed_on: Trace, *, rank: int, ranks: int, asynchronous: bool = False
    ) -> None:
        super().__init__()
        self._rank, self._ranks = rank, ranks
        self.passed_on, self._asynchronous = passed_on, asynchronous
        self._every, self._thread = every, threading.get_ident()
        self._exchanged = self._met = False
        self._steps = 0
        self._together: list[tuple[float, float]] = []  # in the present step, none within another
        self._computed_s = self._step_s = 0.0  # of the present step
        self._synchronizations = 0
        self._start_anew(0)

    def _start_anew(self, sent: int) -> None:
        """Begin to count for the next line; so many bytes have been sent before."""
        self._sent = sent
        self._samples = self._own_samples = 0
        self._compute_s = self._aggregation_s = self._update_s = 0.0

    def begin(self) -> None:
        """Forget what has been recorded so far. Local."""
        self._exchanged = self._met = False
        self._together.clear()

    def begin_step(self) -> None:
        """Collectives until now were the user's own. Local."""
        self._met = False

    def collective(self) -> Span:
        return self.span(COLLECTIVE)

    def record(self, name: str, begin_s: float, end_s: float, **facts: Any) -> None:
        if name != COLLECTIVE:  # a part of what traces show anyhow
            self.passed_on.record(name, begin_s, end_s, **facts)
        if name == "exchange":
            self._exchanged = True
        if threading.get_ident() != self._thread:
            return
        if name in TOGETHER:
            while self._together and self._together[-1][0] >= begin_s:
                self._together.pop()  # it lay within this one
            self._together.append((begin_s, end_s))
            self._met |= name == COLLECTIVE
        elif name == "compute":
            self._computed_s = end_s - begin_s
            self._together.clear()
        elif name == "step":
            self._step_s = end_s - begin_s

    def stepped(self, own_samples: int, samples: int, sent: Callable[[], int]) -> str | None:
        """Count a step that has ended; returns a line where one is due.

        Args:
            own_samples, samples: in its minibatch, of this rank and of all.
            sent: tells how many bytes this rank has sent so far.
        """
        exchanged = self._exchanged or self._met
        self._exchanged = self._met = False
        self._steps += 1
        if not self._synchronizations:
            if exchanged:
                self._synchronizations, self._sent = 1, sent()
            return None
        together_s = sum(end_s - begin_s for begin_s, end_s in self._together)
        self._compute_s += self._computed_s
        self._aggregation_s += together_s
        self._update_s += self._step_s - together_s
        self._samples += samples
        self._own_samples += own_samples
        self._synchronizations += exchanged
        due = exchanged and (self._synchronizations - 1) % self._every == 0
        return self._line(sent()) if due else None

    def _line(self, sent: int) -> str:
        """The means since the line before, in words, and start anew."""
        rank, ranks = self._rank, self._ranks
        parts = {
            "compute": self._compute_s,
            "aggregation": self._aggregation_s,
            "update": self._update_s,
        }
        total_s, last = sum(parts.values()), self._synchronizations
        means = {name: f"{1e3 * part / self._every:.3f}" for name, part in parts.items()}
        own = f"{self._own_samples / total_s:,.0f}"
        rates = f"{self._samples / total_s:,.0f} samples/s by {ranks} ranks, {own} by rank {rank}"
        if self._asynchronous:
            rates = f"{own} samples/s by rank {rank}, one of {ranks} at their own paces"
        text = (
            f"synchronizations {last - self._every + 1} to {last}: {rates}; "
            f"{1e3 * total_s / self._every:.3f} ms each: "
            + ", ".join(f"{name} {ms}" for name, ms in means.items())
            + f"; {(sent - self._sent) / total_s / 1e6:,.2f} MB/s sent by rank {rank}"
        )
        self._start_anew(sent)
        return text

    def missed(self) -> str | None:
        """At the end, in words, that no step was a synchronization; None where one was."""
        if self._synchronizations or self._exchanged or not self._steps:
            return None  # or `finish` has exchanged, where no block was full
        return (
            f"sync_perf_stats={self._every}: in none of {self._steps} steps have ranks exchanged "
            'arrays; an algorithm that does says so by `with comm.trace.span("exchange")`'
        )
