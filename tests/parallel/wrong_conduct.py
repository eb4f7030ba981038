"""Algorithms that break the contract: states, errors, options; and the checks that catch them."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass

import numpy as np
from wrong_results import LastBlockIsLost, with_exchange

from parallel_sgd import DataParallelSGD, DiLoCo, ModelAveragingSGD, UserError
from parallel_sgd.algorithms import ExchangeState, Fragment, LocalUpdateState
from parallel_sgd.communication import AllRanks, AllTrain
from parallel_sgd.exchange.residuals import Residuals
from parallel_sgd.state import Component, across, workspace

option = dataclass(frozen=True, kw_only=True)  # what an algorithm is


def with_state(base, *, state=LocalUpdateState, **fields):
    """An algorithm in whose state these fields are declared otherwise, or added."""
    declared = [(name, object, field) for name, field in fields.items()]
    kind = make_dataclass("State", declared, bases=(state,), kw_only=True)

    class WithState(base):
        def init(self, work):
            return kind(**vars(super().init(work)))

    return WithState(sync_steps=3)


def own_samples_declared(rule):
    return with_fragment(ModelAveragingSGD, own_samples=across(rule, default=0))


def with_fragment(base, **fields):
    """Local updates in whose fragments these fields are declared otherwise."""
    declared = [(name, object, field) for name, field in fields.items()]
    kind = make_dataclass("Fragment", declared, bases=(Fragment,), kw_only=True)

    class WithFragment(base):
        def init(self, work):
            state = super().init(work)
            state.fragments = {name: kind(**vars(part)) for name, part in state.fragments.items()}
            return state

    return WithFragment(sync_steps=3)


def start_declared(rule):
    return with_state(ModelAveragingSGD, start=across(rule))


class DropsMomentum(LocalUpdateState, Component):
    def restored(self):
        if self.momentum is None:
            self.momentum = np.zeros_like(self.start)


def with_group(base, kind, **given):
    """An algorithm whose ranks wait for each other in another way."""

    class Roles(AllTrain):
        def form(self, comm):
            return kind(comm)

    class WithGroup(base):
        roles = Roles()

    return WithGroup(**given)


@dataclass(kw_only=True)
class ForgetsResiduals(ExchangeState):
    residuals: object = workspace()


@dataclass(kw_only=True)
class MeansOfErrors(Residuals):
    worker_error: object = across("mean")


class TakesMeansOfErrors(ExchangeState):
    def wait(self):
        self.residuals = MeansOfErrors(**vars(self.residuals))


class FailsAlone(AllRanks):
    def fail(self, problem):
        raise UserError(problem)


class FailsWithoutReason(AllRanks):
    def fail(self, problem):
        super().fail("something is wrong")


class EndsWithoutMeeting(AllRanks):
    """Who fails in the last step is waited for by nobody."""

    def meet_to_finish(self):
        pass


class NeverMeets(AllRanks):
    def meet(self):
        pass


class TakesWhatIsNotFinite(DataParallelSGD):
    def problem(self, state, work, samples):
        return None


class CommunicatesBeforeItMeets(ModelAveragingSGD):
    """One collective in one step, in which a rank may have failed."""

    def step(self, state, work, minibatch):
        if 20 < work.samples < 30:
            work.comm.broadcast(state.start)
        super().step(state, work, minibatch)


class LeavesADifference(ModelAveragingSGD):
    def step(self, state, work, minibatch):
        x = work.parameters.flat
        try:
            super().step(state, work, minibatch)
        except UserError:
            x[...] = state.start - x + 1e-3
            raise


class LeavesNothing(ModelAveragingSGD):
    def step(self, state, work, minibatch):
        try:
            super().step(state, work, minibatch)
        except UserError:
            work.parameters.flat.fill(np.nan)
            raise


class MovesTheSharedModel(DataParallelSGD):
    def problem(self, state, work, samples):
        work.parameters.flat[...] += 1
        return super().problem(state, work, samples)

    def step(self, state, work, minibatch):
        work.parameters.flat[...] -= 1
        super().step(state, work, minibatch)


class ReplacesTheVector(DataParallelSGD):
    def step(self, state, work, minibatch):
        work.parameters._set_flat(work.parameters.flat.copy())
        super().step(state, work, minibatch)


class CountsNoBytes(ExchangeState):
    bytes_sent = 0


class CountsBytesDown(ExchangeState):
    @property
    def bytes_sent(self):
        return 10**9 - super().bytes_sent


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


class AnswersIfAsked(ModelAveragingSGD):
    """Rank 1 asks rank 0 for an answer, who gives it if the question has come by then."""

    def step(self, state, work, minibatch):
        super().step(state, work, minibatch)
        messages, came = work.comm.messages(), []
        if work.comm.rank < 2:
            messages.receive(np.empty(1), 1 - work.comm.rank, 0, lambda: came.append(True))
        if work.comm.rank == 1:
            messages.send(np.ones(1), 0, 0, lambda: None)
            with messages.watched("an answer"):
                while not came:
                    messages.progress()
                    messages.idle(1e-3)
        elif work.comm.rank == 0:
            messages.idle(1e-2)
            if messages.progress():
                messages.send(np.ones(1), 1, 0, lambda: None)
                messages.progress()


FAULTS = [
    (AnswersIfAsked(sync_steps=3), ["orders"]),
    (with_state(DiLoCo, momentum=workspace()), ["resume"]),
    (with_fragment(ModelAveragingSGD, steps=workspace(default=0)), ["resume"]),
    (with_exchange(DataParallelSGD, ForgetsResiduals, gradient_bits=1), ["resume"]),
    (with_exchange(DataParallelSGD, TakesMeansOfErrors, gradient_bits=1), ["later_resharded"]),
    (with_state(DiLoCo, clock=0), ["state"]),
    (with_state(DiLoCo, losses=across("same", default_factory=list)), ["state"]),
    (with_state(DiLoCo, clock=across("median", default=0)), ["state"]),
    (with_state(DiLoCo, clock=across("sum", default=0.0)), ["state"]),
    (own_samples_declared("same"), ["same_state", "resharded"]),
    (own_samples_declared("mean"), ["state", "resharded"]),
    (own_samples_declared("most"), ["resharded"]),
    (with_fragment(ModelAveragingSGD, samples=across("share", default=0)), ["resharded"]),
    (start_declared("sum"), ["resharded"]),
    (with_state(DiLoCo, momentum=across("sum")), ["resharded", "merged"]),
    (with_state(DiLoCo, state=DropsMomentum, momentum=across("drop", default=None)), ["merged"]),
    (with_group(DataParallelSGD, FailsAlone), ["errors"]),
    (with_group(DataParallelSGD, FailsWithoutReason), ["errors"]),
    (TakesWhatIsNotFinite(), ["errors"]),
    (with_group(LastBlockIsLost, EndsWithoutMeeting, sync_steps=3), ["errors"]),
    (with_group(ModelAveragingSGD, NeverMeets, sync_steps=3), ["errors"]),
    (CommunicatesBeforeItMeets(sync_steps=3), ["errors"]),
    (LeavesADifference(sync_steps=3), ["errors"]),
    (LeavesNothing(sync_steps=3), ["errors"]),
    (MovesTheSharedModel(), ["errors"]),
    (ReplacesTheVector(), ["arrays"]),
    (with_exchange(DataParallelSGD, CountsNoBytes), ["bytes_sent"]),
    (with_exchange(DataParallelSGD, CountsBytesDown), ["bytes_sent"]),
    (Positional(), ["options"]),
    (HiddenOption(rate=2.0), ["options"]),
    (Unhashable(), ["options"]),
    (NoDefault(rate=1.0), ["options"]),
    (NoDataclass(), ["options"]),
    (Addressed(), ["options"]),
]
