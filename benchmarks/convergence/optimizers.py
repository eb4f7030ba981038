"""What makes steps of gradients, and the grids on which its rates are looked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallel_sgd import SGD, Adam, MomentumSGD, Optimizer
from parallel_sgd.schedules import Schedule


@dataclass(frozen=True)
class Rule:
    """
    Attributes:
        make: the optimizer, from the schedule of its rate.
        rates: the grid, by factors of 2.
        start: the rate of it at which the search begins.
    """

    make: Callable[[Schedule], Optimizer]
    rates: tuple[float, ...]
    start: float


OPTIMIZERS = {
    "SGD": Rule(
        lambda lr: SGD(lr=lr),
        tuple(0.0125 * 2**i for i in range(11)),  # to 12.8
        0.4,
    ),
    "momentum": Rule(
        lambda lr: MomentumSGD(lr=lr, momentum=0.9),
        tuple(0.0015625 * 2**i for i in range(12)),  # to 3.2
        0.4,
    ),
    "Adam": Rule(
        lambda lr: Adam(lr=lr),
        tuple(0.00075 * 2**i for i in range(-4, 9)),  # to 0.192
        0.003,
    ),
}
