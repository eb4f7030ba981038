"""Checks of failures: an error on all ranks if one rank cannot continue, and intact models.

The given algorithm runs in float32.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from ..communication import Communicator
from ..errors import UserError
from ..local_step import OptimizerState
from ..training import Learner
from .cases import (
    STEPS,
    Array,
    Case,
    Run,
    difference,
    differs_between_ranks,
    first_of,
    put_gradient,
    shared_model,
    step,
)
from .registry import check


@check()
def errors(case: Case) -> str | None:
    """A failure of one rank raises the same UserError on all ranks, naming the rank, and leaves
    every other rank an intact model: its own, or the unchanged shared model.
    The other ranks see the error in a step, in `meet`, or in `finish`."""
    whens = [(at, True, True, False) for at in range(STEPS)]  # steps may communicate differently
    for at in (1, STEPS - 1):
        whens += [(at, True, True, True), (at, True, False, False)]
        whens += [
            (at, False, announced, meets)
            for announced, meets in ((True, False), (True, True), (False, False))
        ]
    reference = case.run()
    problems = []
    for at, fails, announced, meets in whens:
        failed = _failed_run(case, at, fails=fails, announced=announced, meets=meets)
        name = "fail()" if fails else "a gradient that is not finite"
        problem = _error_problem(case, failed.text, "label 12" if fails else "")
        problem = problem or _model_problem(case, failed, reference, fails=fails)
        problems.append(problem and f"{name} in step {at}: {problem}")
    return first_of(problems)


@dataclass
class FailedRun:
    """The record on this rank of a run in which the last rank fails.

    Attributes:
        learner: the learner after the error.
        text: text of the UserError, or None without an error.
        step: the step with the error. None: `meet` or `finish`.
        model: this rank's parameters before that step, [n].
        shared: the shared model before that step, [n].
        rule: the optimizer's state before that step.
    """

    learner: Learner
    text: str | None = None
    step: int | None = None
    model: Array | None = None
    shared: Array | None = None
    rule: OptimizerState | None = None

    def record(self, step: int | None) -> None:
        self.step = step
        self.model = self.learner.parameters.flat.copy()
        self.shared = shared_model(self.learner)
        self.rule = copy.deepcopy(self.learner.local_step.state)


def _failed_run(case: Case, at: int, *, fails: bool, announced: bool, meets: bool) -> FailedRun:
    """Run until the last rank fails at a step.

    Args:
        at: the step of the failure.
        fails: the rank calls `fail`. False: its gradient is not finite.
        announced: announce sample counts, as a source does.
        meets: the ranks meet after every step, for a collective of the caller's own.
    """
    failed = FailedRun(learner := case.learner())
    culprit = _is_culprit(case)
    try:
        for t, parts in enumerate(case.data()):
            failed.record(t)
            if t == at and culprit and fails:
                learner.fail("label 12")
            if t == at and culprit:
                parts = [part * np.nan for part in parts]
            step(learner, parts, announced=announced)
            if meets:
                failed.record(None)
                learner.meet()
                case.comm.allgather_object(t)
        failed.record(None)
        learner.finish()
    except UserError as error:
        failed.text = str(error)
    return failed


def _error_problem(case: Case, text: str | None, reason: str) -> str | None:
    """Describe a problem of the ranks' errors, or return None. Collective."""
    texts, culprit = case.comm.allgather_object(text), case.comm.size - 1
    if None in texts:
        return f"no error on rank {texts.index(None)}"
    if len(set(texts)) > 1:
        return f"the ranks raised different errors: {texts}"
    if reason not in texts[0]:
        return f"the error does not give the reason of fail(), {reason!r}: {texts[0]}"
    if culprit and f"rank {culprit}" not in texts[0]:
        return f"the error does not name rank {culprit}: {texts[0]}"
    return None


def _model_problem(case: Case, failed: FailedRun, reference: Run, *, fails: bool) -> str | None:
    """Describe a problem of the models after an error, or return None. Collective.

    Args:
        whole: a run without an error, with the results of steps possibly completed before the
            error.
    """
    learner, where = failed.learner, "" if failed.step is None else f" in step {failed.step}"
    x, shared = learner.parameters.flat, shared_model(learner)
    assert failed.model is not None and failed.shared is not None
    what = f"after the error{where}, the shared model"
    between = differs_between_ranks(case.comm, [what], [shared])
    if not np.isfinite(shared).all():
        return f"{what} is not finite"
    if between:
        return between
    if failed.step is not None and not _among(
        shared, [failed.shared, reference.shared[failed.step]]
    ):
        return difference(f"{what}, compared with that before", shared, failed.shared)
    if _is_culprit(case) and not fails:
        return None
    if not np.isfinite(x).all():
        return f"after the error{where}, parameters are not finite"
    if _among(x, [failed.model, shared]):
        return None
    if failed.step is not None and _among(
        x, [reference.models[failed.step], _stepped(case, failed, failed.step)]
    ):
        return None
    return difference(
        f"after the error{where}, parameters are neither the shared model nor this rank's own "
        "model; compared with this rank's own model",
        x,
        failed.model,
    )


def _stepped(case: Case, failed: FailedRun, t: int) -> Array:
    """Return this rank's model after the local step, before any communication."""
    alone = case.learner(comm=Communicator.single())
    assert failed.rule is not None
    parts = case.data()[t]
    local = parts[case.comm.rank] if failed.learner.distributed else np.concatenate(parts)
    alone.parameters.flat[...] = failed.model
    alone.local_step.state = copy.deepcopy(failed.rule)
    put_gradient(alone, local)
    alone.local_step(alone.gradient.flat, len(local))
    stepped: Array = alone.parameters.flat
    return stepped


def _among(x: Array, vectors: list[Array]) -> bool:
    return any(difference("", x, vector) is None for vector in vectors)


def _is_culprit(case: Case) -> bool:
    return case.comm.rank == case.comm.size - 1
