"""Statistics lines on the cost of synchronization, at intervals: CNTK's `syncPerfStats`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..trace import Span, Trace

COLLECTIVE = "collective"
TOGETHER = ("exchange", "wait", COLLECTIVE)  #: intervals that need other ranks


class SyncPerformance(Trace):
    """Adds up a rank's intervals of computing, aggregation and update, and passes all trace records
    on.

    A step counts as a synchronization if an exchange of all ranks has ended since the step before,
    or if the learner's thread took part in a collective on arrays. So each step of
    `DataParallelSGD` counts, the last step of a block, and steps of a user's own algorithm by any
    communication through its communicator. (An algorithm with other means of communication marks
    them: ``with comm.trace.span("exchange")``.)

    The time of a synchronization has three parts. Compute: the time between steps since the
    synchronization before. Aggregation: the time of the learner's thread in exchanges and in waits
    for other ranks. Update: the rest of all steps. Background work counts only while the learner's
    thread waits for its end. The first synchronization is not counted, because of the first touch
    of buffers.

    Args:
        every: synchronizations per line, at least 1.
        passed_on: a trace to receive all records as well.
        rank, ranks: the rank named in the lines, and the number of ranks that train.
        asynchronous: ranks train at their own paces: the lines then omit samples of remote ranks.
        at_once: count also before the first synchronization.

    Make this in the learner's thread. Local. Cost: about a microsecond an interval.

    Source: CNTK's SimpleDistGradAggregator ("Actual gradient aggregation time") and MASGDPerfStats
    ("seconds since last report, seconds on comm.; samples processed by workers, by me"). CNTK's
    line is about the latest synchronization, or counts only the samples since the line before.
    """

    def __init__(
        self,
        every: int,
        passed_on: Trace,
        *,
        rank: int,
        ranks: int,
        asynchronous: bool = False,
        at_once: bool = False,
    ) -> None:
        super().__init__()
        self._rank, self._ranks = rank, ranks
        self.passed_on, self._asynchronous = passed_on, asynchronous
        self._every, self._thread = every, threading.get_ident()
        self._exchanged = self._met = False
        self._steps = 0
        self._together: list[tuple[float, float]] = []  # this step's, without nested ones
        self._computed_s = self._step_s = 0.0  # of the present step
        self._synchronizations = int(at_once)
        self._start_anew(0)

    def _start_anew(self, sent: int) -> None:
        """Reset the counts for the next line.

        Args:
            sent: bytes sent before.
        """
        self._sent = sent
        self._samples = self._own_samples = 0
        self._compute_s = self._aggregation_s = self._update_s = 0.0

    def begin(self) -> None:
        """Forget all records so far. Local."""
        self._exchanged = self._met = False
        self._together.clear()

    def begin_step(self) -> None:
        """Ignore collectives before this point: these were the user's own. Local."""
        self._met = False

    def collective(self) -> Span:
        return self.span(COLLECTIVE)

    def record(self, name: str, begin_s: float, end_s: float, **facts: Any) -> None:
        if name != COLLECTIVE:  # traces show it within a larger interval
            self.passed_on.record(name, begin_s, end_s, **facts)
        if name == "exchange":
            self._exchanged = True
        if threading.get_ident() != self._thread:
            return
        if name in TOGETHER:
            while self._together and self._together[-1][0] >= begin_s:
                self._together.pop()  # nested in this interval
            self._together.append((begin_s, end_s))
            self._met |= name == COLLECTIVE
        elif name == "compute":
            self._computed_s = end_s - begin_s
            self._together.clear()
        elif name == "step":
            self._step_s = end_s - begin_s

    def stepped(self, own_samples: int, samples: int, sent: Callable[[], int]) -> str | None:
        """Count a step that has ended; return a line if one is due.

        Args:
            own_samples, samples: in its minibatch, of this rank and of all.
            sent: returns the bytes sent by this rank so far.
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
        """Return the means since the previous line as text, and reset the counts."""
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
            rates = f"{own} samples/s by rank {rank}, one of {ranks} ranks of asynchronous workers"
        text = (
            f"synchronizations {last - self._every + 1} to {last}: {rates}; "
            f"{1e3 * total_s / self._every:.3f} ms each: "
            + ", ".join(f"{name} {ms}" for name, ms in means.items())
            + f"; {(sent - self._sent) / total_s / 1e6:,.2f} MB/s sent by rank {rank}"
        )
        self._start_anew(sent)
        return text

    def work(self) -> tuple[int, float]:
        """Return this rank's samples, and the seconds of its computing and updates, since the last
        call."""
        taken = self._own_samples, self._compute_s + self._update_s
        self._start_anew(self._sent)
        return taken

    def seconds(self) -> dict[str, float]:
        """Return the seconds of this rank's computing, exchanges and updates since the last line,
        or since the last call of `work`. Local."""
        return {
            "compute": self._compute_s,
            "exchange": self._aggregation_s,
            "update": self._update_s,
        }

    def missed(self) -> str | None:
        """Return a line at the end of training if no step was a synchronization; otherwise None."""
        if self._synchronizations or self._exchanged or not self._steps:
            return None  # _exchanged: by `finish`, after a last block that was not full
        return (
            f"sync_perf_stats={self._every}: the ranks exchanged no arrays in {self._steps} steps; "
            'an algorithm marks an exchange by `with comm.trace.span("exchange")`'
        )
