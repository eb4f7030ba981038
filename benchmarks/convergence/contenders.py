"""Who takes part: the algorithms, on how many ranks, and what is tuned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parallel_sgd import (
    SGD,
    Adam,
    Algorithm,
    BlockMomentumSGD,
    CNTKBlockMomentumSGD,
    DataParallelSGD,
    DiLoCo,
    ModelAveragingSGD,
    Optimizer,
    SlowMo,
)
from parallel_sgd.algorithms import LocalUpdates
from parallel_sgd.algorithms.outer import (
    Block,
    BlockMomentum,
    CNTKBlockMomentum,
    OuterNesterov,
    SlowMomentum,
)
from parallel_sgd.schedules import Schedule

Options = tuple[tuple[str, Any], ...]  #: an algorithm's options by name, as a value

SYNCHRONOUS, GROWING, OTHERS = (4, 8), (8, 16, 32, 64), (8, 32)
"""Ranks of the algorithms that exchange every gradient; of model averaging and block momentum; of
the other local updates."""

SMALLER = (0.5, 0.8)
"""Block momenta beside the paper's 1 - 1/K, among which the tuned one is chosen."""


@dataclass(frozen=True)
class Contender:
    """
    Attributes:
        title: for people.
        make: the algorithm, from its options.
        ranks: on how many it is tried.
        options: that it always has.
        adam: whether the local steps are Adam's; else plain SGD's.
        local: whether ranks train alone for a block.
        tuned: options of which the best is chosen, together with the learning rate; none: not
            tuned.
        as_serial: whether it is also tried with the rate that was tuned for serial SGD.
        compressed_from: the contender with 32 bits whose tuned rate and options it also
            has.
        peer: the contender that it is compared with, beside serial SGD.
    """

    title: str
    make: Callable[..., Algorithm[Any]]
    ranks: tuple[int, ...]
    options: Options = ()
    adam: bool = False
    local: bool = True
    tuned: tuple[Options, ...] = ((),)
    as_serial: bool = True
    compressed_from: str | None = None
    peer: str | None = None

    @property
    def rates(self) -> str:
        """Where its best ones come from: see `study.Setting`."""
        return "tuned" if self.tuned else "as 32 bits"

    def algorithm(self, options: Options, block: int) -> Algorithm[Any]:
        """With blocks of so many minibatches, where it has blocks."""
        blocks = {"sync_steps": block} if self.local else {}
        return self.make(**blocks, **dict(self.options), **dict(options))

    def optimizer(self, lr: Schedule) -> Optimizer:
        return Adam(lr=lr) if self.adam else SGD(lr=lr)


ONE_BIT: Options = (("gradient_bits", 1),)
WITHOUT: Options = (*ONE_BIT, ("error_feedback", False))
CLASSICAL: Options = (("use_nesterov_momentum", False),)
MOMENTA: tuple[Options, ...] = ((), *((("block_momentum", m),) for m in SMALLER))

CONTENDERS = {
    "serial": Contender("serial SGD", DataParallelSGD, (1,), local=False),
    "serial Adam": Contender(
        "serial Adam", DataParallelSGD, (1,), adam=True, local=False, as_serial=False
    ),
    "32 bits": Contender("data-parallel, 32 bits", DataParallelSGD, SYNCHRONOUS, local=False),
    "1 bit": Contender(
        "data-parallel, 1 bit",
        DataParallelSGD,
        SYNCHRONOUS,
        ONE_BIT,
        local=False,
        compressed_from="32 bits",
        peer="32 bits",
    ),
    "1 bit without": Contender(
        "1 bit without error feedback",
        DataParallelSGD,
        SYNCHRONOUS,
        WITHOUT,
        local=False,
        compressed_from="32 bits",
        peer="32 bits",
    ),
    "averaging": Contender("model averaging", ModelAveragingSGD, GROWING),
    "averaging 1 bit": Contender(
        "model averaging, 1 bit",
        ModelAveragingSGD,
        OTHERS,
        ONE_BIT,
        tuned=(),
        compressed_from="averaging",
        peer="averaging",
    ),
    "BMUF": Contender("block momentum", BlockMomentumSGD, GROWING, tuned=MOMENTA, peer="averaging"),
    "BMUF 4 bits": Contender(
        "block momentum, 4 bits",
        BlockMomentumSGD,
        OTHERS,
        (("gradient_bits", 4),),
        tuned=(),
        compressed_from="BMUF",
        peer="BMUF",
    ),
    "BMUF 2 bits": Contender(
        "block momentum, 2 bits",
        BlockMomentumSGD,
        OTHERS,
        (("gradient_bits", 2),),
        tuned=(),
        compressed_from="BMUF",
        peer="BMUF",
    ),
    "BMUF 1 bit": Contender(
        "block momentum, 1 bit",
        BlockMomentumSGD,
        OTHERS,
        ONE_BIT,
        tuned=MOMENTA,
        compressed_from="BMUF",
        peer="BMUF",
    ),
    "classical": Contender(
        "classical block momentum",
        BlockMomentumSGD,
        OTHERS,
        CLASSICAL,
        tuned=MOMENTA,
        peer="BMUF",
    ),
    "CNTK": Contender("CNTK's block momentum", CNTKBlockMomentumSGD, OTHERS, peer="BMUF"),
    "SlowMo": Contender("SlowMo", SlowMo, OTHERS, peer="averaging"),
    "DiLoCo": Contender(
        "DiLoCo (Adam)", DiLoCo, OTHERS, adam=True, as_serial=False, peer="serial Adam"
    ),
}


def gain(algorithm: Algorithm[Any], ranks: int) -> float:
    """How far a constant pseudo-gradient moves the model a block, once momentum is up to speed."""
    if not isinstance(algorithm, LocalUpdates):
        return 1.0
    match outer := algorithm.outer:
        case CNTKBlockMomentum():
            nesterov = _momentum(outer, ranks) * outer.use_nesterov_momentum
            return (1 + nesterov) * outer.block_learning_rate * ranks
        case BlockMomentum():
            return outer.block_learning_rate / (1 - _momentum(outer, ranks))
        case SlowMomentum():
            return outer.slow_learning_rate / (1 - outer.slow_momentum)
        case OuterNesterov():
            return outer.outer_learning_rate / (1 - outer.outer_momentum)
    return 1.0


def _momentum(outer: BlockMomentum, ranks: int) -> float:
    return outer.momentum_after(Block(samples=0, length=0, lr=0, ranks=ranks))
