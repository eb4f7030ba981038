"""Bounded wait of a finished rank for running ranks, as long as those ranks respond."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ..phrases import in_words
from .abort import end_job, print_labelled
from .diagnosis import StatusQuery, StatusReport, missing_in_words
from .rank_status import Status, report_status

_ASKS_S = 0.5  #: shortest interval between two queries to a rank


class FinishWait:
    """Queries the awaited ranks periodically.

    The job ends if a rank does not respond within the status query's `timeout_s`. If the ranks
    respond but have not finished after that time, this rank prints their names once.

    Args:
        status_query: sends the queries.
        rank: this rank.

    Local.
    """

    def __init__(self, status_query: StatusQuery, rank: int) -> None:
        self._status_query, self._rank = status_query, rank
        self._asked: dict[int, float] = {}
        self._began_s: float | None = None
        self._reported = False

    def __call__(self, ranks: Collection[int]) -> None:
        """Query the awaited ranks if due. Call often, from the start of the wait.

        Args:
            ranks: the awaited ranks.
        """
        self._status_query.check_messages()
        now, timeout_s = time.monotonic(), self._status_query.timeout_s
        self._began_s = self._began_s or now
        silent = []
        for rank in ranks:
            asked, answered = self._asked.get(rank, 0.0), self._status_query.answered(rank)
            if answered >= asked and now - asked > max(timeout_s / 4, _ASKS_S):
                self._asked[rank] = now
                self._status_query.ask([rank])
            elif answered < asked and now - asked > timeout_s:
                silent.append(rank)
        if silent:
            self._end(silent)
        first = self._rank == (1 if 0 in ranks else 0)
        if first and not self._reported and now - self._began_s > timeout_s:
            self._reported = True
            print_labelled(
                "parallel_sgd: this rank has finished, and waits for "
                f"{in_words([*ranks])} to finish"
            )
            self._print_missing(ranks, self._status_query.latest(ranks))

    def _end(self, silent: Sequence[int]) -> None:
        report_status(Status.LOST)
        timeout_s = self._status_query.timeout_s
        print_labelled(
            f"parallel_sgd: this rank has finished, and waits for {in_words(silent)}, which "
            f"{'has' if len(silent) == 1 else 'have'} not answered for timeout_s={timeout_s:g} s; "
            "ending the job"
        )
        why = f"has finished, and waited more than {timeout_s:g} s since"
        self._print_missing(silent, self._status_query.query_all("", why))
        end_job(1)

    def _print_missing(
        self, ranks: Collection[int], answers: dict[int, StatusReport] | None
    ) -> None:
        for line in missing_in_words(ranks, answers, None):
            print_labelled(f"parallel_sgd: {line}")
