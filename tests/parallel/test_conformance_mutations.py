"""The conformance suite fails where an algorithm is wrong: every fault is caught by a check."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from parallel_sgd import DataParallelSGD, DiLoCo, ModelAveragingSGD, MomentumSGD, UserError
from parallel_sgd.algorithms import LocalUpdateState
from parallel_sgd.communication.launched import launched_size
from parallel_sgd.state import across, workspace
from parallel_sgd.testing import CHECKS, check_algorithm

pytestmark = pytest.mark.skipif(launched_size() is not None, reason="the faults run on threads")

RANKS = 3
option = dataclass(frozen=True, kw_only=True)  # what an algorithm is

DATA_PARALLEL = DataParallelSGD()
AVERAGING = ModelAveragingSGD(sync_steps=3)
DILOCO = DiLoCo(sync_steps=3)


class Around(DataParallelSGD):
    """Data-parallel SGD whose optimizer is called by `change`."""

    def change(self, local_step, gradient, samples, total, comm):
        raise NotImplementedError

    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        class Changed:
            def __init__(self):
                self.state, self.samples = local_step.state, local_step.samples

            def __call__(_, summed, total):
                self.change(local_step, summed, samples, total, comm)

        return super().step(state, parameters, gradient, samples, Changed(), comm)


class NoCommunication(DataParallelSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        total = comm.agree(None, samples)
        local_step(gradient.flat, samples, total)
        return total


class OneRankIsNotHeard(DataParallelSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        if comm.rank == 1:
            gradient.flat[...] = 0
        return super().step(state, parameters, gradient, samples, local_step, comm)


class Stripe(DataParallelSGD):
    """A part of the vector is not exchanged, and rank 0's is taken."""

    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        if comm.rank:
            gradient.flat[100:200] = 0
        return super().step(state, parameters, gradient, samples, local_step, comm)


class NoAverage(ModelAveragingSGD):
    class Silent:
        bytes_sent = 0

        def sum(self, vector, residuals=None):
            pass

    def init(self, parameters, comm):
        state = super().init(parameters, comm)
        state.exchanges[32] = self.Silent()
        return state


class SumOfGradients(Around):
    def change(self, local_step, gradient, samples, total, comm):
        local_step(gradient * total, total)


class SumOfModels(ModelAveragingSGD):
    def share(self, own_samples, samples):
        return 1.0


class FlippedSign(Around):
    def change(self, local_step, gradient, samples, total, comm):
        local_step(-gradient, total)


class FlippedOuterSign(ModelAveragingSGD):
    def outer_step(self, state, block_gradient, samples, lr, ranks):
        state.start += block_gradient


class StaleStart(DiLoCo):
    """A block's gradient is applied to the model with which the block before began."""

    def init(self, parameters, comm):
        state = super().init(parameters, comm)
        state.momentum[...] = state.start
        return state

    def outer_step(self, state, block_gradient, samples, lr, ranks):
        new = state.momentum - block_gradient
        state.momentum[...] = state.start
        state.start[...] = new


class LastBlockIsLost(ModelAveragingSGD):
    def finish(self, state, parameters, local_step, comm):
        self.meet(state, comm)
        parameters.flat[...] = state.start


class RanksEndApart(ModelAveragingSGD):
    def finish(self, state, parameters, local_step, comm):
        self.meet(state, comm)


class MeanOfMeans(DataParallelSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        gradient.flat *= comm.agree(None, samples) / (comm.size * max(samples, 1))
        return super().step(state, parameters, gradient, samples, local_step, comm)


class MeanOfModels(ModelAveragingSGD):
    def share(self, own_samples, samples):
        return 1 / RANKS


class FirstRankCountsMore(DataParallelSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        gradient.flat *= 1.001 if comm.rank == 0 else 1
        return super().step(state, parameters, gradient, samples, local_step, comm)


class RanksDiffer(Around):
    def change(self, local_step, gradient, samples, total, comm):
        local_step(gradient * (1 + 1e-6 * comm.rank), total)


class OwnClock(Around):
    def change(self, local_step, gradient, samples, total, comm):
        local_step(gradient, total, samples)


class LeavesWithoutSamples(DataParallelSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        if samples == 0:
            return 0
        return super().step(state, parameters, gradient, samples, local_step, comm)


class CountsEmptyMinibatches(ModelAveragingSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        total = comm.agree(None, samples)
        if total == 0:
            state.block_steps += 1
        return super().step(state, parameters, gradient, samples, local_step, comm, total)


class Guesses(ModelAveragingSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        total = samples * comm.size if total is None else total
        return super().step(state, parameters, gradient, samples, local_step, comm, total)


STEPS_EVER = []


class Global(Around):
    def change(self, local_step, gradient, samples, total, comm):
        STEPS_EVER.append(total)
        local_step(gradient * (1 + 1e-5 * len(STEPS_EVER)), total)


class WritesSharedModel(ModelAveragingSGD):
    def shared_model(self, state, parameters):
        state.start[...] = parameters.flat
        return state.start


class MeetingChangesModel(ModelAveragingSGD):
    def meet(self, state, comm):
        super().meet(state, comm)
        state.start *= 1.001


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


class ReplacesTheVector(DataParallelSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        parameters._set_flat(parameters.flat.copy())
        return super().step(state, parameters, gradient, samples, local_step, comm)


class RoundsToFloat32(DataParallelSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        total = super().step(state, parameters, gradient, samples, local_step, comm)
        parameters.flat[...] = parameters.flat.astype(np.float32)
        return total


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
    (NoCommunication(), ["agreement", "communication", "weights"]),
    (NoAverage(sync_steps=3), ["agreement", "communication", "bytes_sent"]),
    (OneRankIsNotHeard(), ["communication", "permuted", "weights", "identical"]),
    (OneRankIsNotHeard(gradient_bits=1, block_size=64), ["communication"]),
    (Stripe(), ["communication", "permuted", "weights"]),
    (SumOfGradients(), ["serial", "identical"]),
    (SumOfModels(sync_steps=3), ["identical", "weights"]),
    (FlippedSign(), ["serial"]),
    (FlippedOuterSign(sync_steps=3), ["serial"]),
    (StaleStart(sync_steps=3), ["serial"]),
    (LastBlockIsLost(sync_steps=3), ["serial"]),
    (RanksEndApart(sync_steps=3), ["agreement"]),
    (MeanOfMeans(), ["weights"]),
    (MeanOfModels(sync_steps=3), ["weights"]),
    (FirstRankCountsMore(), ["permuted", "weights"]),
    (RanksDiffer(), ["agreement"]),
    (OwnClock(), ["agreement", "dry_ranks"]),
    (LeavesWithoutSamples(), ["dry_ranks", "weights"]),
    (CountsEmptyMinibatches(sync_steps=3), ["nothing"]),
    (Guesses(sync_steps=3), ["told", "dry_ranks"]),
    (Global(), ["repeatable", "resume"]),
    (WritesSharedModel(sync_steps=3), ["agreement"]),
    (MeetingChangesModel(sync_steps=3), ["observed"]),
    (with_state(DiLoCo, ForgetfulState), ["resume"]),
    (with_state(ModelAveragingSGD, CountsNothing), ["resume"]),
    (ForgetsResiduals(gradient_bits=1), ["resume"]),
    (with_state(DiLoCo, Undeclared), ["state"]),
    (with_state(DiLoCo, WithAList), ["state"]),
    (with_state(DiLoCo, NoMeaning), ["state"]),
    (with_state(DiLoCo, SummedNumber), ["state"]),
    (FailsAlone(), ["errors"]),
    (FailsWithoutReason(), ["errors"]),
    (TakesWhatIsNotFinite(), ["errors"]),
    (EndsWithoutMeeting(sync_steps=3), ["errors"]),
    (NeverMeets(sync_steps=3), ["errors"]),
    (CommunicatesBeforeItMeets(sync_steps=3), ["errors"]),
    (ReplacesTheVector(), ["arrays"]),
    (RoundsToFloat32(), ["float64", "serial"]),
    (CountsNoBytes(), ["bytes_sent"]),
    (CountsBytesDown(), ["bytes_sent"]),
    (Positional(), ["options"]),
    (HiddenOption(rate=2.0), ["options"]),
    (Unhashable(), ["options"]),
    (NoDefault(rate=1.0), ["options"]),
    (NoDataclass(), ["options"]),
    (Addressed(), ["options"]),
]


@pytest.mark.parametrize(
    ("algorithm", "check"),
    [
        pytest.param(algorithm, check, id=f"{type(algorithm).__name__}: {check}")
        for algorithm, checks in FAULTS
        for check in checks
    ],
)
def test_a_fault_is_caught(algorithm, check):
    ranks = 1 if CHECKS[check].alone else RANKS
    with pytest.raises(AssertionError) as caught:
        check_algorithm(algorithm, ranks=(RANKS,), only=[check], timeout_s=0.7)
    said, holds, which = str(caught.value).split("\n")
    assert said.startswith(f"{check}, on {ranks} rank")
    assert holds == f"  must hold: {CHECKS[check].identity}"
    assert which == f"  {algorithm}"


def test_every_check_catches_something():
    assert {check for _, checks in FAULTS for check in checks} == set(CHECKS)


def test_the_faultless_pass():
    check_algorithm(DATA_PARALLEL, ranks=(RANKS,), optimizer=MomentumSGD(lr=0.1))
    check_algorithm(AVERAGING, ranks=(RANKS,))
    check_algorithm(DILOCO, ranks=(RANKS,), exceptions={"serial": "the outer momentum"})


def test_a_message_names_step_value_and_identity():
    with pytest.raises(AssertionError) as caught:
        check_algorithm(RanksDiffer(), ranks=(2,), only=["agreement"])
    assert str(caught.value).startswith(
        "agreement, on 2 ranks: rank 1: step 0, the shared model beside rank 0's: "
    )
    assert "values differ, value " in str(caught.value)


def test_an_error_of_the_algorithm_is_the_cause():
    class Broken(DataParallelSGD):
        def step(self, *arguments):
            raise ZeroDivisionError("division by zero")

    with pytest.raises(AssertionError, match=r"^told, on 2 ranks: ZeroDivisionError: ") as caught:
        check_algorithm(Broken(), ranks=(2,), only=["told"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
