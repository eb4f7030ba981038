"""Algorithms that train wrongly, each in one way, and the checks that catch them."""

from __future__ import annotations

import numpy as np

from parallel_sgd import DataParallelSGD, DiLoCo, ModelAveragingSGD

RANKS = 3  #: on which they are caught


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


class RoundsToFloat32(DataParallelSGD):
    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        total = super().step(state, parameters, gradient, samples, local_step, comm)
        parameters.flat[...] = parameters.flat.astype(np.float32)
        return total


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
    (RoundsToFloat32(), ["float64", "serial"]),
]
