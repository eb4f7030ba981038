"""The contenders of both studies: algorithms, and ways to send a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from parallel_sgd import (
    Algorithm,
    BlockMomentumSGD,
    CNTKBlockMomentumSGD,
    DataParallelSGD,
    DiLoCo,
    ModelAveragingSGD,
    PowerSGD,
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
from parallel_sgd.compression import Codec, register, unregister

from .top_k import TopK

Options = tuple[tuple[str, Any], ...]  #: an algorithm's options by name, as a value


@dataclass(frozen=True)
class Contender:
    """An algorithm with options, and how it takes part.

    Attributes:
        title: for people.
        make: the algorithm, from its options.
        options: fixed ones.
        local: whether ranks train alone for a block.
        first: bits at the beginning, and for what part of all samples.
        codec: a codec of the benchmark, with its bits, registered while a run needs it.
        ranks, optimizer: of the runs among the algorithms.
        tuned: options of which the best is chosen, together with the learning rate; none: not
            tuned.
        as_serial: whether there is also a run with the rate that was tuned for serial SGD.
        compressed_from: the contender with 32 bits whose tuned rate and options are tried as well.
        peer: the contender for a comparison, beside serial SGD.
    """

    title: str
    make: Callable[..., Algorithm[Any]]
    options: Options = ()
    local: bool = False
    first: tuple[float, float] | None = None
    codec: tuple[float, type[Codec]] | None = None
    ranks: tuple[int, ...] = ()
    optimizer: str = "SGD"
    tuned: tuple[Options, ...] = ((),)
    as_serial: bool = True
    compressed_from: str | None = None
    peer: str | None = None

    def algorithm(self, options: Options, block: int, samples: int = 0) -> Algorithm[Any]:
        """Make the algorithm with blocks of `block` minibatches, for a run of `samples`."""
        every: dict[str, Any] = {"sync_steps": block} if self.local else {}
        every |= dict(self.options) | dict(options)
        if self.first:
            bits, part = self.first
            every["gradient_bits"] = {0: bits, round(part * samples): every["gradient_bits"]}
        return self.make(**every)

    @contextmanager
    def known(self) -> Iterator[None]:
        """Register the codec for a `with` block."""
        if self.codec is None:
            yield
            return
        bits, codec = self.codec
        register(bits)(codec)
        try:
            yield
        finally:
            unregister(codec)

    @property
    def rates(self) -> str:
        """The origin of the best rates: see `tuning.Setting`."""
        return "tuned" if self.tuned else "as 32 bits"


SYNCHRONOUS, GROWING, COMPRESSED, FEW = (4, 8), (8, 16, 32, 64), (8, 16, 32), (8, 32)
"""Ranks of the algorithms that exchange every gradient; of model averaging and block momentum; of
blocks of 1 bit and less in an entropy code; of all local updates beside these."""

MOMENTA: tuple[Options, ...] = ((), *((("block_momentum", m),) for m in (0.5, 0.8)))
"""Block momenta among which the tuned one is chosen: the paper's 1 - 1/K, and two smaller ones."""

ONE_BIT: Options = (("gradient_bits", 1), ("code", "sign"))

_local = partial(Contender, local=True, ranks=FEW)
_compared = partial(Contender, ranks=SYNCHRONOUS, compressed_from="32 bits", peer="32 bits")


def _bits(bits: float) -> Options:
    return (("gradient_bits", bits),)


def _blocks_of(whole: str, **how: Any) -> dict[str, Any]:
    return {"compressed_from": whole, "peer": whole, **how}


ALGORITHMS = {
    "serial": Contender("serial SGD", DataParallelSGD, ranks=(1,)),
    "serial Adam": Contender(
        "serial Adam", DataParallelSGD, ranks=(1,), optimizer="Adam", as_serial=False
    ),
    "32 bits": Contender("data-parallel, 32 bits", DataParallelSGD, ranks=SYNCHRONOUS),
    "1 bit": _compared("data-parallel, 1 bit, sign", DataParallelSGD, ONE_BIT),
    "1 bit without": _compared(
        "1 bit without error feedback", DataParallelSGD, (*ONE_BIT, ("error_feedback", False))
    ),
    "averaging": _local("model averaging", ModelAveragingSGD, ranks=GROWING),
    "averaging 1 bit": _local(
        "model averaging, 1 bit, sign",
        ModelAveragingSGD,
        ONE_BIT,
        **_blocks_of("averaging", tuned=()),
    ),
    "BMUF": _local(
        "block momentum", BlockMomentumSGD, ranks=GROWING, tuned=MOMENTA, peer="averaging"
    ),
    **{
        f"BMUF {bits} bits": _local(
            f"block momentum, {bits} bits",
            BlockMomentumSGD,
            _bits(bits),
            **_blocks_of("BMUF", tuned=()),
        )
        for bits in (4, 2)
    },
    "BMUF 1 bit": _local(
        "block momentum, 1 bit, sign",
        BlockMomentumSGD,
        ONE_BIT,
        **_blocks_of("BMUF", tuned=MOMENTA),
    ),
    **{
        f"{name} entropy {bits:g}": _local(
            f"{title}, {bits:g} bit, entropy code", make, _bits(bits), **_blocks_of(name, **how)
        )
        for name, title, make, how in (
            ("BMUF", "block momentum", BlockMomentumSGD, {"ranks": COMPRESSED, "tuned": MOMENTA}),
            ("averaging", "model averaging", ModelAveragingSGD, {}),
            ("SlowMo", "SlowMo", SlowMo, {}),
            ("DiLoCo", "DiLoCo (Adam)", DiLoCo, {"optimizer": "Adam"}),
        )
        for bits in (1, 0.25)
    },
    "classical": _local(
        "classical block momentum",
        BlockMomentumSGD,
        (("use_nesterov_momentum", False),),
        tuned=MOMENTA,
        peer="BMUF",
    ),
    "CNTK": _local("CNTK's block momentum", CNTKBlockMomentumSGD, peer="BMUF"),
    "SlowMo": _local("SlowMo", SlowMo, peer="averaging"),
    "DiLoCo": _local(
        "DiLoCo (Adam)", DiLoCo, optimizer="Adam", as_serial=False, peer="serial Adam"
    ),
}


def _sent(title: str, bits: float, **options: Any) -> Contender:
    every = {"gradient_bits": bits, "transport": "collective", **options}
    return Contender(title, DataParallelSGD, tuple(every.items()))


GRADIENTS = {
    "32": _sent("32 bits", 32),
    "16": _sent("16 bits, float16", 16),
    "4": _sent("4 bits", 4),
    "4-entropy": _sent("4 bits, entropy code", 4, code="entropy"),
    "2": _sent("2 bits", 2),
    "1": _sent("1 bit", 1),
    "0.5": _sent("0.5 bit", 0.5),
    "0.25": _sent("0.25 bit", 0.25),
    "0.1": _sent("0.1 bit", 0.1),
    "sign": _sent("1 bit, sign", 1, code="sign"),
    "top-k": replace(_sent("top 16 of 1024", TopK.bits), codec=(TopK.bits, TopK)),
    **{
        f"PowerSGD-{rank}": Contender(
            f"PowerSGD, rank {rank}", PowerSGD, (("rank", rank), ("transport", "collective"))
        )
        for rank in (1, 4)
    },
}
"""An entropy code from 2 bits down. On 4 ranks PowerSGD sends as many bytes as 1 bit of bytes-256
with rank 1, and as half a bit of bytes-1024 with rank 4."""

BEGINNINGS = {
    "4-then-1": replace(GRADIENTS["1"], title="4 bits for 1/16, then 1 bit", first=(4, 1 / 16)),
    "1-then-0.25": replace(
        GRADIENTS["0.25"], title="1 bit for 1/8, then 0.25 bit", first=(1, 1 / 8)
    ),
}
"""More bits in the beginning, while gradients change most."""

CONTENDERS = {**ALGORITHMS, **GRADIENTS, **BEGINNINGS}
assert len(CONTENDERS) == len(ALGORITHMS) + len(GRADIENTS) + len(BEGINNINGS)  # a run names one


def gain(algorithm: Algorithm[Any], ranks: int) -> float:
    """Return how far a constant pseudo-gradient moves the model in a block, in the long run."""
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
