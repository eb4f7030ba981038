"""What must hold for local updates with an outer optimizer: see `invariants`.

`ByHand` is a second implementation, of all ranks one after the other in plain NumPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from cases import minibatch_of
from invariants import same_on_all_ranks

from parallel_sgd import (
    DESLOC,
    SGD,
    Adam,
    BlockMomentumSGD,
    CNTKBlockMomentumSGD,
    Communicator,
    DataParallelSGD,
    DiLoCo,
    Learner,
    ModelAveragingSGD,
    MomentumSGD,
    NesterovSGD,
    Optimizer,
    SlowMo,
    SparseLoCo,
)
from parallel_sgd.algorithms import Algorithm, LocalUpdates
from parallel_sgd.models import MLP
from parallel_sgd.schedules import Steps

Array = np.ndarray

FALLING = SGD(lr=Steps({0: 0.4, 10: 0.1, 50: 0.0}))
PAUSING = SGD(lr=Steps({9 * i: (0.4, 0.0, 0.1)[i % 3] for i in range(13)}))

ALGORITHMS: dict[str, tuple[LocalUpdates, Optimizer]] = {
    "averaging, every step": (ModelAveragingSGD(sync_steps=1), SGD(lr=0.2)),
    "averaging, block": (ModelAveragingSGD(block_samples=20), MomentumSGD(lr=0.1)),
    "averaging, period": (ModelAveragingSGD(sync_period=7), SGD(lr=0.2)),
    "averaging, zeroed": (ModelAveragingSGD(sync_steps=3, inner_state="zero"), Adam(lr=0.01)),
    "averaging, averaged": (
        ModelAveragingSGD(sync_steps=3, inner_state="average"),
        NesterovSGD(lr=0.1),
    ),
    "block momentum": (BlockMomentumSGD(sync_steps=3), MomentumSGD(lr=0.05)),
    "block momentum, kept": (
        BlockMomentumSGD(sync_steps=2, block_momentum=0.6, reset_sgd_momentum=False),
        MomentumSGD(lr=0.05),
    ),
    "classical": (
        BlockMomentumSGD(
            block_samples=20,
            block_momentum=0.5,
            block_learning_rate=0.8,
            use_nesterov_momentum=False,
        ),
        SGD(lr=0.1),
    ),
    "time constant": (
        BlockMomentumSGD(block_samples=20, block_momentum_as_time_constant=30.0),
        SGD(lr=0.1),
    ),
    "CNTK": (CNTKBlockMomentumSGD(sync_steps=3), SGD(lr=0.05)),
    "CNTK, classical": (
        CNTKBlockMomentumSGD(sync_steps=3, use_nesterov_momentum=False, block_momentum=0.4),
        SGD(lr=0.05),
    ),
    "SlowMo": (SlowMo(sync_steps=3, slow_learning_rate=0.9), FALLING),
    "DiLoCo": (DiLoCo(sync_steps=4), Adam(lr=0.01, weight_decay=0.01)),
    "warm start": (BlockMomentumSGD(block_samples=20, distributed_after=21), MomentumSGD(lr=0.05)),
    "overlap": (ModelAveragingSGD(sync_steps=4, overlap_samples=11), SGD(lr=0.2)),
    "overlap, momentum": (
        DiLoCo(sync_steps=4, overlap_samples=1, merge_weight=0.25),
        MomentumSGD(lr=0.05),
    ),
    "overlap of a whole block": (
        BlockMomentumSGD(
            sync_steps=3,
            overlap_samples=1000,
            merge_weight=1.0,
            block_momentum_as_time_constant=30.0,
        ),
        SGD(lr=0.1),
    ),
    "overlap, SlowMo": (SlowMo(sync_steps=2, overlap_samples=1000), PAUSING),
    "quorum, in time": (DiLoCo(sync_steps=4, grace_s=100), Adam(lr=0.01)),
    "quorum, in time, zeroed": (
        BlockMomentumSGD(block_samples=20, grace_s=100, distributed_after=21),
        MomentumSGD(lr=0.05),
    ),
    "SparseLoCo": (
        SparseLoCo(sync_steps=3, gradient_bits=32, outer_learning_rate=0.8),
        Adam(lr=0.01),
    ),
    "DES-LOC": (
        DESLOC(sync_steps=1, first_moment_every=2, second_moment_every=5),
        Adam(lr=0.01),
    ),
    "fragments": (
        DiLoCo(sync_steps=4, fragments=3, block_size=4),
        Adam(lr=0.01, weight_decay=0.01),
    ),
    "fragments by samples": (
        BlockMomentumSGD(block_samples=30, fragments=2, block_size=4),
        MomentumSGD(lr=0.05),
    ),
    "fragments, overlap": (
        SlowMo(sync_steps=5, fragments=3, block_size=4, overlap_samples=9, merge_weight=0.3),
        PAUSING,
    ),
    "fragments, averaged": (
        DESLOC(
            sync_period=11,
            fragments=2,
            block_size=4,
            first_moment_every=1,
            second_moment_every=2,
            overlap_samples=1000,
        ),
        Adam(lr=0.01),
    ),
}


def outer_step(
    algorithm: LocalUpdates, phi: Array, m: Array, g: Array, samples: int, lr: float, ranks: int
) -> tuple[Array, Array]:
    """Φ and the outer momentum after a block gradient (for CNTK's form: ranks times it)."""
    match algorithm:
        case ModelAveragingSGD() | DESLOC():
            return phi - g, m
        case SparseLoCo(outer_learning_rate=rate):
            return phi - rate * g, m
        case SlowMo(slow_momentum=beta, slow_learning_rate=alpha):
            if lr == 0:
                return phi - alpha * g, beta * m
            u = beta * m + g / lr
            return phi - alpha * lr * u, u
        case DiLoCo(outer_learning_rate=rate, outer_momentum=mu):
            m = mu * m + g
            return phi - rate * (g + mu * m), m
        case BlockMomentumSGD() | CNTKBlockMomentumSGD():
            eta, tau = algorithm.block_momentum, algorithm.block_momentum_as_time_constant
            if tau is not None:
                eta = math.exp(-samples / tau)
            elif eta is None:
                eta = 1 - 1 / ranks
            zeta, nesterov = algorithm.block_learning_rate, algorithm.use_nesterov_momentum
            if isinstance(algorithm, CNTKBlockMomentumSGD):
                m = eta * m + (1 - eta) * zeta * g
                return phi - m - (eta * m if nesterov else 0), m
            m = eta * m + zeta * g
            return phi - (zeta * g + eta * m if nesterov else m), m
    raise AssertionError(algorithm)


#: The ends of a model's fragments in the flat vector, by their number: parameters of 30, 5, 20, 4.
ENDS = {1: [59], 2: [30, 59], 3: [30, 35, 59]}


@dataclass
class Worker:
    """One rank of `ByHand`."""

    model: MLP
    local_step: Any


@dataclass
class Part:
    """A fragment of the model, in `ByHand`: its samples by rank, and what is under way."""

    values: slice
    length: Fraction  #: of its first block, in periods
    own: list[int]
    steps: int = 0
    blocks: int = 0
    is_first: bool = True
    sent: tuple[Array, int, float] | None = None

    @property
    def samples(self) -> int:
        return sum(self.own)


class ByHand:
    """All ranks in one place, without the package's algorithms, exchanges or communicators."""

    def __init__(self, algorithm: LocalUpdates, optimizer: Optimizer, ranks: int) -> None:
        self.algorithm, self.ranks = algorithm, ranks
        models = [MLP([6, 5, 4], seed=0, dtype=np.float64) for _ in range(ranks)]
        self.workers = [Worker(model, optimizer.bind(model.parameters)) for model in models]
        self.phi = models[0].parameters.flat.copy()
        self.m = np.zeros_like(self.phi)
        ends = ENDS[algorithm.fragments]
        self.parts = [
            Part(slice(begin, end), Fraction(number, len(ends)), [0] * ranks)
            for number, (begin, end) in enumerate(pairwise([0, *ends]), start=1)
        ]
        self.lr = 0.0

    @property
    def clock(self) -> int:
        return self.workers[0].local_step.samples

    def step(self, parts: list[tuple[Array, Array]]) -> None:
        total = sum(len(y) for _, y in parts)
        if self.clock < self.algorithm.distributed_after:
            x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            for worker in self.workers:
                self._train(worker, x, y, len(y))
            self.phi = self.workers[0].model.parameters.flat.copy()
            return
        if total == 0:
            return
        self.lr = self.workers[0].local_step.lr
        for worker, (x, y) in zip(self.workers, parts, strict=True):
            self._train(worker, x, y, total)
        for part in self.parts:
            part.own = [own + len(y) for own, (_, y) in zip(part.own, parts, strict=True)]
            part.steps += 1
            if part.sent and part.samples >= self.algorithm.overlap_samples:
                self._merge(part)
            if self._full(part):
                if part.sent:
                    self._merge(part)
                self._end(part)
                part.is_first = False
                if not self.algorithm.overlap_samples:
                    self._merge(part, weight=0.0)

    def finish(self) -> None:
        for part in self.parts:
            if part.sent:
                self._merge(part)
            if part.samples:
                self._end(part)
                self._merge(part)
        for worker in self.workers:
            worker.model.parameters.flat[:] = self.phi

    @staticmethod
    def _train(worker: Worker, x: Array, y: Array, total: int) -> None:
        gradient = worker.model.parameters.like()
        worker.model.gradient(x, y, out=gradient)
        worker.local_step(gradient.flat, len(y), total)

    def _full(self, part: Part) -> bool:
        algorithm, length = self.algorithm, part.length if part.is_first else 1
        if algorithm.sync_steps:
            return part.steps >= length * algorithm.sync_steps
        period = algorithm.block_samples or algorithm.sync_period * self.ranks
        return part.samples >= length * period

    def _end(self, part: Part) -> None:
        weights = [
            1.0 if isinstance(self.algorithm, CNTKBlockMomentumSGD) else own / part.samples
            for own in part.own
        ]
        phi = self.phi[part.values]
        models = [worker.model.parameters.flat[part.values] for worker in self.workers]
        g = sum(w * (phi - x) for w, x in zip(weights, models, strict=True))
        part.sent = g, part.samples, self.lr
        part.own, part.steps = [0] * self.ranks, 0

    def _merge(self, part: Part, weight: float | None = None) -> None:
        if weight is None:
            weight = 0.5 if self.algorithm.merge_weight is None else self.algorithm.merge_weight
        (g, samples, lr), values = part.sent, part.values
        part.sent = None
        self.phi[values], self.m[values] = outer_step(
            self.algorithm, self.phi[values], self.m[values], g, samples, lr, self.ranks
        )
        for worker in self.workers:
            x = worker.model.parameters.flat[values]
            x[:] = weight * x + (1 - weight) * self.phi[values]
        part.blocks += 1
        self._inner(part)

    def _inner(self, part: Part) -> None:
        algorithm, values = self.algorithm, part.values
        resets = getattr(algorithm, "reset_sgd_momentum", None)
        if isinstance(algorithm, DESLOC):
            every = {"m": algorithm.first_moment_every, "v": algorithm.second_moment_every}
            policy = "average"
        else:
            every = {}
            policy = {True: "zero", False: "keep"}.get(resets) or algorithm.inner_state
        states = [worker.local_step.state for worker in self.workers]
        for name in states[0].buffers if policy != "keep" else ():
            if part.blocks % every.get(name, 1):
                continue
            mean = sum(state.buffers[name][values] for state in states) / self.ranks
            for state in states:
                state.buffers[name][values] = 0 if policy == "zero" else mean
        if policy == "zero" and len(self.parts) == 1:
            for state in states:
                state.steps = 0


def equals_the_equations(comm: Communicator, name: str, steps: int = 14, told: bool = True) -> None:
    """Every rank's model and Φ are those of `ByHand` after every step, and after `finish`."""
    algorithm, optimizer = ALGORITHMS[name]
    model = MLP([6, 5, 4], seed=comm.rank, dtype=np.float64)  # rank 0's is everybody's
    learner = Learner(model.parameters, optimizer, algorithm, comm)
    by_hand = ByHand(algorithm, optimizer, comm.size)
    start = model.parameters.flat.copy()
    for step in range(steps):
        parts = [minibatch_of(k, step) for k in range(comm.size)]
        x, y = parts[comm.rank]
        if not learner.distributed:
            x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        model.gradient(x, y, out=learner.gradient)
        total = sum(len(part) for _, part in parts)
        if told:
            learner.announce(len(y), total)
        assert learner.step(samples=len(y)) == total
        by_hand.step(parts)
        assert learner.samples == by_hand.clock
        compare(model.parameters.flat, by_hand.workers[comm.rank].model.parameters.flat, step)
        same_on_all_ranks(comm, learner.state.start)
        with learner.shared_model():
            compare(model.parameters.flat, by_hand.phi, step)
    learner.finish()
    by_hand.finish()
    compare(model.parameters.flat, by_hand.phi, "finish")
    same_on_all_ranks(comm, model.parameters.flat)
    assert not np.allclose(model.parameters.flat, start, atol=1e-3), "has not trained"


def compare(one: Array, other: Array, step: Any) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11, err_msg=f"step {step}")


def trained(
    comm: Communicator, algorithm: Algorithm[Any], optimizer: Optimizer, *, even: bool = False
) -> Array:
    """The final model, float64, of a run; with `even`, each rank has 4 samples in every step."""
    model = MLP([6, 5, 4], seed=0, dtype=np.float64)
    learner = Learner(model.parameters, optimizer, algorithm, comm)
    for step in range(12):
        x, y = minibatch_of(comm.rank, step)
        if even:
            random = np.random.default_rng([9, comm.rank, step])
            x, y = random.standard_normal((4, 6)) + comm.rank, random.integers(0, 4, 4)
        model.gradient(x, y, out=learner.gradient)
        learner.step(samples=len(y))
    learner.finish()
    return model.parameters.flat.copy()


def alike(one: Array, other: Array) -> bool:
    return bool(np.allclose(one, other, rtol=1e-9, atol=1e-11))


def classical(eta: float, zeta: float = 1.0, **options: Any) -> BlockMomentumSGD:
    return BlockMomentumSGD(
        block_momentum=eta,
        block_learning_rate=zeta,
        use_nesterov_momentum=False,
        reset_sgd_momentum=False,
        **options,
    )


def averaging_is_block_momentum_of_none(comm: Communicator) -> None:
    """Identity 3: classical BMUF(η=0, ζ=1) is model averaging."""
    for period in ({"sync_steps": 3}, {"block_samples": 20}):
        optimizer = MomentumSGD(lr=0.05)
        one = trained(comm, ModelAveragingSGD(**period), optimizer)
        assert alike(one, trained(comm, classical(0.0, **period), optimizer))
        assert not alike(one, trained(comm, classical(0.3, **period), optimizer))


def averaging_every_step_is_data_parallel(comm: Communicator) -> None:
    """Identity 3: with plain SGD, with momentum kept local, and not with Adam."""
    every = ModelAveragingSGD(sync_steps=1)
    for optimizer, even in ((SGD(lr=0.2), False), (MomentumSGD(lr=0.05), True)):
        one = trained(comm, every, optimizer, even=even)
        assert alike(one, trained(comm, DataParallelSGD(), optimizer, even=even))
    one = trained(comm, every, Adam(lr=0.01), even=True)
    other = trained(comm, DataParallelSGD(), Adam(lr=0.01), even=True)
    assert alike(one, other) == (comm.size == 1)


def block_momentum_every_step_is_momentum(comm: Communicator) -> None:
    """Identity 4, and the two things that go by the name of Nesterov are not the same."""
    eta, zeta, lr = 0.6, 0.7, 0.1
    momentum = MomentumSGD(lr=lr * zeta, momentum=eta)
    one = trained(comm, classical(eta, zeta, sync_steps=1), SGD(lr=lr))
    assert alike(one, trained(comm, DataParallelSGD(), momentum))
    nesterov = replace(classical(eta, zeta, sync_steps=1), use_nesterov_momentum=True)
    two = trained(comm, nesterov, SGD(lr=lr))
    assert alike(two, trained(comm, DataParallelSGD(), NesterovSGD(lr=lr * zeta, momentum=eta)))
    larger = classical(eta, zeta * (1 + eta), sync_steps=1)
    assert not alike(two, trained(comm, larger, SGD(lr=lr)))


def cntk_is_classical_with_a_larger_rate(comm: Communicator) -> None:
    """At η = 1 - 1/K and even data; with its "Nesterov", classical with ζ (1 + η)."""
    eta = 1 - 1 / comm.size
    for nesterov, zeta in ((False, 1.0), (True, 1 + eta)):
        cntk = CNTKBlockMomentumSGD(
            sync_steps=3, use_nesterov_momentum=nesterov, reset_sgd_momentum=False
        )
        one = trained(comm, cntk, SGD(lr=0.05), even=True)
        assert alike(
            one, trained(comm, classical(eta, zeta, sync_steps=3), SGD(lr=0.05), even=True)
        )


def slow_momentum_is_classical_at_a_constant_rate(comm: Communicator) -> None:
    """Identity 5: and only then."""
    slow, block = SlowMo(sync_steps=2, slow_momentum=0.6), classical(0.6, sync_steps=2)
    one, other = (trained(comm, algorithm, SGD(lr=0.1)) for algorithm in (slow, block))
    assert alike(one, other)
    one, other = (trained(comm, algorithm, FALLING) for algorithm in (slow, block))
    assert np.isfinite(one).all()
    assert not alike(one, other)


def slow_momentum_divides_by_the_rate_of_a_mean(comm: Communicator) -> None:
    """A rate per sample counts as what it is for the mean gradient of a minibatch, which grows."""

    def final(optimizer: Optimizer) -> Array:
        model = MLP([6, 5, 4], seed=0, dtype=np.float64)
        learner = Learner(model.parameters, optimizer, SlowMo(sync_steps=2), comm)
        for step in range(8):
            samples = 2 if step < 4 else 6
            random = np.random.default_rng([9, comm.rank, step])
            x, y = random.standard_normal((samples, 6)), random.integers(0, 4, samples)
            model.gradient(x, y, out=learner.gradient)
            learner.step(samples=samples)
            if optimizer.lr_per_sample:
                assert alike(learner.state.lr, optimizer.lr_per_sample * samples)
        learner.finish()
        return model.parameters.flat.copy()

    rises = Steps({0: 0.1, 8 * comm.size: 0.3})
    assert alike(final(SGD(lr_per_sample=0.05)), final(SGD(lr=rises)))
    assert not alike(final(SGD(lr=0.1)), final(SGD(lr=rises)))


def fragments_every_step_are_data_parallel(comm: Communicator) -> None:
    """With plain SGD and a period of 1: in whatever number of fragments."""
    for fragments in ENDS:
        every = ModelAveragingSGD(sync_steps=1, fragments=fragments, block_size=4)
        one = trained(comm, every, SGD(lr=0.2))
        assert alike(one, trained(comm, DataParallelSGD(), SGD(lr=0.2)))
        longer = trained(comm, replace(every, sync_steps=3), SGD(lr=0.2))
        assert alike(one, longer) == (comm.size == 1)


def desynced_in_step_is_averaging(comm: Communicator) -> None:
    """DES-LOC with equal periods is model averaging that averages the local optimizer's state."""
    optimizer, average = Adam(lr=0.02), ModelAveragingSGD(sync_steps=2, inner_state="average")
    one = trained(comm, average, optimizer)
    for second in (1, 2):
        desynced = DESLOC(sync_steps=2, first_moment_every=1, second_moment_every=second)
        same = alike(one, trained(comm, desynced, optimizer))
        assert same == (second == 1 or comm.size == 1)


def sparse_is_diloco_without_momentum(comm: Communicator) -> None:
    """SparseLoCo with 32 bits, whatever the decay."""
    options = {"sync_steps": 3, "outer_learning_rate": 0.6}
    one = trained(comm, DiLoCo(**options, outer_momentum=0.0), Adam(lr=0.02))
    for decay in (0.0, 0.95, 1.0):
        sparse = SparseLoCo(**options, gradient_bits=32, residual_decay=decay)
        assert alike(one, trained(comm, sparse, Adam(lr=0.02)))


def diloco_is_nesterov_block_momentum(comm: Communicator) -> None:
    """Identity 5, on Adam whose state stays with the ranks."""
    block = replace(classical(0.8, 0.5, sync_steps=3), use_nesterov_momentum=True)
    diloco = DiLoCo(sync_steps=3, outer_learning_rate=0.5, outer_momentum=0.8)
    optimizer = Adam(lr=0.02, weight_decay=0.1)
    assert alike(trained(comm, diloco, optimizer), trained(comm, block, optimizer))
