"""Algorithms that break the contract: states, errors, options; and the checks that catch them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from parallel_sgd import DataParallelSGD, DiLoCo, ModelAveragingSGD, UserError
from parallel_sgd.algorithms import LocalUpdateState
from parallel_sgd.state import across, workspace

option = dataclass(frozen=True, kw_only=True)  # what an algorithm is


@dataclass(kw_only=True)
class ForgetfulState(LocalUpdateState):
    momentum: object = workspace()


@dataclass(kw_only=True)
class CountsNothing(LocalUpdateState):
    block_steps: int = workspace(default=0)


@dataclass(kw_only=True)
class Undeclared(LocalUpdateState):
    clock: int = 0


@dataclass(kw_only=True)
class WithAList(LocalUpdateState):
    losses: list = across("same", default_factory=list)


@dataclass(kw_only=True)
class NoMeaning(LocalUpdateState):
    clock: int = across("median", default=0)


@dataclass(kw_only=True)
class SummedNumber(LocalUpdateState):
    clock: int = across("sum", default=0)


@dataclass(kw_only=True)
class OwnCountsAreSame(LocalUpdateState):
    own_samples: int = across("same", default=0)


@dataclass(kw_only=True)
class OwnCountsAreMeans(LocalUpdateState):
    own_samples: int = across("mean", default=0)


@dataclass(kw_only=True)
class OwnCountsAreAlike(LocalUpdateState):
    own_samples: int = across("most", default=0)


@dataclass(kw_only=True)
class SharedCounter(LocalUpdateState):
    block_samples: int = across("share", default=0)


@dataclass(kw_only=True)
class SummedStart(LocalUpdateState):
    start: object = across("sum")


@dataclass(kw_only=True)
class SummedMomentum(LocalUpdateState):
    momentum: object = across("sum")


def with_state(base, kind):
    """An algorithm whose state is of another class."""

    class WithState(base):
        def init(self, parameters, comm):
            return kind(**vars(super().init(parameters, comm)))

    return WithState(sync_steps=3)


class ForgetsResiduals(DataParallelSGD):
    def init(self, parameters, comm):
        @dataclass(kw_only=True)
        class State:
            residuals: object = workspace()
            exchanges: dict = workspace()

        return State(**vars(super().init(parameters, comm)))


class FailsAlone(DataParallelSGD):
    def fail(self, state, problem, comm):
        raise UserError(problem)


class FailsWithoutReason(DataParallelSGD):
    def fail(self, state, problem, comm):
        super().fail(state, "something is wrong", comm)


class TakesWhatIsNotFinite(DataParallelSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        total = comm.agree(None, samples)
        if total:
            state.exchanges[32].sum(gradient.flat)
            local_step(gradient.flat, total)
        return total


class EndsWithoutMeeting(ModelAveragingSGD):
    """Who fails in the last step is waited for by nobody."""

    def finish(self, state, parameters, local_step, comm):
        parameters.flat[...] = state.start


class NeverMeets(ModelAveragingSGD):
    def meet(self, state, comm):
        pass


class CommunicatesBeforeItMeets(ModelAveragingSGD):
    """One collective in one step, in which a rank may have failed."""

    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        if 20 < local_step.samples < 30:
            comm.broadcast(state.start)
        return super().step(state, parameters, gradient, samples, local_step, comm, total)


class LeavesADifference(ModelAveragingSGD):
    def step(self, state, parameters, *arguments):
        try:
            return super().step(state, parameters, *arguments)
        except UserError:
            parameters.flat[...] = state.start - parameters.flat + 1e-3
            raise


class LeavesNothing(ModelAveragingSGD):
    def finish(self, state, parameters, local_step, comm):
        x = parameters.flat.copy()
        parameters.flat.fill(np.nan)
        self.meet(state, comm)
        parameters.flat[...] = x
        super().finish(state, parameters, local_step, comm)


class MovesTheSharedModel(DataParallelSGD):
    def step(self, state, parameters, *arguments):
        parameters.flat[...] += 1
        total = super().step(state, parameters, *arguments)
        parameters.flat[...] -= 1
        return total


class ReplacesTheVector(DataParallelSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        parameters._set_flat(parameters.flat.copy())
        return super().step(state, parameters, gradient, samples, local_step, comm)


class CountsNoBytes(DataParallelSGD):
    def bytes_sent(self, state):
        return 0


class CountsBytesDown(DataParallelSGD):
    def bytes_sent(self, state):
        return 10**9 - super().bytes_sent(state)


@dataclass(frozen=True)
class Positional(DataParallelSGD):
    rate: float = 1.0


@option
class HiddenOption(DataParallelSGD):
    rate: float = field(default=1.0, repr=False)


@option
class Unhashable(DataParallelSGD):
    rates: list = field(default_factory=list)


@option
class NoDefault(DataParallelSGD):
    rate: float


class NoDataclass(DataParallelSGD):
    rate: float = 1.0


class Addressed(DataParallelSGD):
    __repr__ = object.__repr__


FAULTS = [
    (with_state(DiLoCo, ForgetfulState), ["resume"]),
    (with_state(ModelAveragingSGD, CountsNothing), ["resume"]),
    (ForgetsResiduals(gradient_bits=1), ["resume"]),
    (with_state(DiLoCo, Undeclared), ["state"]),
    (with_state(DiLoCo, WithAList), ["state"]),
    (with_state(DiLoCo, NoMeaning), ["state"]),
    (with_state(DiLoCo, SummedNumber), ["state"]),
    (with_state(ModelAveragingSGD, OwnCountsAreSame), ["same_state", "regrouped"]),
    (with_state(ModelAveragingSGD, OwnCountsAreMeans), ["state", "regrouped"]),
    (with_state(ModelAveragingSGD, OwnCountsAreAlike), ["regrouped"]),
    (with_state(ModelAveragingSGD, SharedCounter), ["regrouped"]),
    (with_state(ModelAveragingSGD, SummedStart), ["regrouped"]),
    (with_state(DiLoCo, SummedMomentum), ["regrouped"]),
    (FailsAlone(), ["errors"]),
    (FailsWithoutReason(), ["errors"]),
    (TakesWhatIsNotFinite(), ["errors"]),
    (EndsWithoutMeeting(sync_steps=3), ["errors"]),
    (NeverMeets(sync_steps=3), ["errors"]),
    (CommunicatesBeforeItMeets(sync_steps=3), ["errors"]),
    (LeavesADifference(sync_steps=3), ["errors"]),
    (LeavesNothing(sync_steps=3), ["errors"]),
    (MovesTheSharedModel(), ["errors"]),
    (ReplacesTheVector(), ["arrays"]),
    (CountsNoBytes(), ["bytes_sent"]),
    (CountsBytesDown(), ["bytes_sent"]),
    (Positional(), ["options"]),
    (HiddenOption(rate=2.0), ["options"]),
    (Unhashable(), ["options"]),
    (NoDefault(rate=1.0), ["options"]),
    (NoDataclass(), ["options"]),
    (Addressed(), ["options"]),
]
