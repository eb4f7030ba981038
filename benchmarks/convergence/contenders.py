"""The contenders of both studies: algorithms, and ways to send a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from parallel_sgd import (
    DESLOC,
    Algorithm,
    BlockMomentumSGD,
    CNTKBlockMomentumSGD,
    DataParallelSGD,
    DiLoCo,
    ModelAveragingSGD,
    PowerSGD,
    SlowMo,
    SparseLoCo,
)

from ..panels import COLORS
from .top_k import TopK

Options = tuple[tuple[str, Any], ...]  #: an algorithm's options by name, as a value
Style = tuple[str, Any]  #: color; and dashes of a line, or the marker of points

BLOCK = 8  #: minibatches in a block of local updates
LONG_BLOCK = 32  #: minibatches in a block, in the study of long blocks


@dataclass(frozen=True)
class Contender:
    """An algorithm with options, and how it takes part.

    Attributes:
        title: for people.
        style: in figures.
        make: the algorithm, from its options.
        options: fixed ones.
        first: bits at the beginning, and for what part of all samples.
        ranks, optimizer: of the runs in cells that leave these to the contenders.
        rates: the origins of learning rate and options, of a run each, the best first: see
            `study.Line`.
        tuned: options of which the best is chosen, together with the learning rate.
        peer: the contender for a comparison, beside the cell's first.
    """

    title: str
    style: Style
    make: Callable[..., Algorithm[Any]]
    options: Options = ()
    first: tuple[float, float] | None = None
    ranks: tuple[int, ...] = ()
    optimizer: str = "SGD"
    rates: tuple[str, ...] = ("tuned",)
    tuned: tuple[Options, ...] = ((),)
    peer: str | None = None

    def algorithm(self, options: Options, samples: int = 0) -> Algorithm[Any]:
        """Make the algorithm with more options, for a run of so many samples."""
        every = dict(self.options) | dict(options)
        if self.first:
            bits, part = self.first
            every["gradient_bits"] = {0: bits, round(part * samples): every["gradient_bits"]}
        return self.make(**every)


SYNCHRONOUS, GROWING, COMPRESSED, FEW = (4, 8), (8, 16, 32, 64), (8, 16, 32), (8, 32)
"""Ranks of the algorithms that exchange every gradient; of model averaging and block momentum; of
blocks of 1 bit and less in an entropy code; of all local updates beside these."""

MOMENTA: tuple[Options, ...] = ((), *((("block_momentum", m),) for m in (0.5, 0.8)))
"""Block momenta among which the tuned one is chosen: the paper's 1 - 1/K, and two smaller ones."""

ONE_BIT: Options = (("gradient_bits", 1), ("code", "sign"))
BOTH, AS_WHOLE = ("tuned", "equal"), ("tuned", "as 32 bits")
UNCOMPRESSED: dict[str, Any] = {"ranks": SYNCHRONOUS, "rates": AS_WHOLE, "peer": "32 bits"}


def _local(
    title: str, color: str, dashes: Any, make: Any, options: Options = (), **how: Any
) -> Contender:
    options, how = (("sync_steps", BLOCK), *options), {"ranks": FEW, "rates": BOTH, **how}
    return Contender(title, (color, dashes), make, options, **how)


def _entropy(name: str, title: str, color: str, make: Any, **how: Any) -> dict[str, Contender]:
    """Return blocks with an entropy code, compared with the contender `name` in 32 bits."""
    return {
        f"{name} entropy {bits:g}": _local(
            f"{title}, {bits:g} bit, entropy code",
            *(color, dashes, make, (("gradient_bits", bits),)),
            **{"rates": AS_WHOLE, "peer": name, **how},
        )
        for bits, dashes in ((1, "-"), (0.25, "--"))
    }


ALGORITHMS = {
    "serial": Contender("serial SGD", (COLORS["reference"], "-"), DataParallelSGD, ranks=(1,)),
    "serial Adam": Contender(
        "serial Adam", (COLORS["reference"], ":"), DataParallelSGD, ranks=(1,), optimizer="Adam"
    ),
    "32 bits": Contender(
        "data-parallel, 32 bits",
        (COLORS["32 bit"], "-"),
        DataParallelSGD,
        ranks=SYNCHRONOUS,
        rates=BOTH,
    ),
    "1 bit": Contender(
        "data-parallel, 1 bit, sign",
        (COLORS["1 bit"], "--"),
        DataParallelSGD,
        ONE_BIT,
        **UNCOMPRESSED,
    ),
    "1 bit without": Contender(
        "1 bit without error feedback",
        (COLORS["no error feedback"], "-"),
        DataParallelSGD,
        (*ONE_BIT, ("error_feedback", False)),
        **UNCOMPRESSED,
    ),
    "averaging": _local(
        "model averaging", COLORS["model averaging"], "-", ModelAveragingSGD, ranks=GROWING
    ),
    "averaging 1 bit": _local(
        "model averaging, 1 bit, sign",
        *(COLORS["model averaging"], "--", ModelAveragingSGD, ONE_BIT),
        rates=("as 32 bits",),
        peer="averaging",
    ),
    "BMUF": _local(
        "block momentum",
        *(COLORS["block momentum"], "-", BlockMomentumSGD),
        ranks=GROWING,
        rates=("tuned", "equal", "gain 1"),
        tuned=MOMENTA,
        peer="averaging",
    ),
    **{
        f"BMUF {bits} bits": _local(
            f"block momentum, {bits} bits",
            *(COLORS["block momentum"], dashes, BlockMomentumSGD, (("gradient_bits", bits),)),
            rates=("as 32 bits",),
            peer="BMUF",
        )
        for bits, dashes in ((4, (0, (5, 1, 1, 1, 1, 1))), (2, "-."))
    },
    "BMUF 1 bit": _local(
        "block momentum, 1 bit, sign",
        *(COLORS["block momentum"], "--", BlockMomentumSGD, ONE_BIT),
        rates=AS_WHOLE,
        tuned=MOMENTA,
        peer="BMUF",
    ),
    **_entropy(
        *("BMUF", "block momentum", COLORS["block momentum"], BlockMomentumSGD),
        ranks=COMPRESSED,
        tuned=MOMENTA,
    ),
    **_entropy("averaging", "model averaging", COLORS["model averaging"], ModelAveragingSGD),
    **_entropy("SlowMo", "SlowMo", COLORS["SlowMo"], SlowMo),
    **_entropy("DiLoCo", "DiLoCo (Adam)", COLORS["DiLoCo"], DiLoCo, optimizer="Adam"),
    "classical": _local(
        "classical block momentum",
        *(COLORS["block momentum"], ":", BlockMomentumSGD, (("use_nesterov_momentum", False),)),
        tuned=MOMENTA,
        peer="BMUF",
    ),
    "CNTK": _local(
        "CNTK's block momentum",
        COLORS["block momentum"],
        (0, (1, 3)),
        CNTKBlockMomentumSGD,
        peer="BMUF",
    ),
    "SlowMo": _local("SlowMo", COLORS["SlowMo"], "-", SlowMo, peer="averaging"),
    "DiLoCo": _local(
        *("DiLoCo (Adam)", COLORS["DiLoCo"], "-", DiLoCo),
        optimizer="Adam",
        rates=("tuned",),
        peer="serial Adam",
    ),
}


def _sent(title: str, color: str, marker: str, bits: float, **options: Any) -> Contender:
    every = {"gradient_bits": bits, "transport": "collective", **options}
    return Contender(title, (color, marker), DataParallelSGD, tuple(every.items()))


def _power(rank: int) -> Contender:
    options = (("rank", rank), ("transport", "collective"))
    return Contender(f"PowerSGD, rank {rank}", (COLORS["PowerSGD"], "o"), PowerSGD, options)


GRADIENTS = {
    "32": _sent("32 bits", COLORS["32 bit"], "o", 32),
    "16": _sent("16 bits, float16", COLORS["16 bit"], "s", 16),
    "4": _sent("4 bits", COLORS["4 bit"], "s", 4),
    "4-entropy": _sent("4 bits, entropy code", COLORS["4 bit"], "o", 4, code="entropy"),
    "2": _sent("2 bits", COLORS["2 bit"], "o", 2),
    "1": _sent("1 bit", COLORS["1 bit"], "o", 1),
    "0.5": _sent("0.5 bit", COLORS["0.5 bit"], "o", 0.5),
    "0.25": _sent("0.25 bit", COLORS["0.25 bit"], "o", 0.25),
    "0.1": _sent("0.1 bit", COLORS["0.1 bit"], "o", 0.1),
    "sign": _sent("1 bit, sign", COLORS["1 bit"], "X", 1, code="sign"),
    "top-k": _sent("top 16 of 1024", COLORS["top-k"], "v", TopK.bits),
    "PowerSGD-1": _power(1),
    "PowerSGD-4": _power(4),
}
"""An entropy code from 2 bits down. On 4 ranks PowerSGD sends as many bytes as 1 bit of bytes-256
with rank 1, and as half a bit of bytes-1024 with rank 4."""

BEGINNINGS = {
    "4-then-1": replace(
        _sent("4 bits for 1/16, then 1 bit", COLORS["1 bit"], "^", 1), first=(4, 1 / 16)
    ),
    "1-then-0.25": replace(
        _sent("1 bit for 1/8, then 0.25 bit", COLORS["0.25 bit"], "^", 0.25), first=(1, 1 / 8)
    ),
}
"""More bits in the beginning, while gradients change most."""


def _long(title: str, method: str, make: Any, options: Options = (), *tuned: Options) -> Contender:
    """Return blocks of `LONG_BLOCK` minibatches with a kept inner state, and options to tune.

    Args:
        method: the name in the palette.
    """
    options = (("sync_steps", LONG_BLOCK), ("transport", "collective"), *options)
    return Contender(title, (COLORS[method], "o"), make, options, tuned=((), *tuned))


def _outer_rate(*rates: float) -> tuple[Options, ...]:
    return tuple((("outer_learning_rate", rate),) for rate in rates)


LONG_BLOCKS = {
    "long averaging": _long("model averaging", "model averaging", ModelAveragingSGD),
    "long BMUF": _long(
        "block momentum",
        "block momentum",
        BlockMomentumSGD,
        (("reset_sgd_momentum", False),),
        (("block_momentum", 0.5),),
    ),
    "long SlowMo": _long("SlowMo", "SlowMo", SlowMo, (), (("slow_momentum", 0.7),)),
    "long DiLoCo": _long("DiLoCo", "DiLoCo", DiLoCo, (), *_outer_rate(0.4)),
    "long DiLoCo 4": _long(
        "DiLoCo, 4 bits", "DiLoCo", DiLoCo, (("gradient_bits", 4),), *_outer_rate(0.4)
    ),
    "long Streaming": _long(
        "DiLoCo in 4 fragments",
        "DiLoCo",
        DiLoCo,
        # The exchange of a fragment runs beside 4 steps of 4 ranks with minibatches of 8.
        (("fragments", 4), ("overlap_samples", 128), ("merge_weight", 0.5)),
        *_outer_rate(0.4),
    ),
    "long SparseLoCo": _long(
        "SparseLoCo, a quarter of a bit", "SparseLoCo", SparseLoCo, (), *_outer_rate(0.7)
    ),
    "long top-k": _long(
        "SparseLoCo, top 64 of 4096",
        "SparseLoCo",
        SparseLoCo,
        (("gradient_bits", 0.22), ("code", "top-k"), ("block_size", 4096)),
        *_outer_rate(0.7),
    ),
    "long DES-LOC": _long("DES-LOC", "DES-LOC", DESLOC),
}
"""Today's local updates. SparseLoCo has a quarter of a bit in an entropy code by default."""

CONTENDERS = {**ALGORITHMS, **GRADIENTS, **BEGINNINGS, **LONG_BLOCKS}
_parts = (ALGORITHMS, GRADIENTS, BEGINNINGS, LONG_BLOCKS)
assert len(CONTENDERS) == sum(map(len, _parts))  # a run names one
