"""Who takes part: the algorithms, on how many ranks, and what is tuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel_sgd import (
    Algorithm,
    BlockMomentumSGD,
    CNTKBlockMomentumSGD,
    DataParallelSGD,
    DiLoCo,
    ModelAveragingSGD,
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

from ..contender import Contender, Options

SYNCHRONOUS, GROWING, COMPRESSED, OTHERS = (4, 8), (8, 16, 32, 64), (8, 16, 32), (8, 32)
"""Ranks of the algorithms that exchange every gradient; of model averaging and block momentum; of
blocks of 1 bit and less in an entropy code; of the other local updates."""

SMALLER = (0.5, 0.8)
"""Block momenta beside the paper's 1 - 1/K, among which the tuned one is chosen."""


@dataclass(frozen=True)
class Entrant(Contender):
    """
    Attributes:
        ranks: on how many it is tried.
        optimizer: of the local steps.
        tuned: options of which the best is chosen, together with the learning rate; none: not
            tuned.
        as_serial: whether it is also tried with the rate that was tuned for serial SGD.
        compressed_from: the contender with 32 bits whose tuned rate and options it also
            has.
        peer: the contender that it is compared with, beside serial SGD.
    """

    local: bool = True
    ranks: tuple[int, ...] = ()
    optimizer: str = "SGD"
    tuned: tuple[Options, ...] = ((),)
    as_serial: bool = True
    compressed_from: str | None = None
    peer: str | None = None

    @property
    def rates(self) -> str:
        """Where its best ones come from: see `tuning.Setting`."""
        return "tuned" if self.tuned else "as 32 bits"


ONE_BIT: Options = (("gradient_bits", 1), ("code", "sign"))
WITHOUT: Options = (*ONE_BIT, ("error_feedback", False))
CLASSICAL: Options = (("use_nesterov_momentum", False),)
MOMENTA: tuple[Options, ...] = ((), *((("block_momentum", m),) for m in SMALLER))

CONTENDERS = {
    "serial": Entrant("serial SGD", DataParallelSGD, ranks=(1,), local=False),
    "serial Adam": Entrant(
        "serial Adam",
        DataParallelSGD,
        ranks=(1,),
        optimizer="Adam",
        local=False,
        as_serial=False,
    ),
    "32 bits": Entrant("data-parallel, 32 bits", DataParallelSGD, ranks=SYNCHRONOUS, local=False),
    "1 bit": Entrant(
        "data-parallel, 1 bit, sign",
        DataParallelSGD,
        ONE_BIT,
        ranks=SYNCHRONOUS,
        local=False,
        compressed_from="32 bits",
        peer="32 bits",
    ),
    "1 bit without": Entrant(
        "1 bit without error feedback",
        DataParallelSGD,
        WITHOUT,
        ranks=SYNCHRONOUS,
        local=False,
        compressed_from="32 bits",
        peer="32 bits",
    ),
    "averaging": Entrant("model averaging", ModelAveragingSGD, ranks=GROWING),
    "averaging 1 bit": Entrant(
        "model averaging, 1 bit, sign",
        ModelAveragingSGD,
        ONE_BIT,
        ranks=OTHERS,
        tuned=(),
        compressed_from="averaging",
        peer="averaging",
    ),
    "BMUF": Entrant(
        "block momentum", BlockMomentumSGD, ranks=GROWING, tuned=MOMENTA, peer="averaging"
    ),
    "BMUF 4 bits": Entrant(
        "block momentum, 4 bits",
        BlockMomentumSGD,
        (("gradient_bits", 4),),
        ranks=OTHERS,
        tuned=(),
        compressed_from="BMUF",
        peer="BMUF",
    ),
    "BMUF 2 bits": Entrant(
        "block momentum, 2 bits",
        BlockMomentumSGD,
        (("gradient_bits", 2),),
        ranks=OTHERS,
        tuned=(),
        compressed_from="BMUF",
        peer="BMUF",
    ),
    "BMUF 1 bit": Entrant(
        "block momentum, 1 bit, sign",
        BlockMomentumSGD,
        ONE_BIT,
        ranks=OTHERS,
        tuned=MOMENTA,
        compressed_from="BMUF",
        peer="BMUF",
    ),
    **{
        f"BMUF entropy {bits:g}": Entrant(
            f"block momentum, {bits:g} bit, entropy code",
            BlockMomentumSGD,
            (("gradient_bits", bits),),
            ranks=COMPRESSED,
            tuned=MOMENTA,
            compressed_from="BMUF",
            peer="BMUF",
        )
        for bits in (1, 0.25)
    },
    **{
        f"{name} entropy {bits:g}": Entrant(
            f"{title}, {bits:g} bit, entropy code",
            make,
            (("gradient_bits", bits),),
            ranks=OTHERS,
            optimizer=optimizer,
            compressed_from=name,
            peer=name,
        )
        for name, title, make, optimizer in (
            ("averaging", "model averaging", ModelAveragingSGD, "SGD"),
            ("SlowMo", "SlowMo", SlowMo, "SGD"),
            ("DiLoCo", "DiLoCo (Adam)", DiLoCo, "Adam"),
        )
        for bits in (1, 0.25)
    },
    "classical": Entrant(
        "classical block momentum",
        BlockMomentumSGD,
        CLASSICAL,
        ranks=OTHERS,
        tuned=MOMENTA,
        peer="BMUF",
    ),
    "CNTK": Entrant("CNTK's block momentum", CNTKBlockMomentumSGD, ranks=OTHERS, peer="BMUF"),
    "SlowMo": Entrant("SlowMo", SlowMo, ranks=OTHERS, peer="averaging"),
    "DiLoCo": Entrant(
        "DiLoCo (Adam)",
        DiLoCo,
        ranks=OTHERS,
        optimizer="Adam",
        as_serial=False,
        peer="serial Adam",
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
