"""Algorithms that train wrongly, each in one way, and the checks that catch them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from mutations import Instead

from parallel_sgd import DataParallelSGD, DiLoCo, ModelAveragingSGD, SlowMo
from parallel_sgd.algorithms import Averaging, ExchangeState, OuterNesterov

RANKS = 3  #: on which they are caught


def with_exchange(base, kind, **given):
    """An algorithm whose exchange is of another class."""

    class WithExchange(base):
        def init(self, work):
            state = super().init(work)
            state.exchange = kind(**vars(state.exchange))
            return state

    WithExchange.__name__ = kind.__name__
    return WithExchange(**given)


class Around(DataParallelSGD):
    """Data-parallel SGD whose optimizer is called by `change`."""

    def change(self, optimizer, gradient, minibatch, comm):
        raise NotImplementedError

    def step(self, state, work, minibatch):
        def changed(inner, summed, _):
            self.change(inner, summed, minibatch, work.comm)

        super().step(state, replace(work, optimizer=Instead(work.optimizer, changed)), minibatch)


class NoCommunication(DataParallelSGD):
    def step(self, state, work, minibatch):
        work.optimizer(work.gradient.flat, *minibatch)


class OneRankIsNotHeard(DataParallelSGD):
    def step(self, state, work, minibatch):
        if work.comm.rank == 1:
            work.gradient.flat[...] = 0
        super().step(state, work, minibatch)


class Stripe(DataParallelSGD):
    """A part of the vector is not exchanged, and rank 0's is taken."""

    def step(self, state, work, minibatch):
        if work.comm.rank:
            work.gradient.flat[100:200] = 0
        super().step(state, work, minibatch)


class NoAverage(ExchangeState):
    def sum(self, vector, part=0):
        pass


class SumOfGradients(Around):
    def change(self, optimizer, gradient, minibatch, comm):
        optimizer(gradient * minibatch.total, minibatch.total)


class SumOfModels(Averaging):
    def weight(self, own_samples, samples):
        return 1.0


class FlippedSign(Around):
    def change(self, optimizer, gradient, minibatch, comm):
        optimizer(-gradient, minibatch.total)


class FlippedOuterSign(Averaging):
    def step(self, model, momentum, gradient, block):
        model += gradient
        gradient[...] = model


class StaleStart(OuterNesterov):
    """A block's gradient is applied to the model with which the block before began."""

    def init(self, model):
        return model.flat.copy()

    def step(self, model, momentum, gradient, block):
        new = momentum - gradient
        momentum[...] = model
        model[...] = gradient[...] = new


class LastBlockIsLost(ModelAveragingSGD):
    def finish(self, state, work):
        work.parameters.flat[...] = state.start


class ModelsStayApart(ModelAveragingSGD):
    """The mean of the models is shared, but each rank trains on from its own model."""

    def step(self, state, work, minibatch):
        own = work.parameters.flat.copy()
        super().step(state, work, minibatch)
        if not state.fragments["0"].samples:
            work.parameters.flat[...] += own - state.start


class RanksEndApart(ModelAveragingSGD):
    def finish(self, state, work):
        pass


class MeanOfMeans(DataParallelSGD):
    def step(self, state, work, minibatch):
        work.gradient.flat *= minibatch.total / (work.comm.size * max(minibatch.samples, 1))
        super().step(state, work, minibatch)


class MeanOfModels(Averaging):
    def weight(self, own_samples, samples):
        return 1 / RANKS


class FirstRankCountsMore(DataParallelSGD):
    def step(self, state, work, minibatch):
        work.gradient.flat *= 1.001 if work.comm.rank == 0 else 1
        super().step(state, work, minibatch)


class DividesByItsOwnSamples(Around):
    def change(self, optimizer, gradient, minibatch, comm):
        optimizer(gradient, max(minibatch.samples, 1))


class RanksDiffer(Around):
    def change(self, optimizer, gradient, minibatch, comm):
        optimizer(gradient * (1 + 1e-6 * comm.rank), minibatch.total)


class OwnClock(Around):
    def change(self, optimizer, gradient, minibatch, comm):
        optimizer(gradient, minibatch.total, minibatch.samples)


class LeavesWithoutSamples(DataParallelSGD):
    def step(self, state, work, minibatch):
        if minibatch.samples:
            super().step(state, work, minibatch)


class ChangesWithoutSamples(DataParallelSGD):
    def problem(self, state, work, samples):
        if samples == 0:
            work.parameters.flat[...] *= 1.001
        return super().problem(state, work, samples)


class Guesses(ModelAveragingSGD):
    """The others' samples, where no source has told."""

    asynchronous = True


STEPS_EVER = []


class Global(Around):
    def change(self, optimizer, gradient, minibatch, comm):
        STEPS_EVER.append(minibatch.total)
        optimizer(gradient * (1 + 1e-5 * len(STEPS_EVER)), minibatch.total)


class WritesSharedModel(ModelAveragingSGD):
    def shared_model(self, state, work):
        state.start[...] = work.parameters.flat
        return state.start


class WaitingChangesResiduals(ExchangeState):
    def wait(self, part=None):
        self.residuals.worker_error *= 1.1


class RoundsToFloat32(DataParallelSGD):
    def step(self, state, work, minibatch):
        super().step(state, work, minibatch)
        work.parameters.flat[...] = work.parameters.flat.astype(np.float32)


class ForgetsTheFactor(SlowMo):
    """The outer step divides by another rate than the local steps have had."""

    def step(self, state, work, minibatch):
        super().step(state, work, minibatch)
        state.lr = work.optimizer.lr


FEW_BITS = {"gradient_bits": 1, "block_size": 64}

FAULTS = [
    (NoCommunication(), ["agreement", "communication", "weights"]),
    (
        with_exchange(ModelAveragingSGD, NoAverage, sync_steps=3),
        ["agreement", "communication", "bytes_sent"],
    ),
    (OneRankIsNotHeard(), ["communication", "permuted", "weights", "identical"]),
    (OneRankIsNotHeard(**FEW_BITS), ["communication"]),
    (Stripe(), ["communication", "permuted", "weights"]),
    (SumOfGradients(), ["serial", "identical"]),
    (ModelAveragingSGD(outer=SumOfModels(), sync_steps=3), ["identical", "weights"]),
    (FlippedSign(), ["serial", "learns"]),
    (ModelAveragingSGD(outer=FlippedOuterSign(), sync_steps=3), ["serial", "learns"]),
    (DiLoCo(outer=StaleStart(), sync_steps=3), ["serial"]),
    (LastBlockIsLost(sync_steps=3), ["serial"]),
    (LastBlockIsLost(sync_steps=5), ["serial"]),  # the usual run ends with a block
    (RanksEndApart(sync_steps=3), ["agreement"]),
    (RanksEndApart(sync_steps=5), ["agreement"]),
    (ModelsStayApart(sync_steps=3), ["approach"]),
    (MeanOfMeans(), ["weights", "dry_ranks_count_nothing"]),
    (ModelAveragingSGD(outer=MeanOfModels(), sync_steps=3), ["weights"]),
    (FirstRankCountsMore(), ["permuted", "weights"]),
    (DividesByItsOwnSamples(), ["agreement", "weights", "identical"]),
    (RanksDiffer(), ["agreement"]),
    (OwnClock(), ["agreement", "dry_ranks"]),
    (LeavesWithoutSamples(), ["dry_ranks", "weights"]),
    (ChangesWithoutSamples(), ["nothing"]),
    (Guesses(sync_steps=3), ["announced", "dry_ranks"]),
    (Global(), ["repeatable", "resume"]),
    (WritesSharedModel(sync_steps=3), ["agreement"]),
    (with_exchange(DataParallelSGD, WaitingChangesResiduals, **FEW_BITS), ["observed"]),
    (ForgetsTheFactor(sync_steps=3), ["rates"]),
    (RoundsToFloat32(), ["float64", "serial"]),
    (DataParallelSGD(**FEW_BITS, error_feedback=False), ["owed", "later"]),
    (ModelAveragingSGD(**FEW_BITS, error_feedback=False, sync_steps=3), ["owed", "later"]),
]
