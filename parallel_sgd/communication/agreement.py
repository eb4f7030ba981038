"""Define the agreement between ranks: errors on all ranks together, and required equality."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..errors import DivergedError, NotFinite, SharedError, SharedProblem, UserError
from ..trace import NO_TRACE, Trace
from ..validation import mapping, shown, with_plain_paths
from .phrases import different_calls, different_values, in_words
from .serialization import packed, unpacked

Result = TypeVar("Result")

PROBLEM = "raise_together"

FINGERPRINT_FACTOR = 1_000_003
"""Combines several numbers into a fingerprint: multiply by this factor, add the next number."""

FINGERPRINT_PRIME = 2**24 - 3
"""Modulus of fingerprints: squares summed over 2**15 ranks still fit into int64."""


class ConsistencyCheck(Protocol):
    """Compare state between all ranks inside `Communicator.agree`.

    Attributes:
        note: a number of this rank, 0 or more; `agree` sums the notes of all ranks.
        notes: the sum of all ranks' notes in the latest agreement.
        mark: a mark of this rank's minibatch, from 1 to below `FINGERPRINT_PRIME`; 0 if there is
            none. Set by `fingerprint`.
        marks_equal: all ranks had the same mark in the latest agreement.
    """

    note: int
    notes: int
    mark: int
    marks_equal: bool

    def fingerprint(self, steps: int) -> int:
        """Return a fingerprint of the facts: differs if any fact differs. Local.

        Args:
            steps: steps taken since the latest agreement, the same on all ranks.
        Returns:
            A whole number, combined from the facts by `FINGERPRINT_FACTOR`.
        """

    def facts(self) -> dict[str, Any]:
        """Return the facts behind the latest fingerprint, by name, for error texts. Local."""


class Agreement(ABC):
    """The collectives of a `Communicator` in which ranks check for problems and for equal values.

    Attributes:
        size, trace, consistency: see `Communicator`.
        wider: the ranks of which this communicator is one of several equal parts, where all parts
            call `agree` together: a problem of any of these ranks is then raised on all of them.
            Not kept by parts and duplicates.
    """

    size: int
    trace: Trace = NO_TRACE
    consistency: ConsistencyCheck | None = None
    wider: Agreement | None = None
    _problem: str | None = None
    # A problem of this rank, about to be shared. The watchdog prints it if the other ranks are
    # late: this rank may end before they arrive.

    @abstractmethod
    def sum_integers(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sum over the ranks of a few int64 values (exact in any order)."""

    @abstractmethod
    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order: the transport of `allgather_object`."""

    @property
    def world_ranks(self) -> Sequence[int]:
        """World ranks of this communicator's ranks, in order; used in error texts. Local."""
        return range(self.size)

    def raise_together(self, problem: str | None) -> None:
        """Raise on every rank if any rank has a problem; return if no rank has one.

        Args:
            problem: description of this rank's problem in one line, or None.
        Raises:
            SharedError: on all ranks, naming the ranks with the problem, or a rank's `problem` of a
                type other than text.
        """
        if not isinstance(problem, str | None):  # report it to the waiting ranks, too
            problem = f"problem={shown(problem)} must be a text or None"
        self._problem = problem
        try:
            self._gather(PROBLEM, problem)
        finally:
            self._problem = None

    def _gather(self, kind: str, item: Any) -> list[Any]:
        """Gather every rank's item. Raise on all ranks if a rank came with a problem instead."""
        try:
            own = packed([kind, item])
        except UserError as error:
            self.raise_together(str(error))
            raise
        gathered = [unpacked(remote) for remote in self._allgather_bytes(own)]
        problems = [remote if kind == PROBLEM else None for kind, remote in gathered]
        where = {p: [k for k, q in enumerate(problems) if q == p] for p in problems if p}
        if where:
            diverged = all(isinstance(text, NotFinite) for text in where)
            raise (DivergedError if diverged else SharedError)(
                "; ".join(
                    text if isinstance(text, SharedProblem) else f"{text} (on {self._name(ranks)})"
                    for text, ranks in where.items()
                )
            )
        different = different_calls([kind for kind, _ in gathered], self.world_ranks)
        if different:
            raise SharedError(different)
        return [remote for _, remote in gathered]

    def agree(
        self,
        problem: str | None,
        samples: int = 0,
        *,
        equal: Mapping[str, int] | None = None,
        steps: int = 1,
    ) -> int:
        """Return the sum of `samples` over the ranks, after checking for problems on any rank.

        During training, ranks wait for each other only here, before any state changes. A rank with
        a problem calls `agree` with that problem; the remaining ranks call `agree` with their
        samples.

        Args:
            problem: description of this rank's problem in one line, or None.
            samples: number of samples of this rank.
            equal: integers required to be equal on all ranks, by name, in addition to
                `consistency`.
            steps: steps taken since the latest agreement. Expensive comparisons run only every few
                steps.
        Raises:
            SharedError: on all ranks, if any rank has a problem, or if required values differ.

        Cost: one sum of seven integers; two if `wider` is set. All K fingerprints f are equal
        exactly if K·Σf² = (Σf)².
        """
        everywhere = 0 if self.wider is None else self.wider.agree(problem, samples)
        consistency = self.consistency if self.size > 1 else None
        fingerprint = consistency.fingerprint(steps) if consistency else 0
        for value in equal.values() if equal else ():
            fingerprint = fingerprint * FINGERPRINT_FACTOR + value
        fingerprint %= FINGERPRINT_PRIME
        note, mark = (consistency.note, consistency.mark) if consistency else (0, 0)
        problems = int(problem is not None)
        own = np.array(
            [samples, problems, fingerprint, fingerprint * fingerprint, note, mark, mark * mark],
            np.int64,
        )
        self._problem = problem
        try:
            with self.trace.span("wait"):
                sums = self.sum_integers(own).tolist()
        finally:
            self._problem = None
        total, problems, fingerprints, squares, notes, marks, mark_squares = sums
        if problems:
            self.raise_together(problem)
        # All K fingerprints f are equal exactly if K·Σf² = (Σf)² (Cauchy-Schwarz).
        if self.size * squares != fingerprints * fingerprints:
            self.require_agreement(
                {**(consistency.facts() if consistency else {}), **(equal or {})}
            )
        if consistency:
            consistency.notes = notes
            consistency.marks_equal = marks > 0 and self.size * mark_squares == marks * marks
        if self.wider is not None and total * self.wider.size != everywhere * self.size:
            raise SharedError(
                f"the ranks that share a model must have equal numbers of samples: those of "
                f"{self._name(range(self.size))} differ from the other ranks'"
            )
        return int(total)

    def together(self, prepare: Callable[[], Result]) -> Result:
        """Call `prepare` on every rank; raise on all ranks if it raises a UserError on any rank.

        Args:
            prepare: any local function, such as loading a file.
        Returns:
            The result of `prepare` on this rank.
        Raises:
            SharedError: on all ranks, with the messages of the failed ranks.
        """
        result, problem = None, None
        try:
            result = prepare()
        except UserError as error:
            problem = str(error)
        self.raise_together(problem)
        return cast(Result, result)

    def require_agreement(self, facts: dict[str, Any]) -> None:
        """Check that all ranks have equal facts.

        Args:
            facts: values by name, compared by `repr`. A missing name counts as a difference.
        Raises:
            SharedError: on all ranks, naming the first different fact with the value of each rank,
                or a rank's `facts` of a type other than a mapping from names.
        """
        try:
            named = mapping("facts", facts, optional=False)
        except UserError as error:
            self.raise_together(str(error))  # report it to the waiting ranks, too
            raise
        texts = {name: with_plain_paths(repr(value)) for name, value in named.items()}
        gathered = self._gather("require_agreement", texts)
        for name in dict.fromkeys(name for remote in gathered for name in remote):
            values = [remote.get(name, "nothing") for remote in gathered]
            if different := different_values(name, values, self.world_ranks):
                raise SharedError(different)

    def _name(self, ranks: Sequence[int]) -> str:
        return in_words([self.world_ranks[rank] for rank in ranks])
