"""The minibatches that sources have given and no step has taken yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from ..algorithms import Algorithm
from ..errors import UserError
from ..optimizers import LocalStep
from ..validation import integer

MOST_SAMPLES = 2**40
"""Of a rank in a minibatch: sums over ranks are 64-bit integers."""


Minibatch = tuple[int, int, "Feed | None"]
"""Samples of this rank, and of all; by which feed it was given, where there is one."""


class Expected:
    """A queue of minibatches: sources fill it as they give them, and steps empty it.

    Args:
        algorithm: says where the warm start ends.
        local_step: its clock is where the first minibatch in the queue begins.

    Local.
    """

    def __init__(self, algorithm: Algorithm[Any], local_step: LocalStep) -> None:
        self._algorithm, self._local_step = algorithm, local_step
        self._waiting: deque[Minibatch] = deque()
        self._end = 0  # the clock's value after the last of them
        self.in_step = False  #: whether those that were taken last are not counted by the clock yet
        self.feed: Feed | None = None  #: of the source that gives minibatches at present
        self._fed = False  # by a source that was not left in the midst of it

    @property
    def end(self) -> int:
        """The clock after the last minibatch that was given: where the next one begins. The same on
        all ranks, whichever of the minibatches this rank has trained on."""
        return self._end if self._waiting or self.in_step else self._local_step.state.samples

    def add(self, samples: int, total: int, feed: Feed | None = None) -> None:
        samples = integer("samples", samples, 0, MOST_SAMPLES)
        total = integer("total", total, samples)
        self._end = self.end + total
        self._waiting.append((samples, total, feed))

    def take(self, samples: int) -> int | None:
        """Begin a step with the next minibatch, or the next ones that have so many samples of this
        rank.

        Returns:
            The samples of all ranks in them; None where nobody tells.
        Raises:
            UserError: there are none such; nothing is taken.
        """
        if not self._waiting:
            if not self._fed:
                return None
            raise UserError(
                f"samples={samples} must be those of a minibatch, but the source has given none "
                "since the step before (learner.expect_nothing() goes on without a source)"
            )
        own, total, _ = self._waiting[0]
        if own != samples:
            return self._take_several(samples)
        self._waiting.popleft()
        self.in_step = True
        return total

    def _take_several(self, samples: int) -> int:
        own, total, count = 0, 0, 0
        for minibatch in self._waiting:
            begin = total
            own, total, count = own + minibatch[0], total + minibatch[1], count + 1
            if own >= samples:
                break
        if own != samples:
            raise UserError(
                f"samples={samples} must be the {own} of the minibatches that the source gave"
            )
        self._require_one_side(begin)
        for _ in range(count):
            self._waiting.popleft()
        self.in_step = True
        return total

    def catch_up(self, samples: int) -> None:
        """Take further minibatches: in a step the others have had so many samples more.

        Where several minibatches are added up, a rank that has no samples cannot know how many.
        """
        while samples > 0 and self._waiting:
            own, total, _ = self._waiting[0]
            if own or total > samples:
                return
            samples -= total
            self._waiting.popleft()

    def begin(self, feed: Feed) -> None:
        """A source begins; one that was left in the midst has no part in training any more."""
        if self.feed is not None:
            self.forget(self.feed)
        self.feed, self._fed = feed, True

    def forget(self, feed: Feed) -> None:
        """The source was left: what it has given and no step has taken is not trained on."""
        self._waiting = deque(each for each in self._waiting if each[2] is not feed)
        clock = self._local_step.state.samples
        self._end = clock + sum(total for _, total, _ in self._waiting)
        if self.feed is feed:
            self.feed, self._fed = None, False

    def close(self, feed: Feed) -> None:
        """The source has given all that it has."""
        if self.feed is feed:
            self.feed = None

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()
        self.in_step, self.feed, self._fed = False, None, False

    def left_out(self) -> int:
        """This rank's samples that wait for a step although their source has ended."""
        return sum(own for own, _, feed in self._waiting if feed is None or feed is not self.feed)

    def _require_one_side(self, offset: int) -> None:
        """Minibatches before the end of the warm start are whole on every rank, later ones not."""
        clock = self._local_step.state.samples
        distributed = self._algorithm.distributed
        if distributed(clock) != distributed(clock + offset):
            raise UserError(
                f"one step must not take minibatches from both sides of distributed_after: they "
                f"begin at {clock} to {clock + offset} samples"
            )


class Feed:
    """One pass of a source over its minibatches, for one learner; a `with` block around it.

    Args:
        expected: the learner's.
        algorithm: the learner's.
        fail: the learner's.
    """

    def __init__(
        self, expected: Expected, algorithm: Algorithm[Any], fail: Callable[[str], NoReturn]
    ) -> None:
        self._expected, self._algorithm, self._fail = expected, algorithm, fail

    @property
    def samples(self) -> int:
        """Of all ranks, up to where the next minibatch begins."""
        return self._expected.end

    @property
    def distributed(self) -> bool:
        """Whether each rank gets its part of the next minibatch; else it is in the warm start."""
        return self._algorithm.distributed(self._expected.end)

    def expect(self, samples: int, total: int) -> None:
        """Tell of the minibatch that is given next: samples of this rank, and of all ranks."""
        if self._expected.feed is not self:
            self._fail(
                "a source's minibatches must not be gone on with after another source has begun, "
                "training has failed, or a checkpoint was loaded: take them anew from the source"
            )
        self._expected.add(samples, total, self)

    def __enter__(self) -> Feed:
        self._expected.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self._expected.close(self)
        else:  # left in the midst of it
            self._expected.forget(self)
