"""What must hold of PowerSGD: see `invariants`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from cases import GATHERS, gradient_of, samples_of
from invariants import same_on_all_ranks

import parallel_sgd as psgd
from parallel_sgd import Communicator, Learner, PowerSGD

Array = np.ndarray

LAYOUT = {"b": (12,), "conv": (12, 3, 5), "W": (30, 20), "small": (2, 2)}
MATRICES = {"conv": (12, 15), "W": (30, 20)}  #: of rank 2 and 1 they are smaller
VALUES = 12 + 180 + 600 + 4
SCALES = (1.0, 1e-25, 1e25)  #: of float32, whose squares would vanish or overflow
SCALES64 = (1.0, 1e-160, 1e160)


def learner_of(
    comm: Communicator, rank: int, dtype: Any = np.float32, layout: Any = LAYOUT, **options: Any
) -> Learner:
    parameters = psgd.Parameters({name: np.zeros(shape, dtype) for name, shape in layout.items()})
    return Learner(parameters, GATHERS, PowerSGD(rank=rank, **options), comm)


def own_gradient(rank: int, step: int, dtype: Any = np.float64) -> Array:
    """Zeros where a rank has no samples."""
    return gradient_of(rank, step, VALUES, dtype) * (samples_of(rank, step) > 0)


def train(learner: Learner, step: int, scale: float = 1.0) -> None:
    k = learner.comm.rank
    learner.gradient.flat[:] = own_gradient(k, step, learner.parameters.dtype) * scale
    learner.step(samples=samples_of(k, step))


def gram_schmidt(p: Array) -> Array:
    """Of columns."""
    p = p.copy()
    for i in range(p.shape[1]):
        p[:, i] /= np.linalg.norm(p[:, i])
        p[:, i + 1 :] -= np.outer(p[:, i], p[:, i] @ p[:, i + 1 :])
    return p


class Paper:
    """Algorithms 1 and 2 for all ranks in one place: means, and errors beside the mean."""

    def __init__(self, q: dict[str, Array], ranks: int) -> None:
        self.q = q
        self.errors = psgd.Parameters({n: np.zeros((ranks, *s)) for n, s in LAYOUT.items()})

    def step(self, gradients: list[psgd.Parameters]) -> dict[str, Array]:
        means = {}
        for name, shape in LAYOUT.items():
            deltas = self.errors[name] + [gradient[name] for gradient in gradients]
            if name in MATRICES:
                matrices = [delta.reshape(MATRICES[name]) for delta in deltas]
                p = gram_schmidt(np.mean([m @ self.q[name] for m in matrices], axis=0))
                self.q[name] = np.mean([m.T @ p for m in matrices], axis=0)
                means[name] = (p @ self.q[name].T).reshape(shape)
            else:
                means[name] = deltas.mean(axis=0)
            self.errors[name] = deltas - means[name]
        return means


def equals_the_paper(comm: Communicator, steps: int = 9) -> None:
    """Every update is the paper's, and so is the sum of the ranks' errors; uneven samples."""
    learner = learner_of(comm, 2, np.float64)
    paper = Paper({n: q.T.copy() for n, q in learner.state.q_sum.items()}, comm.size)
    applied = np.zeros(VALUES)
    for step in range(steps):
        if any(samples_of(k, step) for k in range(comm.size)):
            gradients = [learner.parameters.like() for _ in range(comm.size)]
            for k, gradient in enumerate(gradients):
                gradient.flat = own_gradient(k, step)
            means = paper.step(gradients)
            applied += comm.size * np.concatenate([mean.ravel() for mean in means.values()])
        train(learner, step)
        np.testing.assert_allclose(-learner.parameters.flat, applied, atol=1e-10)
    errors = np.concatenate([error.sum(axis=0).ravel() for error in paper.errors.values()])
    np.testing.assert_allclose(np.sum(all_errors(comm, learner), axis=0), errors, atol=1e-10)


def all_errors(comm: Communicator, learner: Learner) -> list[Array]:
    return comm.allgather_object(learner.state.error.astype(float))


def loses_nothing(comm: Communicator, learner: Learner, inputs: Array) -> None:
    """What was applied and what the ranks still hold are all gradients, to rounding."""
    applied, errors = -learner.parameters.flat.astype(float), all_errors(comm, learner)
    assert np.isfinite(applied).all() and np.isfinite(errors).all()
    bound = 1e-4 * max(np.abs(inputs).max(), np.abs(errors).max())
    assert np.abs(applied + np.sum(errors, axis=0) - inputs).max() <= bound


def conserves(comm: Communicator, rank: int, scale: float, steps: int = 20) -> None:
    """Nothing is lost in any step, whatever the size of gradients, and ranks hold the same bits."""
    learner, inputs = learner_of(comm, rank), np.zeros(VALUES)
    learner.step(samples=1)  # of zeros: then P is zero, too
    assert not learner.parameters.flat.any()
    for step in range(steps):
        train(learner, step, scale)
        inputs += sum(own_gradient(k, step, np.float32) for k in range(comm.size)) * scale
        loses_nothing(comm, learner, inputs)
        same_on_all_ranks(comm, learner.parameters.flat, learner.state.q)
    compressed = learner.state.errors
    assert all(compressed[name].any() == (name in MATRICES) for name in LAYOUT)


def is_exact_at_low_rank(comm: Communicator, rank: int, scale: float) -> None:
    """Gradients of ranks that have two columns in common are applied as they are, at once."""
    learner = learner_of(comm, rank, np.float64, {"W": (30, 20)})
    random = np.random.default_rng(3)
    u, expected = random.standard_normal((30, 2)), np.zeros((30, 20))
    for _ in range(6):
        rows = random.standard_normal((comm.size, 2, 20)) * scale
        learner.gradient["W"] = u @ rows[comm.rank]
        learner.step(samples=1)
        expected += u @ rows.sum(axis=0)
        difference = np.abs(expected + learner.parameters["W"]).max()
        assert difference <= 1e-10 * np.abs(expected).max()


def finds_all(comm: Communicator, steps: int = 60) -> None:
    """All of one gradient is applied in time, also of one that Q says nothing of.

    Of the unit matrix every P spans an invariant subspace: what is left, times Q, is zero.
    """
    learner = learner_of(comm, 4, layout={"W": (60, 40)})
    unit = np.zeros((60, 40), np.float32)
    unit[20:] = np.eye(40)  # the first rows never have a gradient
    for step in range(steps):
        learner.gradient["W"] = unit * (step == 1 and comm.rank == comm.size - 1)
        learner.step(samples=1)
    np.testing.assert_allclose(-learner.parameters["W"], unit, atol=1e-5)


def replaces_anew(comm: Communicator) -> None:
    """Columns without a gradient are orthonormal, and others in every step and for every matrix:
    with the same ones, what is orthogonal to them would not be seen."""
    learner, columns = learner_of(comm, 2, layout={"V": (30, 20), "W": (30, 20)}), []
    first = learner.state.q_sum
    assert not np.allclose(first["V"], first["W"])
    for _ in range(2):
        learner.step(samples=1)  # of zeros
        same_on_all_ranks(comm, learner.state.p_sum.flat)
        for p in learner.state.p_sum.values():
            np.testing.assert_allclose(p @ p.T, np.eye(2), atol=1e-6)
            columns += [p.copy()]
    products = np.concatenate(columns) @ np.concatenate(columns).T
    assert np.abs(products - np.eye(8)).max() < 0.9


def keeps_errors_small(comm: Communicator, steps: int = 150) -> None:
    """What differs between ranks in every step, and cancels in their sum, does not add up."""
    learner = learner_of(comm, 4, layout={"W": (30, 20)})
    random = np.random.default_rng(6)
    apart = 10 * random.standard_normal((comm.size, 30, 20))
    apart -= apart.mean(axis=0)
    for _ in range(steps):
        noise = random.standard_normal((comm.size, 30, 20))
        learner.gradient["W"] = apart[comm.rank] + noise[comm.rank]
        learner.step(samples=1)
    assert np.abs(learner.state.error).max() <= steps * 10 / 3


def goes_on_with_other_ranks(old: int, new: int, folder: Path) -> None:
    """Taken up by another number of ranks, what the ranks have not sent is still sent or held."""

    def save(comm: Communicator) -> None:
        learner = learner_of(comm, 2)
        for step in range(4):
            train(learner, step)
        psgd.Checkpoints(folder).save(learner, background=False)

    def load(comm: Communicator) -> None:
        learner = learner_of(comm, 2)
        psgd.load_checkpoint(learner, folder)
        inputs = sum(own_gradient(k, step) for step in range(4) for k in range(old))
        loses_nothing(comm, learner, inputs)
        for step in range(5, 8):
            train(learner, step)
            inputs = inputs + sum(own_gradient(k, step) for k in range(new))
        loses_nothing(comm, learner, inputs)

    psgd.simulate(old, save)
    psgd.simulate(new, load)
