"""Contenders: our algorithms, and PyTorch's DistributedDataParallel with its hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallel_sgd import Algorithm, BlockMomentumSGD, DataParallelSGD, PowerSGD, SparseLoCo

MOMENTUM = 0.9  #: of SGD on both sides
OVERLAP = 128  #: samples beside which a fragment is exchanged
PERIOD = 16  #: minibatches between two synchronizations, for those that train alone in between


@dataclass(frozen=True)
class Contender:
    """
    Attributes:
        algorithm: ours; None for PyTorch.
        hook: of DDP, by name; "exchange" is our hook over MPI, "compress" without MPI.
        options: of the hook.
        period: minibatches after which ranks have exchanged the whole model again; 0: never. Ranks
            without communication are the limit for all more contenders.
        meets: whether all ranks then have the same model. Ranks with fragments have one in the end.
        learns_as: a contender with the same model after every step, to rounding; None: unknown.
        modules: whether for PyTorch's modules alone.
        in_buckets: whether DDP's gradients lie in its buckets, and not beside the buckets.
    """

    algorithm: Algorithm[Any] | None = None
    hook: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    period: int = 1
    meets: bool = True
    learns_as: str | None = None
    modules: bool = False
    in_buckets: bool = True

    @property
    def ours(self) -> bool:
        return self.algorithm is not None or self.hook in ("exchange", "compress")


#: In the order of tables. A new algorithm of ours is one more line, and so is a hook.
CONTENDERS = {
    "32 bit": Contender(DataParallelSGD()),
    **{
        f"{bits} bit": Contender(DataParallelSGD(gradient_bits=bits))
        for bits in (8, 4, 2, 1, 0.5, 0.25, 0.1)
    },
    "8 bit, overlap": Contender(DataParallelSGD(gradient_bits=8, overlap=True), modules=True),
    "1 bit, overlap": Contender(DataParallelSGD(gradient_bits=1, overlap=True)),
    "32 bit, overlap": Contender(DataParallelSGD(overlap=True), learns_as="32 bit"),
    "block momentum, 1 bit": Contender(
        BlockMomentumSGD(sync_steps=PERIOD, gradient_bits=1, block_momentum=0.5), period=PERIOD
    ),
    "block momentum, 1 bit, 2 fragments": Contender(
        BlockMomentumSGD(
            sync_steps=PERIOD,
            gradient_bits=1,
            block_momentum=0.5,
            fragments=2,
            overlap_samples=OVERLAP,
            merge_weight=0.5,
        ),
        period=PERIOD,
        meets=False,
    ),
    "SparseLoCo, 0.25 bit": Contender(SparseLoCo(sync_steps=PERIOD), period=PERIOD),
    "PowerSGD rank 4": Contender(PowerSGD(rank=4)),
    "our hook, 32 bit": Contender(hook="exchange", learns_as="32 bit", modules=True),
    "our hook, 4 bit": Contender(hook="exchange", options={"gradient_bits": 4}, modules=True),
    "our hook, 1 bit": Contender(hook="exchange", options={"gradient_bits": 1}, modules=True),
    "compress, 32 bit": Contender(hook="compress", learns_as="32 bit", modules=True),
    "compress, 4 bit": Contender(hook="compress", options={"gradient_bits": 4}, modules=True),
    "compress, 1 bit": Contender(hook="compress", options={"gradient_bits": 1}, modules=True),
    "no exchange": Contender(DataParallelSGD(), period=0, meets=False),
    "DDP": Contender(learns_as="32 bit"),
    "DDP, its defaults": Contender(learns_as="32 bit", modules=True, in_buckets=False),
    "DDP, fp16": Contender(hook="fp16"),
    "DDP, PowerSGD rank 1": Contender(hook="power", options={"rank": 1}),
    "DDP, PowerSGD rank 4": Contender(hook="power", options={"rank": 4}),
    "DDP, post-local SGD": Contender(hook="post-local", period=PERIOD),
    "PyTorch, no exchange": Contender(hook="alone", period=0, meets=False),
}

PLAIN = "DDP"
"""What all others are compared with."""


def names_for(modules: bool, to_loss: bool) -> list[str]:
    """Return the contenders for PyTorch's modules or our models; to a loss, with an exchange."""
    return [
        name
        for name, one in CONTENDERS.items()
        if (modules or not one.modules) and (one.period or not to_loss)
    ]
