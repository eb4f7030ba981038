"""How an algorithm ends where one rank cannot go on: one error for all, and models that are whole.

The algorithm runs as it was given, in float32.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from ..communication import Communicator
from ..errors import UserError
from ..optimizers import OptimizerState
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
    step,
)
from .registry import check


@check()
def errors(case: Case) -> str | None:
    """What one rank cannot go on with is the same UserError on all, naming the rank, and leaves the
    others a model: their own or the shared one, which is as it was.

    The others find it in a step, as they meet, or as they finish.
    """
    whens = [(at, True, True, False) for at in range(STEPS)]  # each may communicate in its own way
    for at in (1, STEPS - 1):
        whens += [(at, True, True, True), (at, True, False, False)]
        whens += [
            (at, False, announced, meets)
            for announced, meets in ((True, False), (True, True), (False, False))
        ]
    whole = case.run()
    problems = []
    for at, fails, announced, meets in whens:
        failed = _failed_run(case, at, fails=fails, announced=announced, meets=meets)
        name = "fail()" if fails else "a gradient that is not finite"
        problem = _error_problem(case, failed.text, "label 12" if fails else "")
        problem = problem or _model_problem(case, failed, whole, fails=fails)
        problems.append(problem and f"{name} in step {at}: {problem}")
    return first_of(problems)


@dataclass
class FailedRun:
    """How a run has ended on this rank, in which the last one cannot go on.

    Attributes:
        learner: as the error has left it.
        text: of the UserError; None where there was none.
        step: in which it was raised; None: as the ranks met, or finished.
        model: before that.
        shared: before that.
        rule: the optimizer's state before that.
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
        self.shared = _shared(self.learner)
        self.rule = copy.deepcopy(self.learner.local_step.state)


def _failed_run(case: Case, at: int, *, fails: bool, announced: bool, meets: bool) -> FailedRun:
    """A run in which the last rank cannot go on at a step.

    Args:
        meets: whether the ranks meet after every step, for a collective of the caller's own.
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
    """What is wrong with the ranks' errors. Collective."""
    texts, culprit = case.comm.allgather_object(text), case.comm.size - 1
    if None in texts:
        return f"no error on rank {texts.index(None)}"
    if len(set(texts)) > 1:
        return f"another error on every rank: {texts}"
    if reason not in texts[0]:
        return f"the error does not say what fail() was told, {reason!r}: {texts[0]}"
    if culprit and f"rank {culprit}" not in texts[0]:
        return f"the error does not name rank {culprit}: {texts[0]}"
    return None


def _model_problem(case: Case, failed: FailedRun, whole: Run, *, fails: bool) -> str | None:
    """What is wrong with the models that an error has left. Collective.

    Args:
        whole: a run without an error, which says what may have been completed before it.
    """
    learner, where = failed.learner, "" if failed.step is None else f" in step {failed.step}"
    x, shared = learner.parameters.flat, _shared(learner)
    assert failed.model is not None and failed.shared is not None
    what = f"after the error{where}, the shared model"
    between = differs_between_ranks(case.comm, [what], [shared])
    if not np.isfinite(shared).all():
        return f"{what} is not finite"
    if between:
        return between
    if failed.step is not None and not _among(shared, [failed.shared, whole.shared[failed.step]]):
        return difference(f"{what} beside that before", shared, failed.shared)
    if _is_culprit(case) and not fails:
        return None
    if not np.isfinite(x).all():
        return f"after the error{where}, parameters are not finite"
    if _among(x, [failed.model, shared]):
        return None
    if failed.step is not None and _among(
        x, [whole.models[failed.step], _stepped(case, failed, failed.step)]
    ):
        return None
    return difference(
        f"after the error{where}, parameters are neither the shared model nor this rank's own, "
        "beside which",
        x,
        failed.model,
    )


def _stepped(case: Case, failed: FailedRun, t: int) -> Array:
    """This rank's model after the local step, before the ranks do anything together."""
    alone = case.learner(comm=Communicator.single())
    assert failed.rule is not None
    parts = case.data()[t]
    own = parts[case.comm.rank] if failed.learner.distributed else np.concatenate(parts)
    alone.parameters.flat[...] = failed.model
    alone.local_step.state = copy.deepcopy(failed.rule)
    put_gradient(alone, own)
    alone.local_step(alone.gradient.flat, len(own))
    stepped: Array = alone.parameters.flat
    return stepped


def _among(x: Array, vectors: list[Array]) -> bool:
    return any(difference("", x, vector) is None for vector in vectors)


def _is_culprit(case: Case) -> bool:
    return case.comm.rank == case.comm.size - 1


def _shared(learner: Learner) -> Array:
    shared: Array = learner.runner.common_model().copy()
    return shared
