"""Who takes part: ways to send a gradient, from 32 bits a value down to a tenth of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallel_sgd import DataParallelSGD, PowerSGD

from ..contender import Contender
from .top_k import TopK


def _sent(title: str, bits: float, **options: Any) -> Contender:
    every = {"gradient_bits": bits, "transport": "collective", **options}
    return Contender(title, DataParallelSGD, tuple(every.items()))


ONE_BIT = _sent("1 bit", 1)
QUARTER_BIT = _sent("0.25 bit", 0.25)

CONTENDERS = {
    "32": _sent("32 bits", 32),
    "16": _sent("16 bits, float16", 16),
    "4": _sent("4 bits", 4),
    "4-entropy": _sent("4 bits, entropy code", 4, code="entropy"),
    "2": _sent("2 bits", 2),
    "1": ONE_BIT,
    "0.5": _sent("0.5 bit", 0.5),
    "0.25": QUARTER_BIT,
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
    "4-then-1": replace(ONE_BIT, title="4 bits for 1/16, then 1 bit", first=(4, 1 / 16)),
    "1-then-0.25": replace(QUARTER_BIT, title="1 bit for 1/8, then 0.25 bit", first=(1, 1 / 8)),
}
"""More bits in the beginning, while gradients change most."""

CONTENDERS |= BEGINNINGS
