"""How a rank that has ended waits for the others: for as long as they like, but not in silence."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ..phrases import in_words
from .abort import end_job, print_labelled
from .diagnosis import StatusQuery, StatusReport, missing_in_words
from .rank_status import LOST, report_end

_ASKS_S = 0.5  #: at least so long lies between two questions to a rank


class FinishWait:
    """Asks the ranks that this one waits for, every now and then, whether they are still there.

    Where one has not answered for the roll call's `timeout_s` the job ends. Where they answer, but
    have not come to their own end after as long, this rank once says for whom it waits.

    Args:
        rank: this one.

    Local.
    """

    def __init__(self, status_query: StatusQuery, rank: int) -> None:
        self._status_query, self._rank = status_query, rank
        self._asked: dict[int, float] = {}
        self._began_s: float | None = None
        self._told = False

    def __call__(self, ranks: Collection[int]) -> None:
        """To be called often, from the beginning on, with the ranks that are waited for."""
        self._status_query.check_messages()
        now, timeout_s = time.monotonic(), self._status_query.timeout_s
        self._began_s = self._began_s or now
        fallen = []
        for rank in ranks:
            asked, heard = self._asked.get(rank, 0.0), self._status_query.heard(rank)
            if heard >= asked and now - asked > max(timeout_s / 4, _ASKS_S):
                self._asked[rank] = now
                self._status_query.ask([rank])
            elif heard < asked and now - asked > timeout_s:
                fallen.append(rank)
        if fallen:
            self._end(fallen)
        first = self._rank == (1 if 0 in ranks else 0)
        if first and not self._told and now - self._began_s > timeout_s:
            self._told = True
            print_labelled(
                f"parallel_sgd: this rank is at its end, and waits until {in_words([*ranks])} "
                f"{'is' if len(ranks) == 1 else 'are'}, too"
            )
            self._tell(ranks, self._status_query.latest(ranks))

    def _end(self, fallen: Sequence[int]) -> None:
        report_end(LOST)
        timeout_s = self._status_query.timeout_s
        print_labelled(
            f"parallel_sgd: this rank is at its end, and waits for {in_words(fallen)}, which "
            f"{'has' if len(fallen) == 1 else 'have'} not answered for timeout_s={timeout_s:g} s; "
            "ending the job"
        )
        why = f"has waited more than {timeout_s:g} s at its end"
        self._tell(fallen, self._status_query.query_all("", why))
        end_job(1)

    def _tell(self, ranks: Collection[int], answers: dict[int, StatusReport] | None) -> None:
        for line in missing_in_words(ranks, answers, None):
            print_labelled(f"parallel_sgd: {line}")
