"""Minibatch ledger: the sample counts of minibatches issued by sources and not yet taken by a
step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from threading import get_ident
from typing import Any, NamedTuple

from .. import runtime
from ..algorithms import Algorithm
from ..errors import UserError
from ..local_step import LocalStep
from ..state import Cause, StateReplaced
from ..validation import integer

MOST_SAMPLES = 2**40
"""Most samples of a rank in a minibatch: sums over ranks are 64-bit integers."""

DISCARD_HINT = "; learner.discard_issued() skips the remaining minibatches"


class Pass:
    """One pass of a source over its minibatches.

    Attributes:
        abandoned: the pass was left before its end.
        rewound: training has rolled back, and the remaining minibatches are issued again.
    """

    def __init__(self) -> None:
        self.abandoned = self.rewound = False


class IssuedMinibatch(NamedTuple):
    """A minibatch issued by a source.

    Attributes:
        local, total: samples of this rank, and of all ranks.
        feed: the pass of the source; None without a source.
        discarded: the minibatch is issued again later: no step trains on this one.
        thread: identifies the issuing thread. (The stepping thread is alive, so its number is
            unique.)
    """

    local: int
    total: int
    feed: Pass | None
    thread: int
    discarded: bool = False


class MinibatchLedger:
    """A queue of minibatches: sources fill the queue, and steps empty it.

    Sources may issue minibatches in a different thread from the stepping thread. The number of
    minibatches waiting from such a thread is a matter of chance, and so the ranks do not compare
    that number.

    Args:
        algorithm: gives the end of the warm start, and its roles decide if ranks can be compared.
        local_step: its clock is the start of the first minibatch in the queue.

    Local.
    """

    def __init__(self, algorithm: Algorithm[Any], local_step: LocalStep) -> None:
        self._algorithm, self._local_step = algorithm, local_step
        self._lock = runtime.Lock()
        self._waiting: deque[IssuedMinibatch] = deque()
        self._totals: dict[int, int] = {}  # samples of all ranks in the queue, by issuing thread
        self._step_began: int | None = None  # clock at the start of the current step
        self._in_step = self._in_step_here = 0  # samples taken: all, from this thread
        self._skipped = 0  # samples of all ranks, issued in the stepping thread
        self._any_abandoned = False
        self._rewound = False  # since then the ranks' prefetching may differ
        self._steps_in: int | None = None  # thread that took the latest minibatch, or discarded it
        self.feed: Pass | None = None  #: the current pass of a source
        self._fed = False  # True from the start of a source on, unless left early
        self.steps = 0  #: steps begun
        self.trained = 0  #: samples of all ranks in the latest step
        #: minibatches issued since the latest step, in the stepping thread; below 0 at the start of
        #: a pass, when the number fetched ahead is a matter of chance
        self.since_step = 0
        self.taken = 0  #: minibatches in the latest step; 0 without announcements

    @property
    def is_fed(self) -> bool:
        """True while a source issues minibatches. Local."""
        return self.feed is not None

    @property
    def clock(self) -> int:
        """Samples of all ranks before the current step; between steps, the samples so far."""
        began = self._step_began
        return self._local_step.state.samples if began is None else began

    @property
    def end(self) -> int:
        """The clock after the last issued minibatch, where the next one begins."""
        with self._lock:
            self._remove_abandoned()
            return self.clock + self._in_step + sum(self._totals.values())

    @property
    def issued(self) -> int:
        """Samples of all ranks up to the last minibatch issued in this thread, the stepping thread.
        Equal on all ranks, whatever minibatches this rank has trained on."""
        waiting = 0
        if self._totals and not self._rewound:
            with self._lock:
                self._remove_abandoned()
                waiting = self._totals.get(get_ident(), 0)
        return self.clock + self._skipped + self._in_step_here + waiting

    def add(self, samples: int, total: int, feed: Pass | None = None) -> None:
        samples = integer("samples", samples, 0, MOST_SAMPLES)
        total = integer("total", total, samples)
        thread = get_ident()
        self.since_step += thread == self._steps_in
        with self._lock:
            self._append(IssuedMinibatch(samples, total, feed, thread))

    def add_discarded(self, samples: int, feed: Pass) -> None:
        with self._lock:
            self._append(IssuedMinibatch(samples, samples, feed, get_ident(), discarded=True))

    def take(self, samples: int) -> int | None:
        """Begin a step with the next minibatch, or with the next few minibatches that together have
        `samples` samples of this rank.

        Minibatches before these, skipped by all ranks alike, leave the queue too. (`issued` reveals
        a rank that skips minibatches alone.)

        Returns:
            The samples of all ranks in the taken minibatches; None without announcements.
        Raises:
            UserError: no such minibatches are queued; nothing is taken.
        """
        self.steps += 1
        self.since_step = self.taken = 0
        if not (self._waiting or self._fed):
            self._step_began = self.clock
            return None
        self._steps_in = get_ident()
        with self._lock:
            self._remove_abandoned()
            if not self._waiting:
                if self._fed:
                    raise UserError(
                        f"samples={samples} must be the samples of a minibatch, but the source has "
                        "issued no minibatch since the last step (learner.discard_issued() "
                        "continues without a source)"
                    )
                self._step_began = self.clock
                return None
            before, count = self._find(samples)
            if before + count > 1:
                self._require_one_side(before + count)
            self._step_began, self._in_step, self._in_step_here = self.clock, 0, 0
            for _ in range(before):
                total, here = self._pop()
                self._skipped += total * here
            for _ in range(count):
                self._take_next()
            self.taken = count
            return self._in_step

    def next_local_samples(self, count: int = 1) -> int | None:
        """Return this rank's samples in the next `count` minibatches; None if fewer are
        announced."""
        with self._lock:
            self._remove_abandoned()
            if len(self._waiting) < count:
                return None
            return sum(minibatch.local for minibatch in islice(self._waiting, count))

    def catch_up(self, samples: int) -> None:
        """Add further minibatches to the current step: the other ranks have trained on `samples`
        samples more.

        When several minibatches are accumulated, a rank without samples cannot know their number.
        """
        with self._lock:
            while samples > 0 and self._waiting:
                if self._waiting[0].local or self._waiting[0].total > samples:
                    return
                samples -= self._take_next()

    def end_step(self) -> None:
        """End the current step: the clock has counted the taken minibatches, or training has
        failed."""
        if self._in_step:
            with self._lock:
                self._step_began, self._in_step, self._in_step_here = None, 0, 0
        self._step_began = None

    def begin(self, feed: Pass) -> None:
        """Begin a pass of a source. An earlier pass without an end takes no further part in
        training."""
        if self.feed is not None:
            self.abandon(self.feed)
        self.feed, self._fed, self.since_step = feed, True, -MOST_SAMPLES

    def abandon(self, feed: Pass) -> None:
        """Mark a pass as abandoned: its issued minibatches not yet taken are not trained on.

        Python may call this at any point, when the last reference to a generator is dropped.
        """
        feed.abandoned = self._any_abandoned = True
        if self.feed is feed:
            self.feed, self._fed = None, False

    def ended(self, feed: Pass) -> None:
        """End a pass: the source has issued all its minibatches."""
        if self.feed is feed:
            self.feed = None

    def take_discarded(self, samples: int) -> bool:
        """Take discarded minibatches, issued before a rollback, that have `samples` samples of this
        rank. Return False if there are none. No step trains on these.

        Raises:
            UserError: the step accumulates discarded and valid minibatches.
        """
        if not self.next_is_discarded:
            return False
        with self._lock:
            taken = self._waiting.popleft().local
            while taken < samples and self._waiting and self._waiting[0].discarded:
                taken += self._waiting.popleft().local
        if taken != samples:
            raise UserError(
                f"samples={samples}: ranks have failed, and minibatches of {taken} samples, "
                "fetched ahead, are issued again; this step must not add them up with further "
                "minibatches (take a step for each minibatch, or use a DataLoader with "
                "num_workers=0)"
            )
        self._steps_in = get_ident()
        return True

    @property
    def next_is_discarded(self) -> bool:
        """True if the next minibatch is discarded: no step trains on it."""
        if not (self._waiting and self._waiting[0].discarded):
            return False
        with self._lock:
            self._remove_abandoned()
            return bool(self._waiting) and self._waiting[0].discarded

    def state_replaced(self, event: StateReplaced) -> None:
        """Discard the issued minibatches: sources issue the same samples again, or the minibatches
        belong to a different run."""
        if event.cause is Cause.RECOVERED:
            self.rewind()
        else:
            self.clear()

    def rewind(self) -> None:
        """Discard all queued minibatches after a rollback: sources issue the same samples again."""
        with self._lock:
            issued = [minibatch._replace(discarded=True) for minibatch in self._waiting]
            self._waiting = deque(issued)
            self._totals.clear()
            self._skipped = self._in_step = self._in_step_here = 0
            self._step_began, self._rewound = None, True
            if self.feed is not None:
                self.feed.rewound = True

    def discard_unstepped(self) -> None:
        """Discard minibatches issued in this thread and not yet taken, after the program has left
        the loop over the source. Do nothing if a different thread steps: its steps may still
        follow."""
        if self._steps_in == get_ident():
            with self._lock:
                self._keep(lambda m: m.feed is None or m.thread != self._steps_in)

    def clear(self) -> None:
        """Empty the ledger."""
        with self._lock:
            self._waiting.clear()
            self._totals.clear()
            self._skipped = 0
            self.feed, self._fed = None, False

    @property
    def complete(self) -> bool:
        """True if steps have taken all issued minibatches, in the calling thread."""
        with self._lock:
            self._remove_abandoned()
            waits = any(not minibatch.discarded for minibatch in self._waiting)
            return not waits and self._steps_in == get_ident()

    def require_none_skipped(self) -> None:
        """Check that no step is missing, for algorithms whose ranks cannot compare their missing
        steps.

        Raises:
            UserError: minibatches wait for a step although their source has ended.
        """
        with self._lock:
            self._remove_abandoned()
            ended = (m for m in self._waiting if m.feed is None or m.feed is not self.feed)
            skipped = 0 if self._algorithm.roles.together else sum(m.local for m in ended)
        if skipped:
            raise UserError(
                f"no step was taken with the last {skipped} samples that the source issued"
                + DISCARD_HINT
            )

    def _find(self, samples: int) -> tuple[int, int]:
        """Find the minibatches that together have `samples` samples of this rank. Return the number
        of minibatches before these, as small as possible, and their count."""
        if self._waiting[0].local == samples:
            return 0, 1
        waiting = [minibatch for minibatch in self._waiting if not minibatch.discarded]
        count = added = first = 0
        for before, minibatch in enumerate(waiting):
            while count == 0 or (added < samples and before + count < len(waiting)):
                added, count = added + waiting[before + count].local, count + 1
            if added == samples:
                return before, count
            first = first or added
            if not self._algorithm.roles.together:
                break
            added, count = added - minibatch.local, count - 1
        raise UserError(
            f"samples={samples} must be {first}, as in the minibatches that the source issued"
            + ("" if self._algorithm.roles.together else DISCARD_HINT)
        )

    def _append(self, minibatch: IssuedMinibatch) -> None:
        totals, thread = self._totals, minibatch.thread
        if not minibatch.discarded:
            totals[thread] = totals.get(thread, 0) + minibatch.total
        self._waiting.append(minibatch)

    def _pop(self) -> tuple[int, bool]:
        """Remove the first minibatch. Return the samples of all ranks, and True if this thread
        issued it."""
        _, total, _, thread, _ = self._waiting.popleft()
        left = self._totals.pop(thread, 0) - total
        if left > 0:  # otherwise forget the thread: it may have ended
            self._totals[thread] = left
        return total, thread == get_ident()

    def _take_next(self) -> int:
        total, here = self._pop()
        self._in_step += total
        self._in_step_here += total * here
        return total

    def _remove_abandoned(self) -> None:
        if not self._any_abandoned:
            return
        self._any_abandoned = False
        self._keep(lambda m: m.feed is None or not m.feed.abandoned)

    def _keep(self, wanted: Callable[[IssuedMinibatch], bool]) -> None:
        issued = list(self._waiting)
        self._waiting.clear()
        self._totals.clear()
        for minibatch in filter(wanted, issued):
            self._append(minibatch)

    def _require_one_side(self, count: int) -> None:
        """Refuse a step across the end of the warm start: minibatches before the end are whole on
        every rank, later ones are not."""
        clock = self._local_step.state.samples
        last = clock + sum(minibatch.total for minibatch in islice(self._waiting, count - 1))
        end = self._algorithm.distributed_after
        if clock < end <= last:
            raise UserError(
                f"the minibatches of a step must all begin before distributed_after={end}, or all "
                f"after: these begin at {clock} to {last} samples"
            )
