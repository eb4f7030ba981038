"""The announced counts: of minibatches that sources have given and no step has taken yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from threading import Lock, get_ident
from typing import Any, NamedTuple

from ..algorithms import Algorithm
from ..errors import UserError
from ..optimizers import LocalStep
from ..state import Cause, StateReplaced
from ..validation import integer

MOST_SAMPLES = 2**40
"""Of a rank in a minibatch: sums over ranks are 64-bit integers."""

WAY_OUT = "; learner.discard_issued() leaves out what is left"


class Pass:
    """One pass of a source over its minibatches.

    Attributes:
        forgotten: it was left in the midst.
        rewound: training has gone back, and what is left is dealt out anew.
    """

    def __init__(self) -> None:
        self.forgotten = self.rewound = False


class IssuedMinibatch(NamedTuple):
    """One that a source has given.

    Attributes:
        own, total: samples of this rank, and of all.
        feed: by which it was given, where there is one.
        void: whether it is dealt out anew: no step trains on it.
        thread: in which it was given. (That of the one that steps lives, so it is no other's.)
    """

    own: int
    total: int
    feed: Pass | None
    thread: int
    void: bool = False


class MinibatchLedger:
    """A queue of minibatches: sources fill it as they give them, and steps empty it.

    Sources may give them in another thread than the one that steps. What waits of one thread's
    minibatches is then a matter of chance, and the ranks do not compare it.

    Args:
        algorithm: says where the warm start ends, and whether its ranks can be compared.
        local_step: its clock is where the first minibatch in the queue begins.

    Local.
    """

    def __init__(self, algorithm: Algorithm[Any], local_step: LocalStep) -> None:
        self._algorithm, self._local_step = algorithm, local_step
        self._lock = Lock()
        self._waiting: deque[IssuedMinibatch] = deque()
        self._totals: dict[int, int] = {}  # of all ranks in them, by thread
        self._step_began: int | None = None  # at which clock, of the step that is under way
        self._in_step = self._in_step_here = 0  # what that has taken: in all, given in its thread
        self._skipped = 0  # of all ranks, given in the thread that steps
        self._some_forgotten = False
        self._rewound = False  # since then ranks may have fetched ahead by other numbers
        self._steps_in: int | None = None  # the thread that has taken a minibatch last
        self.feed: Pass | None = None  #: of the source that gives minibatches at present
        self._fed = False  # by a source that was not left in the midst of it
        self.steps = 0  #: that have begun
        self.trained = 0  #: samples of all ranks that the latest step has trained on
        #: minibatches given since then, in the thread that steps; below 0 as a pass begins, where
        #: it is a matter of chance how many are fetched ahead
        self.since_step = 0
        self.taken = 0  #: minibatches that the latest step has trained on, where it took any

    @property
    def clock(self) -> int:
        """Samples of all ranks before the step that is under way, or so far."""
        began = self._step_began
        return self._local_step.state.samples if began is None else began

    @property
    def end(self) -> int:
        """The clock after the last minibatch that was given: where the next one begins."""
        with self._lock:
            self._remove_forgotten()
            return self.clock + self._in_step + sum(self._totals.values())

    @property
    def given(self) -> int:
        """Samples of all ranks up to the last minibatch that was given in this thread, the one that
        steps. The same on all ranks, whichever of the minibatches this rank has trained on."""
        waiting = 0
        if self._totals and not self._rewound:
            with self._lock:
                self._remove_forgotten()
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
            self._append(IssuedMinibatch(samples, samples, feed, get_ident(), void=True))

    def take(self, samples: int) -> int | None:
        """Begin a step with the next minibatch, or the next ones that have so many samples of this
        rank.

        Those before them, which all ranks have left out alike, are taken from the queue, too. (A
        rank that does so alone is found by what was `given`.)

        Returns:
            The samples of all ranks in them; None where nobody announces them.
        Raises:
            UserError: there are none such; nothing is taken.
        """
        self.steps += 1
        self.since_step = self.taken = 0
        if not (self._waiting or self._fed):
            self._step_began = self.clock
            return None
        self._steps_in = get_ident()
        with self._lock:
            self._remove_forgotten()
            if not self._waiting:
                if self._fed:
                    raise UserError(
                        f"samples={samples} must be those of a minibatch, but the source has given "
                        "none since the step before (learner.discard_issued() goes on without a "
                        "source)"
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

    def next_own(self, count: int = 1) -> int | None:
        """This rank's samples in the next minibatch, or the next ones; None if nobody has announced
        as many."""
        with self._lock:
            self._remove_forgotten()
            if len(self._waiting) < count:
                return None
            return sum(minibatch.own for minibatch in islice(self._waiting, count))

    def catch_up(self, samples: int) -> None:
        """Take further minibatches into the step: the others have had so many samples more.

        Where several minibatches are added up, a rank that has no samples cannot know how many.
        """
        with self._lock:
            while samples > 0 and self._waiting:
                if self._waiting[0].own or self._waiting[0].total > samples:
                    return
                samples -= self._take_next()

    def end_step(self) -> None:
        """The clock has counted what was taken last, or training has failed."""
        if self._in_step:
            with self._lock:
                self._step_began, self._in_step, self._in_step_here = None, 0, 0
        self._step_began = None

    def begin(self, feed: Pass) -> None:
        """A source begins; one that was left in the midst has no part in training any more."""
        if self.feed is not None:
            self.forget(self.feed)
        self.feed, self._fed, self.since_step = feed, True, -MOST_SAMPLES

    def forget(self, feed: Pass) -> None:
        """The source was left: what it has given and no step has taken is not trained on.

        Python may call it anywhere, where it finds that nobody holds a generator any more.
        """
        feed.forgotten = self._some_forgotten = True
        if self.feed is feed:
            self.feed, self._fed = None, False

    def ended(self, feed: Pass) -> None:
        """The source has given all that it has."""
        if self.feed is feed:
            self.feed = None

    def take_discarded(self, samples: int) -> bool:
        """Take what was given before training went back, and has so many samples of this rank;
        whether there was any. No step trains on that."""
        if not self.next_is_discarded:
            return False
        with self._lock:
            taken = self._waiting.popleft().own
            while taken < samples and self._waiting and self._waiting[0].void:
                taken += self._waiting.popleft().own
        if taken != samples:
            raise UserError(
                f"samples={samples}: ranks have died, and minibatches that were fetched ahead, of "
                f"{taken} samples, are dealt out anew; here they are added up with others, which "
                "must not be (a step for each minibatch, or a DataLoader with num_workers=0)"
            )
        return True

    @property
    def next_is_discarded(self) -> bool:
        """Whether no step trains on the next minibatch."""
        if not (self._waiting and self._waiting[0].void):
            return False
        with self._lock:
            self._remove_forgotten()
            return bool(self._waiting) and self._waiting[0].void

    def state_replaced(self, event: StateReplaced) -> None:
        """What was issued is of no use: it is dealt out again, or was of another run."""
        if event.cause is Cause.RECOVERED:
            self.rewind()
        else:
            self.clear()

    def rewind(self) -> None:
        """Training has gone back: what is left is dealt out anew from there."""
        with self._lock:
            given = [minibatch._replace(void=True) for minibatch in self._waiting]
            self._waiting = deque(given)
            self._totals.clear()
            self._skipped = self._in_step = self._in_step_here = 0
            self._step_began, self._rewound = None, True
            if self.feed is not None:
                self.feed.rewound = True

    def forget_left(self) -> None:
        """Forget what sources have given in this thread and it has not stepped with: it has left
        the loop over them. Nothing where another thread steps: it may still come to that."""
        if self._steps_in == get_ident():
            with self._lock:
                self._keep(lambda m: m.feed is None or m.thread != self._steps_in)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._waiting.clear()
            self._totals.clear()
            self._skipped = 0
            self.feed, self._fed = None, False

    @property
    def complete(self) -> bool:
        """Whether steps have been taken with all that was given, in the thread that asks."""
        with self._lock:
            self._remove_forgotten()
            waits = any(not minibatch.void for minibatch in self._waiting)
            return not waits and self._steps_in == get_ident()

    def require_none_skipped(self) -> None:
        """See that no step is missing, where other ranks cannot be asked how many they miss.

        Raises:
            UserError: minibatches wait for a step although their source has ended.
        """
        with self._lock:
            self._remove_forgotten()
            ended = (m for m in self._waiting if m.feed is None or m.feed is not self.feed)
            skipped = 0 if self._algorithm.roles.together else sum(m.own for m in ended)
        if skipped:
            raise UserError(
                f"no step was taken with the last {skipped} samples that the source gave{WAY_OUT}"
            )

    def _find(self, samples: int) -> tuple[int, int]:
        """Which minibatches have so many samples of this rank: how many there are before them, and
        how many they are. As few as possible are left out."""
        if self._waiting[0].own == samples:
            return 0, 1
        waiting = [minibatch for minibatch in self._waiting if not minibatch.void]
        count = added = first = 0
        for before, minibatch in enumerate(waiting):
            while count == 0 or (added < samples and before + count < len(waiting)):
                added, count = added + waiting[before + count].own, count + 1
            if added == samples:
                return before, count
            first = first or added
            if not self._algorithm.roles.together:
                break
            added, count = added - minibatch.own, count - 1
        raise UserError(
            f"samples={samples} must be the {first} of the minibatches that the source gave"
            + ("" if self._algorithm.roles.together else WAY_OUT)
        )

    def _append(self, minibatch: IssuedMinibatch) -> None:
        totals, thread = self._totals, minibatch.thread
        if not minibatch.void:
            totals[thread] = totals.get(thread, 0) + minibatch.total
        self._waiting.append(minibatch)

    def _pop(self) -> tuple[int, bool]:
        """Samples of all ranks in the first minibatch, and whether it was given in this thread."""
        _, total, _, thread, _ = self._waiting.popleft()
        left = self._totals.pop(thread, 0) - total
        if left > 0:  # else the thread may have ended
            self._totals[thread] = left
        return total, thread == get_ident()

    def _take_next(self) -> int:
        total, here = self._pop()
        self._in_step += total
        self._in_step_here += total * here
        return total

    def _remove_forgotten(self) -> None:
        if not self._some_forgotten:
            return
        self._some_forgotten = False
        self._keep(lambda m: m.feed is None or not m.feed.forgotten)

    def _keep(self, wanted: Callable[[IssuedMinibatch], bool]) -> None:
        given = list(self._waiting)
        self._waiting.clear()
        self._totals.clear()
        for minibatch in filter(wanted, given):
            self._append(minibatch)

    def _require_one_side(self, count: int) -> None:
        """Minibatches before the end of the warm start are whole on every rank, later ones not."""
        clock = self._local_step.state.samples
        last = clock + sum(minibatch.total for minibatch in islice(self._waiting, count - 1))
        end = self._algorithm.distributed_after
        if clock < end <= last:
            raise UserError(
                f"one step must not take minibatches from both sides of distributed_after: they "
                f"begin at {clock} to {last} samples"
            )
