"""Data-parallel SGD with gradients of low rank: PowerSGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from ..exchange import ExchangeOptions, TransportOptions
from ..kernels import array_module, body
from ..options import Whole, group, option, options
from ..parameters import Parameters
from ..state import across, workspace
from .algorithm import Algorithm, Array, Minibatch, Work
from .data_parallel import WARM_START
from .exchange_state import ExchangeState

HostArray = npt.NDArray[Any]

DEPENDENT = 16
"""A unit column depends on the others if no more than this remains of it, in units of rounding."""


@dataclass(kw_only=True)
class PowerSGDState:
    """The state of PowerSGD.

    Attributes:
        error: [n], the compression error of this rank's gradients; zero for uncompressed
            parameters.
        q: the Q of all matrices, the start of the next step; None without matrices.
        p_exchange: of the P of all matrices, and of the gradients of uncompressed parameters.
        q_exchange: of `q`.
        errors: `error` by parameter.
        p_sum: the vector summed by `p_exchange`: [rank, a] for a matrix, else the gradient.
        q_sum: `q` by matrix, [rank, b].
    """

    error: Array = across("sum")
    q: Array | None = across("same")
    p_exchange: ExchangeState
    q_exchange: ExchangeState | None
    errors: Parameters = workspace()
    p_sum: Parameters = workspace()
    q_sum: Mapping[str, Array] = workspace()


@options
class PowerSGD(Algorithm[PowerSGDState]):
    """Each minibatch: sum the gradients of all ranks as matrices of low rank, with error feedback.

    With M_k = g_k + e_k as an [a, b] matrix, the first axis of a parameter by the rest:

        P = orthonormalize(sum_k M_k Q)       Q = sum_k M_k^T P       g = P Q^T
        e_k = M_k - P (M_k^T P)^T             x = optimizer(x, g / sum_k n_k)

    The next step begins with this Q, its columns scaled. The first step begins with a random Q. A
    parameter with (a + b) * rank >= a * b, such as a vector, travels uncompressed and loses
    nothing. If this holds for all parameters, PowerSGD is `DataParallelSGD` in full precision.

    All ranks hold bit-equal parameters after every step. The applied gradients and the ranks' e_k
    add up to all gradients, to rounding. A column of P that depends on the columns before it is
    replaced by a random column, so that P stays orthonormal. This happens for example if all
    gradients are zero.

    A step takes two sums over the ranks, in the parameters' precision: all P with the uncompressed
    gradients, and all Q. With rank r and m uncompressed values, a rank sends 2·(K-1)/K·(r·Σ(a + b)
    + m) values. A step takes 4·r multiplications a value, and about 8 passes over the gradient.
    Extra memory: a value per parameter, and twice the values sent.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", NeurIPS 2019, algorithms 1 and 2; any local optimizer takes the place
    of the paper's momentum. The paper has e_k = M_k - P Q^T / K. The sum over the ranks, and so
    every g, is the same. But in the paper's e_k, differences between ranks that cancel in the sum
    remain for ever, and grow with every step if the ranks have different data. Our e_k loses these
    differences as soon as P spans them. P is orthonormalized in float64, twice, and Q's columns are
    scaled to a largest magnitude of 1, so that gradients of any size neither overflow nor vanish.
    """

    rank: int = option(
        4,
        Whole(1),
        "columns of P and Q: the rank of each matrix's compressed gradient. In the paper, 4 was "
        "as good as SGD on convolutional and recurrent networks; 2 was enough for the "
        "convolutional networks",
    )
    route: TransportOptions = group(TransportOptions)
    distributed_after: int = option(0, Whole(), WARM_START)

    def init(self, work: Work) -> PowerSGDState:
        x, shapes = work.parameters, {}
        for name, shape in x.shapes.items():
            rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
            if (rows + columns) * self.rank < rows * columns:
                shapes[name] = rows, columns
        xp, errors = array_module(x.flat), x.like()
        p_sum = Parameters(
            {
                name: xp.zeros((self.rank, shapes[name][0]), x.dtype) if name in shapes else view
                for name, view in x.items()
            }
        )
        q_sum = None
        if shapes:
            first = {
                name: xp.asarray(random((self.rank, columns), number).astype(x.dtype))
                for number, (name, (_, columns)) in enumerate(shapes.items())
            }
            q_sum = Parameters(first)

        def exchange(layout: Parameters, name: str) -> ExchangeState:
            options = ExchangeOptions(route=self.route)
            clock, choices = (lambda: work.samples), work.choices
            return ExchangeState.init(options, layout, clock, work.comm, choices=choices, name=name)

        return PowerSGDState(
            error=errors.flat,
            q=None if q_sum is None else q_sum.flat,
            p_exchange=exchange(p_sum, "P"),
            q_exchange=None if q_sum is None else exchange(q_sum, "Q"),
            errors=errors,
            p_sum=p_sum,
            q_sum={} if q_sum is None else q_sum,
        )

    def first_calls(self, x: Array) -> list[Callable[[], object]]:
        product = body(x).low_rank_product
        return [lambda: product(x, x, x, self.rank, True), *super().first_calls(x)]

    def step(self, state: PowerSGDState, work: Work, minibatch: Minibatch) -> None:
        gradient, p, q, trace = work.gradient, state.p_sum, state.q_sum, work.comm.trace
        xp, kernels = array_module(gradient.flat), body(gradient.flat)
        with trace.span("encode"):
            for name, g in gradient.items():
                if name in q:
                    state.errors[name] += g  # M = g + e
                    xp.matmul(q[name], as_matrix(state.errors[name]).T, out=p[name])  # P = M Q
                else:
                    p[name] = g
        state.p_exchange.sum(p.flat)
        with trace.span("encode"):
            for number, name in enumerate(q):
                orthonormalize(p[name], work.samples, number)
                error = state.errors[name]
                xp.matmul(p[name], as_matrix(error), out=q[name])  # Q = M^T P
                # e = M - P Q^T
                kernels.low_rank_product(*map(flat, (p[name], q[name], error)), self.rank, True)
        if state.q_exchange is not None:
            state.q_exchange.sum(state.q)
        with trace.span("decode"):
            for name, g in gradient.items():
                if name in q:  # g = P Q^T
                    kernels.low_rank_product(*map(flat, (p[name], q[name], g)), self.rank, False)
                    scale(q[name])
                else:
                    g[...] = p[name]
        with trace.span("update"):
            work.optimizer(gradient.flat, minibatch.total)

    def replicas(self, state: PowerSGDState, work: Work) -> Mapping[str, Array]:
        own = {} if state.q is None else {"Q": state.q}
        return {**work.optimizer.state.buffers, **own}


def as_matrix(array: Array) -> Array:
    """Return a view as a matrix: the first axis by the rest."""
    return array.reshape(len(array), -1)


def flat(array: Array) -> Array:
    """Return a view with a single axis."""
    return array.reshape(-1)


def scale(q: Array) -> None:
    """Divide each nonzero row of q [rank, b] by its largest magnitude, in place."""
    xp = array_module(q)
    largest = xp.abs(q).max(axis=1, keepdims=True)
    q /= xp.where(largest > 0, largest, 1)


def orthonormalize(p: Array, *seed: int) -> None:
    """Make the rows of p [rank, a], rank < a, orthonormal in place.

    A row that depends on earlier rows is replaced by a random row.

    Gram-Schmidt, twice. Computed in NumPy, also for a GPU's array, and only by sums and products of
    single values: a library's decomposition rounds differently on different machines, and all ranks
    need the same bits.

    Args:
        p: changed.
        seed: of the random rows.
    """
    xp = array_module(p)
    rows = (p if xp is np else p.get()).astype(np.float64)
    smallest = DEPENDENT * float(np.finfo(p.dtype).eps)
    draws = count()
    for i, row in enumerate(rows):
        while not _made_orthonormal(row, rows[:i], smallest):
            row[...] = random(row.shape, *seed, next(draws))
    p[...] = xp.asarray(rows.astype(p.dtype))


def _made_orthonormal(row: HostArray, rows: HostArray, smallest: float) -> bool:
    """Orthonormalize a row [a] against rows [i, a], in place. Return False if dependent."""
    largest = float(np.abs(row).max())
    if not 0 < largest < math.inf:
        return False
    row /= largest  # the squares neither overflow nor vanish
    product = row * row
    row /= math.sqrt(float(product.sum()))
    for earlier in (*rows, *rows):
        np.multiply(earlier, row, out=product)
        np.multiply(earlier, product.sum(), out=product)
        row -= product
    left = math.sqrt(float(np.multiply(row, row, out=product).sum()))
    if left <= smallest:
        return False
    row /= left
    return True


def random(shape: tuple[int, ...], *seed: int) -> HostArray:
    """Return values between -1 and 1, with the same bits on every machine."""
    return np.random.default_rng(seed).uniform(-1, 1, shape)
