"""Contenders: our algorithms, and PyTorch's DistributedDataParallel with its hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallel_sgd import Algorithm, BlockMomentumSGD, DataParallelSGD, PowerSGD

MOMENTUM = 0.9  #: of SGD on both sides
PERIOD = 16  #: minibatches between two synchronizations, for those that train alone in between

RECIPE, BEGINNING = "4 bit, then 1 bit", 32_768  #: samples with 4 bits: 128 steps on 4 hosts


@dataclass(frozen=True)
class Contender:
    """
    Attributes:
        algorithm: ours; None for PyTorch.
        hook: of DDP, by name; "exchange" is our hook.
        options: of the hook.
        period: minibatches after which all ranks have the same model again; 0: never. Ranks without
            communication are the limit for all more contenders.
        learns_as: a contender with the same model after every step, to rounding; None: unknown.
        timed_as: contenders with the same steps, each from a number of samples on; empty: itself.
        modules: whether for PyTorch's modules alone.
        in_buckets: whether DDP's gradients lie in its buckets, and not beside the buckets.
    """

    algorithm: Algorithm[Any] | None = None
    hook: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    period: int = 1
    learns_as: str | None = None
    timed_as: tuple[tuple[int, str], ...] = ()
    modules: bool = False
    in_buckets: bool = True

    @property
    def ours(self) -> bool:
        return self.algorithm is not None or self.hook == "exchange"


#: In the order of tables. A new algorithm of ours is one more line, and so is a hook.
CONTENDERS = {
    "32 bit": Contender(DataParallelSGD()),
    **{
        f"{bits} bit": Contender(DataParallelSGD(gradient_bits=bits))
        for bits in (8, 4, 2, 1, 0.5, 0.25, 0.1)
    },
    RECIPE: Contender(
        DataParallelSGD(gradient_bits={0: 4, BEGINNING: 1}),
        timed_as=((0, "4 bit"), (BEGINNING, "1 bit")),
    ),
    "auto": Contender(DataParallelSGD(gradient_bits="auto")),
    "auto, overlap": Contender(DataParallelSGD(gradient_bits="auto", overlap=True)),
    "8 bit, overlap": Contender(DataParallelSGD(gradient_bits=8, overlap=True), modules=True),
    "1 bit, overlap": Contender(DataParallelSGD(gradient_bits=1, overlap=True)),
    "32 bit, overlap": Contender(DataParallelSGD(overlap=True), learns_as="32 bit"),
    "1 bit, double buffering": Contender(DataParallelSGD(gradient_bits=1, double_buffering=True)),
    "block momentum": Contender(BlockMomentumSGD(sync_steps=PERIOD), period=PERIOD),
    "block momentum, 1 bit": Contender(
        BlockMomentumSGD(sync_steps=PERIOD, gradient_bits=1, block_momentum=0.5), period=PERIOD
    ),
    "PowerSGD rank 1": Contender(PowerSGD(rank=1)),
    "PowerSGD rank 4": Contender(PowerSGD(rank=4)),
    "our hook, 32 bit": Contender(hook="exchange", learns_as="32 bit", modules=True),
    "our hook, 1 bit": Contender(hook="exchange", options={"gradient_bits": 1}, modules=True),
    "no exchange": Contender(DataParallelSGD(), period=0),
    "DDP": Contender(learns_as="32 bit"),
    "DDP, its defaults": Contender(learns_as="32 bit", modules=True, in_buckets=False),
    "DDP, fp16": Contender(hook="fp16"),
    "DDP, PowerSGD rank 1": Contender(hook="power", options={"rank": 1}),
    "DDP, PowerSGD rank 4": Contender(hook="power", options={"rank": 4}),
    "DDP, post-local SGD": Contender(hook="post-local", period=PERIOD),
    "PyTorch, no exchange": Contender(hook="alone", period=0),
}

PLAIN = "DDP"
"""What all others are compared with."""

HOOKED = ("DDP, fp16", "DDP, PowerSGD rank 1", "DDP, PowerSGD rank 4", "DDP, post-local SGD")

TIMED = tuple(name for name, one in CONTENDERS.items() if not (one.timed_as or one.modules))
"""Contenders whose steps are timed; the others' are those of several of them."""

TIMED_MODULES = (
    *("32 bit", "32 bit, overlap", "8 bit, overlap", "4 bit", "1 bit", "1 bit, overlap"),
    *("0.25 bit", "0.1 bit", "block momentum, 1 bit", "PowerSGD rank 4"),
    *("our hook, 32 bit", "our hook, 1 bit", "no exchange"),
    *(PLAIN, "DDP, its defaults", *HOOKED, "PyTorch, no exchange"),
)
"""The same for PyTorch's modules."""

TO_LOSS = (
    *("32 bit", "4 bit", RECIPE, "1 bit", "0.5 bit", "0.25 bit", "0.1 bit"),
    *("block momentum, 1 bit", "PowerSGD rank 4", PLAIN, *HOOKED),
)
"""Contenders that are timed until a test loss is reached."""

TO_LOSS_MODULES = (
    *("32 bit", "32 bit, overlap", "4 bit", "1 bit", "0.25 bit", "0.1 bit"),
    *("block momentum, 1 bit", "PowerSGD rank 4", "our hook, 32 bit", PLAIN, *HOOKED),
)
"""The same for PyTorch's modules."""
