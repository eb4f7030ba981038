"""Update rules, and the grids of their rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from parallel_sgd import SGD, Adam, MomentumSGD, Optimizer
from parallel_sgd.schedules import Schedule


@dataclass(frozen=True)
class Rule:
    """
    Attributes:
        make: the optimizer, from the schedule of its rate.
        rates: the grid, by factors of 2.
        start: the rate at which the search begins.
        torch_name, torch_options: PyTorch's equal optimizer.
    """

    make: Callable[[Schedule], Optimizer]
    rates: tuple[float, ...]
    start: float
    torch_name: str
    torch_options: Mapping[str, float] = field(default_factory=dict)


ADAM_RATES = tuple(0.00075 * 2**i for i in range(-4, 9))  # to 0.192
DECAY = {"weight_decay": 0.01}

OPTIMIZERS = {
    "SGD": Rule(
        lambda lr: SGD(lr=lr),
        tuple(0.0125 * 2**i for i in range(11)),  # to 12.8
        0.4,
        "SGD",
    ),
    "momentum": Rule(
        lambda lr: MomentumSGD(lr=lr, momentum=0.9),
        tuple(0.0015625 * 2**i for i in range(12)),  # to 3.2
        0.4,
        "SGD",
        {"momentum": 0.9},
    ),
    "Adam": Rule(lambda lr: Adam(lr=lr), ADAM_RATES, 0.003, "Adam"),
    "AdamW": Rule(lambda lr: Adam(lr=lr, **DECAY), ADAM_RATES, 0.003, "AdamW", DECAY),
}
