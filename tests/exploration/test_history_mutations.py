"""Histories find mistakes: each is a change of the package's source."""

from __future__ import annotations

import pytest
from histories import run_machine
from old_faults import OldFault
from test_failure_history import FailureHistory
from test_learner_history import LearnerHistory
from test_served_history import ServedHistory

from parallel_sgd.algorithms.exchange_state import ExchangeState
from parallel_sgd.parameter_server.connection import Connection
from parallel_sgd.parameter_server.served import ServedModel
from parallel_sgd.training.model_access import ModelAccess
from parallel_sgd.training.recovery.rollback import Rollback
from parallel_sgd.training.recovery.snapshot import SharedSnapshot

MISTAKES = {
    "an evaluation leaves the common model": OldFault(
        "learner", ModelAccess, "shown", "x[...] = own", "pass"
    ),
    "a load forgets the residuals": OldFault(
        "learner",
        ExchangeState,
        "restored",
        "self.residuals.has_non_owned = True",
        "self.residuals.reset()",
    ),
    "the clock counts what is rolled back": OldFault(
        "failures",
        Rollback,
        "_rejoin",
        "shared.restore(learner)",
        "clock = learner.samples; shared.restore(learner); learner.samples = clock",
    ),
    "a rank that joins has its first model": OldFault(
        "failures", SharedSnapshot, "_array", "own = values if own is None else own", "own = own"
    ),
    "a learner waits for servers that have ended by a problem": OldFault(
        "servers", Connection, "close", "failed or self.failed or", "failed or"
    ),
    "a round ends without the worker that pushes last": OldFault(
        "servers",
        ServedModel,
        "_end_round",
        "self.live <= self._round.keys()",
        "len(self._round) >= 2",
    ),
}
MACHINES = {"learner": LearnerHistory, "failures": FailureHistory, "servers": ServedHistory}
BUDGET = 250, 8  #: histories, and most operations in each: the first one that fails ends the test


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change = MISTAKES[mistake]
    change.put_back(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)) as found:
        run_machine(MACHINES[change.configuration], *BUDGET, shrinks=False)
    print(f"{mistake}: {found.value!r}")
