"""What workers of parameter servers train on, and the same training by hand: see `invariants`.

Sample i of a worker pulls the model to a centre c_i, each value with a stiffness h_i: the gradient
depends on the model that it was taken at, so stale models show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from invariants import same_on_all_ranks

from parallel_sgd import Communicator, DataParallelASGD, Learner, Optimizer, Parameters

Array = np.ndarray

LAYOUT = {"W": (22, 5), "b": (17,), "none": (0, 2), "s": (1,)}
N = 128

beside_and_apart = pytest.mark.parametrize(
    "apart",
    [
        pytest.param(False, marks=pytest.mark.filterwarnings("ignore:servers=0"), id="beside"),
        pytest.param(True, id="apart"),
    ],
)


def asynchronous(**options: Any) -> DataParallelASGD:
    """Every minibatch a period, unless another is asked for; several slices on several servers."""
    if not {"sync_steps", "sync_period"} & options.keys():
        options["sync_steps"] = 1
    if options.get("slice_parameters", True):
        options["min_block"] = 8
    return DataParallelASGD(**options)


def servers_of(comm: Communicator, apart: bool) -> int:
    """Half of the ranks, where servers are apart from workers: 1 of 2 and of 3, 2 of 4. Else 0."""
    return comm.size // 2 if apart else 0


def starting_point(dtype: Any = np.float64) -> Parameters:
    parameters = Parameters({name: np.zeros(shape, dtype) for name, shape in LAYOUT.items()})
    parameters.flat[:] = np.arange(N) / 64 - 1
    return parameters


def learner_of(
    comm: Communicator, algorithm: DataParallelASGD, optimizer: Optimizer, dtype: Any = np.float64
) -> Learner:
    """A new learner, whose ranks are as many as they must be."""
    parameters = starting_point(dtype)
    parameters.flat[:] += comm.rank  # rank 0's is everybody's
    learner = Learner(parameters, optimizer, algorithm, comm)
    assert learner.world.size == comm.size
    servers = min(1, comm.size - 1) if algorithm.servers is None else algorithm.servers
    assert learner.comm.size == (servers if learner.serves else comm.size - servers)
    assert learner.serves == (comm.rank >= comm.size - servers)
    return learner


def few_samples_of(worker: int, step: int) -> int:
    """How many samples a worker has in a minibatch: uneven, and sometimes none."""
    return 0 if step == 5 else (3, 1, 0, 2, 4)[(2 * worker + step) % 5]


@cache
def _samples(worker: int, step: int, m: int) -> tuple[Array, Array]:
    random = np.random.default_rng([21, worker, step])
    stiffness = np.clip(1 + random.standard_normal((m, N)) / 4, 0.5, 1.5)
    return stiffness, random.standard_normal((m, N)) + worker


def gradient_at(x: Array, worker: int, step: int, m: int) -> Array:
    """Of the sum of m samples' losses."""
    stiffness, centres = _samples(worker, step, m)
    return (stiffness * (x - centres)).sum(axis=0).astype(x.dtype)


def put_gradient(learner: Learner, step: int, m: int) -> None:
    """This worker's, at its own model; without samples what must not be looked at."""
    x = learner.parameters.flat
    learner.gradient.flat[:] = gradient_at(x, learner.comm.rank, step, m) if m else np.nan


def finished(comm: Communicator, learner: Learner) -> Array:
    """The final model, which is the same on all ranks, servers too. Collective over all."""
    learner.finish()
    x = learner.parameters.flat
    same_on_all_ranks(comm, x)
    assert np.isfinite(x).all()
    assert not np.allclose(x, starting_point().flat, atol=1e-3), "has not trained"
    return x.copy()


def turns(learner: Learner, rounds: int) -> Iterator[tuple[int, int]]:
    """Round and worker of every turn; the others wait until whoever has this one is done.

    The caller does something in a turn only where the worker is its own.
    """
    learner.comm.barrier()
    for number in range(rounds):
        for worker in range(learner.comm.size):
            yield number, worker
            learner.comm.barrier()


@dataclass
class ByHand:
    """All workers and one server in plain NumPy, one after the other, with plain SGD.

    Attributes:
        rule: how a push changes x: given x, worker, what is pushed, its samples.
    """

    algorithm: DataParallelASGD
    lr: Any
    workers: int
    x: Array = field(default_factory=lambda: starting_point().flat.copy())
    samples: int = 0  #: applied, the clock of the learning rate
    version: int = 0

    def __post_init__(self) -> None:
        self.own = [self.x.copy() for _ in range(self.workers)]
        self.pulled = [self.x.copy() for _ in range(self.workers)]
        self.pulled_version = [0] * self.workers
        self.gathered = [np.zeros(N) for _ in range(self.workers)]
        self.gathered_samples = [0] * self.workers
        self.minibatches = [0] * self.workers
        self.clocks = [0] * self.workers
        self.staleness: list[dict[int, int]] = [{} for _ in range(self.workers)]

    def rate_after(self, samples: int) -> float:
        return self.lr if isinstance(self.lr, float) else self.lr(samples)

    def factor(self, k: int) -> float:
        """ALGORITHMS.md: min(1, a (⌊s/m⌋ + 1)) or min(1, a + (1 - a) s/m)."""
        a, m, s = (
            self.algorithm.ramp_coefficient,
            self.algorithm.ramp_minibatches,
            self.minibatches[k],
        )
        if not m:
            return 1.0
        if self.algorithm.ramp == "staircase":
            return min(1.0, a * (s // m + 1))
        return min(1.0, a + (1 - a) * s / m)

    def step(self, k: int, gradient: Array, m: int) -> None:
        """A minibatch of worker k, pushed and pulled at the end of its period."""
        deltas = self.algorithm.currency == "deltas"
        if deltas:
            rate = self.rate_after(self.clocks[k]) * self.factor(k)
            self.own[k] = self.own[k] - rate * gradient / m
        self.gathered[k] = self.gathered[k] + gradient
        self.gathered_samples[k] += m
        self.clocks[k] += m * self.workers
        if (self.minibatches[k] + 1) % self.algorithm.sync_steps == 0:
            self.push(k, deltas)
        self.minibatches[k] += 1

    def push(self, k: int, deltas: bool) -> None:
        count = self.version - self.pulled_version[k]
        self.staleness[k][count] = self.staleness[k].get(count, 0) + 1
        share = 1 / self.workers if self.algorithm.merge == "mean" else 1.0
        n = self.gathered_samples[k]
        if deltas:
            self.x = self.x - share * (self.pulled[k] - self.own[k])
        else:
            g = self.gathered[k] / n
            g = g + self.algorithm.delay_compensation * g * g * (self.x - self.pulled[k])
            self.x = self.x - self.rate_after(self.samples) * self.factor(k) * share * g
        self.samples += n
        self.version += 1
        self.own[k], self.pulled[k] = self.x.copy(), self.x.copy()
        self.pulled_version[k] = self.version
        self.gathered[k], self.gathered_samples[k] = np.zeros(N), 0


class Serial:
    """An optimizer alone, on the same model."""

    def __init__(self, optimizer: Optimizer, dtype: Any = np.float64) -> None:
        self.parameters = starting_point(dtype)
        self.local_step = optimizer.bind(self.parameters)

    @property
    def x(self) -> Array:
        return self.parameters.flat

    def step(self, gradient: Array, m: int) -> None:
        if m:
            self.local_step(gradient.copy(), m)


def alike(one: Array, other: Array, what: Any = "") -> None:
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11, err_msg=str(what))
