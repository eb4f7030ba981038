"""The outcome of a job: a table of what the launcher knows, and what it makes of that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel_sgd.communication import FOLDER, Status
from parallel_sgd.launcher import Ending, JobStatus, Outcome, Supervisor, judge

RANKS = 3


def ended(*statuses: str) -> dict[str, Any]:
    """Ranks 0, 1, ... have signed on, and ended with these statuses."""
    return {"end_statuses": dict(enumerate(statuses)), "signed_on": frozenset(range(len(statuses)))}


TWO_SIGNED_ON: dict[str, Any] = {
    "signed_on": frozenset({0, 2}),
    "end_statuses": {0: Status.FINISHED},
}
ALL_FINISHED = ended(Status.FINISHED, Status.FINISHED, Status.FINISHED)

OUTCOMES: list[tuple[int, bool, dict[str, Any], Ending]] = [
    # mpiexec's exit code, --survive, what is known, and the ending
    (0, False, ALL_FINISHED, Ending.COMPLETE),
    (1, False, ALL_FINISHED, Ending.COMPLETE),  # something has gone wrong after that
    (1, False, ended(Status.FINISHED, Status.FINISHED), Ending.LOST),
    (0, False, {"signed_on": frozenset({0, 2})}, Ending.LOST),  # Open MPI, if a host is lost
    (0, False, TWO_SIGNED_ON, Ending.LOST),  # and no rank has seen all ranks finish
    (0, False, TWO_SIGNED_ON | {"saw_all_finish": True}, Ending.COMPLETE),
    (1, False, TWO_SIGNED_ON | {"saw_all_finish": True}, Ending.LOST),
    (0, False, ended(Status.FINISHED), Ending.COMPLETE),  # others cannot say anything
    (0, False, {}, Ending.COMPLETE),
    (137, True, ended(Status.FINISHED, Status.FINISHED), Ending.COMPLETE),
    (0, True, ended(Status.FINISHED), Ending.COMPLETE),
    (0, True, {}, Ending.LOST),
    (1, True, ended(Status.FINISHED, Status.FAILED), Ending.FAILED),
    (0, True, ended(Status.FINISHED) | {"has_unfinished_session": True}, Ending.LOST),
    (1, False, ended(Status.FAILED, Status.LOST), Ending.LOST),
    (1, False, ended(Status.FAILED), Ending.FAILED),
    (1, True, ended(Status.FINISHED, Status.LOST), Ending.LOST),
    (1, False, ended(Status.PREEMPTED, Status.FINISHED), Ending.PREEMPTED),
    (1, False, ended(Status.PREEMPTED) | {"all_stopped": "all are stopped"}, Ending.PREEMPTED),
    (0, False, ALL_FINISHED | {"all_stopped": "all are stopped"}, Ending.LOST),
    (0, True, ended(Status.FINISHED) | {"failed_at_start": "rank 1"}, Ending.LOST),
    (0, False, ALL_FINISHED | {"killed": "rank 1"}, Ending.LOST),
    (0, True, ended(Status.FINISHED) | {"killed": "rank 1"}, Ending.COMPLETE),
    (0, False, {"lost_folder": "/tmp/x"}, Ending.COMPLETE),
    (1, False, {"lost_folder": "/tmp/x"}, Ending.LOST),
]


@pytest.mark.parametrize(("code", "survive", "known", "ending"), OUTCOMES)
def test_the_first_condition_that_holds_decides(
    code: int, survive: bool, known: dict[str, Any], ending: Ending
) -> None:
    job = JobStatus(ranks=RANKS, mpiexec_code=code, **known)
    judged = judge(job, survive=survive)
    assert judged.end is ending
    assert judged.at_start == ("failed_at_start" in known)
    assert ("no final model" in judged.why) == job.has_unfinished_session
    for reason in ("all_stopped", "failed_at_start", "lost_folder"):
        if ending is Ending.LOST and reason in known:
            assert known[reason] in judged.why


def test_a_job_without_reports_rests_on_the_exit_code() -> None:
    job = JobStatus(ranks=RANKS, mpiexec_code=0)
    assert judge(job, survive=False) == Outcome(Ending.COMPLETE, reported=False)
    judged = judge(replace(job, lost_folder="/tmp/x"), survive=False)
    assert (judged.end, judged.reported) == (Ending.COMPLETE, False)


@pytest.mark.parametrize(
    ("files", "known"),
    [
        (("0.on", "2.on", "0.left"), TWO_SIGNED_ON),
        (("0.on", "0.left", "1.on", "1.failed"), ended(Status.FINISHED, Status.FAILED)),
        (("0.on", "0.left", "0.together"), ended(Status.FINISHED) | {"saw_all_finish": True}),
        (("2.0.begun",), {"has_unfinished_session": True}),
        (("2.0.begun", "0.0.over"), {}),
        (("2.0.begun", "2.1.begun", "0.0.over"), {"has_unfinished_session": True}),
    ],
)
def test_the_status_is_read_from_the_reports_of_ranks(
    files: tuple[str, ...], known: dict[str, Any]
) -> None:
    with Supervisor(RANKS) as supervisor:
        for name in files:
            Path(supervisor.environ[FOLDER], name).write_text("")
        job = supervisor.job_status(1)
    assert job == JobStatus(ranks=RANKS, mpiexec_code=1, **known)
