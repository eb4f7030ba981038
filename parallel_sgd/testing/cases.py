"""The training problem of the checks: small, with different data on every rank.

Every step of a run is recorded. Sample i pulls the model to its own centre c_i, each value with its
own stiffness h_i:

    loss_i = sum of h_i / 2 * (x - c_i)^2        gradient_i = h_i * (x - c_i)

The gradient depends on the model, so a wrong model on a rank changes the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..algorithms import Algorithm
from ..communication import Communicator
from ..optimizers import Optimizer
from ..parameters import Parameters
from ..training import Learner

Array = npt.NDArray[Any]
Data = Sequence[Sequence[Array]]
"""By minibatch and rank: samples [m, 2, n], each a stiffness and a centre."""

LAYOUT = {"W": (30, 40), "b": (40,), "s": (3,)}
VALUES = 1243

STEPS = 10
"""Minibatches of a run, with 1 to 4 samples a rank."""

LENGTHS = (STEPS, STEPS - 1)
"""Minibatches of runs of which one ends inside a block, unless all blocks have one minibatch."""

ROUNDING = {"float64": 1e-9, "float32": 1e-4}
"""Largest difference between results that are equal to rounding."""


def counts_of(ranks: int, steps: int = STEPS) -> tuple[tuple[int, ...], ...]:
    """Return the samples of each rank, by minibatch: uneven, and changing."""
    return tuple(tuple((3 * k + 2 * t) % 4 + 1 for k in range(ranks)) for t in range(steps))


@cache
def data_of(counts: tuple[tuple[int, ...], ...], *, one_stiffness: bool = False) -> Data:
    """Return random samples, different on every rank.

    Args:
        counts: samples of each rank, by minibatch.
        one_stiffness: all stiffnesses are 1.
    """
    return [
        [_samples(k, t, m, one_stiffness) for k, m in enumerate(row)]
        for t, row in enumerate(counts)
    ]


def _samples(rank: int, step: int, m: int, one_stiffness: bool) -> Array:
    random = np.random.default_rng([11, rank, step])
    samples: Array = random.standard_normal((m, 2, VALUES))
    samples[:, 0] = 1 if one_stiffness else np.clip(1 + samples[:, 0] / 4, 0.5, 1.5)
    samples[:, 1] += rank
    return samples


def shifted(data: Data, ranks: Sequence[int], by: float = 1.0) -> Data:
    """Return the same data with the centres of some ranks' samples shifted."""
    change = np.array([[0.0], [by]])
    return [[part + change if k in ranks else part for k, part in enumerate(row)] for row in data]


@dataclass(frozen=True)
class Case:
    """An algorithm under test, on these ranks.

    Attributes:
        algorithm: the given algorithm.
        exact: the same algorithm in full precision, for identities that hold to rounding.
        one_rank: the equivalent algorithm for one rank, in full precision.
        optimizer: the local update rule.
        comm: the ranks.
        dtype: dtype of the parameters in runs of `exact`.
        schedules: orders of the ranks' steps to explore.
        timeout_s: longest wait of a thread for other threads, in checks with their own threads.
    """

    algorithm: Algorithm[Any]
    exact: Algorithm[Any]
    one_rank: Algorithm[Any]
    optimizer: Optimizer
    comm: Communicator
    dtype: str
    schedules: int
    timeout_s: float

    @property
    def rounding(self) -> float:
        return ROUNDING[self.dtype]

    def data(self, steps: int = STEPS) -> Data:
        return data_of(counts_of(self.comm.size, steps))

    def learner(
        self,
        algorithm: Algorithm[Any] | None = None,
        *,
        dtype: str = "float32",
        comm: Communicator | None = None,
        optimizer: Optimizer | None = None,
    ) -> Learner:
        """Create a learner, with the given algorithm by default. Collective."""
        learner = Learner(
            starting_point(dtype),
            optimizer or self.optimizer,
            algorithm or self.algorithm,
            comm or self.comm,
        )
        learner.consistency.compares = False  # the checks compare, and report more
        learner.consistency.marks = False  # some checks give all ranks the same samples
        return learner

    def run(self, data: Data | None = None, *, announced: bool = True) -> Run:
        """Run the given algorithm in float32. Collective."""
        return trained(self.learner(), self.data() if data is None else data, announced=announced)

    def exact_run(self, data: Data | None = None, **options: Any) -> Run:
        """Run the algorithm in full precision. Collective."""
        learner = self.learner(self.exact, dtype=self.dtype, **options)
        return trained(learner, self.data() if data is None else data)


@dataclass
class Run:
    """The record of a run on this rank. Each list has one item a step.

    Attributes:
        models: the rank's own parameters, [n] each.
        shared: the common model of all ranks according to the algorithm, [n] each: see
            `shared_model`.
        totals: the results of `step`.
        clocks: `learner.samples`.
        bytes_sent: `learner.bytes_sent`.
        final: the parameters after `finish`, [n].
    """

    models: list[Array] = field(default_factory=list)
    shared: list[Array] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    final: Array = field(default_factory=lambda: np.zeros(0))

    def record(self, learner: Learner, total: int) -> None:
        """Record a step. Collective without a common model."""
        self.models.append(learner.parameters.flat.copy())
        self.shared.append(shared_model(learner))
        self.totals.append(total)
        self.clocks.append(learner.samples)
        self.bytes_sent.append(learner.bytes_sent)

    def finish(self, learner: Learner) -> Run:
        learner.finish()
        self.final = learner.parameters.flat.copy()
        return self


def step_with(learner: Learner, gradients: Sequence[Array] | None, total: int) -> None:
    """Take a step with given gradients of all ranks. Collective.

    Args:
        gradients: [n] each, by rank, as sums over the samples; None: zeros.
        total: number of samples, divided among the ranks.
    """
    rank, size = learner.comm.rank, learner.comm.size
    own, gradient = total, 0.0 if gradients is None else np.sum(gradients, axis=0)
    if learner.distributed:
        own = total // size + (rank < total % size)
        gradient = 0.0 if gradients is None else gradients[rank]
    learner.announce(own, total)
    learner.gradient.flat[...] = gradient
    learner.step(samples=own)


def shared_model(learner: Learner) -> Array:
    """Return a copy of the ranks' common model, [n]; without one, the mean of all ranks' models.
    Collective without a common model, else local."""
    if learner.algorithm.has_common_model:
        with learner.shared_model():
            common: Array = learner.parameters.flat.copy()
            return common
    models = learner.comm.allgather_object(learner.parameters.flat)
    mean: Array = np.mean(models, axis=0, dtype=float).astype(models[0].dtype)
    return mean


def starting_point(dtype: str) -> Parameters:
    """Return the parameters at the start of a run: values from -1 to 1, in three tensors."""
    parameters = Parameters({name: np.zeros(shape, dtype) for name, shape in LAYOUT.items()})
    parameters.flat[...] = np.linspace(-1, 1, VALUES)
    return parameters


def put_gradient(learner: Learner, samples: Array) -> None:
    """Write the gradient of samples [m, 2, n] at the learner's parameters to its gradient."""
    x = learner.parameters.flat
    stiffness, centres = samples.astype(x.dtype).swapaxes(0, 1)
    learner.gradient.flat[...] = (stiffness * (x - centres)).sum(axis=0)


def step(learner: Learner, parts: Sequence[Array], *, announced: bool = True) -> int:
    """Train on a minibatch: on this rank's part, or during a warm start on the whole minibatch.

    Args:
        parts: the samples [m, 2, n] of each rank.
        announced: announce the counts to the learner first, as a source does.
    """
    local = parts[learner.comm.rank] if learner.distributed else np.concatenate(parts)
    if announced:
        learner.announce(len(local), sum(len(part) for part in parts))
    put_gradient(learner, local)
    return learner.step(samples=len(local))


def trained(learner: Learner, data: Data, *, announced: bool = True, first: int = 0) -> Run:
    """Train from minibatch `first` to the end, and finish. Collective."""
    run = Run()
    for parts in data[first:]:
        run.record(learner, step(learner, parts, announced=announced))
    return run.finish(learner)


def difference(what: str, actual: Array, expected: Array, rounding: float = 0.0) -> str | None:
    """Describe the largest difference of two vectors, or return None if they are equal.

    Args:
        rounding: largest allowed difference, relative to the largest magnitude, but at least to 1.
            0: equal bits.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        right = f"{expected.dtype}{list(expected.shape)}"
        return f"{what}: {actual.dtype}{list(actual.shape)}, not {right}"
    if actual.tobytes() == expected.tobytes():
        return None
    gaps = np.abs(actual.astype(float) - expected.astype(float))
    worst = int(np.nan_to_num(gaps, nan=np.inf).argmax())
    bound = rounding * max(1.0, float(np.abs(expected).max()))
    if rounding and gaps[worst] <= bound:
        return None
    count = int((~(gaps <= bound)).sum()) if rounding else int((actual != expected).sum())
    return (
        f"{what}: {count} of {actual.size} values differ, value {worst} by {gaps[worst]:.3g}: "
        f"{actual[worst]:.9g}, not {expected[worst]:.9g}"
    )


def first_of(problems: Iterable[str | None]) -> str | None:
    """Return the first problem of several checks.

    All checks are done first: other ranks would wait for a rank that leaves early.
    """
    return next(filter(None, problems), None)


def first_difference(actual: Run, expected: Run, first: int = 0) -> str | None:
    """Describe the first difference of two runs on this rank, which must have equal bits.

    Args:
        first: the first step of `actual` within `expected`.
    """
    for t, (vector, reference) in enumerate(
        zip(actual.models, expected.models[first:], strict=True), first
    ):
        if problem := difference(f"step {t}, the model", vector, reference):
            return problem
    for t, (vector, reference) in enumerate(
        zip(actual.shared, expected.shared[first:], strict=True), first
    ):
        if problem := difference(f"step {t}, the shared model", vector, reference):
            return problem
    for name in ("totals", "clocks"):
        numbers, right = getattr(actual, name), getattr(expected, name)[first:]
        if numbers != right:
            return f"{name} of the steps from {first} on: {numbers}, not {right}"
    return difference("after finish, the model", actual.final, expected.final)


def differs_between_ranks(
    comm: Communicator, what: Sequence[str], vectors: Sequence[Array]
) -> str | None:
    """Describe the first vector without equal bits on all ranks, or return None. Collective.

    Args:
        what: the names of the vectors.
    """
    digests = [hashlib.sha256(vector.tobytes()).digest() for vector in vectors]
    gathered = comm.allgather_object(digests)
    for i, name in enumerate(what):
        if len({remote[i] for remote in gathered}) > 1:
            first = comm.allgather_object(vectors[i])[0]
            return difference(f"{name}, compared with rank 0's", vectors[i], first)
    return None


def miscounted(run: Run, data: Data, begin: int = 0) -> str | None:
    """Describe a wrong count of samples, or return None.

    Args:
        begin: the clock before the run.
    """
    totals = [sum(len(part) for part in parts) for parts in data]
    clocks = (begin + np.cumsum(totals)).tolist()
    if run.totals != totals:
        return f"step returned {run.totals} samples of all ranks, which had {totals}"
    if run.clocks != clocks:
        return f"learner.samples after every step was {run.clocks}, not {clocks}"
    return None
