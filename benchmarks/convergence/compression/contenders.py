"""Who takes part: ways to send a gradient, from 32 bits a value down to a quarter of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallel_sgd import DataParallelSGD, PowerSGD

from ..contender import Contender
from .top_k import TopK


def _sent(title: str, bits: float, **options: Any) -> Contender:
    every = {"gradient_bits": bits, "transport": "collective", **options}
    return Contender(title, DataParallelSGD, tuple(every.items()))


ONE_OF_8 = _sent("one of 8", 1, code="largest")

CONTENDERS = {
    "32": _sent("32 bits", 32),
    "16": _sent("16 bits, float16", 16),
    "4": _sent("4 bits", 4),
    "2": _sent("2 bits", 2),
    "sign": _sent("1 bit, sign", 1, code="sign"),
    "one-of-8": ONE_OF_8,
    "one-of-16": _sent("one of 16", 0.5, code="largest"),
    "one-of-32": _sent("one of 32", 0.25, code="largest"),
    "top-k": replace(_sent("top 16 of 1024", TopK.bits), codec=(TopK.bits, TopK)),
    **{
        f"PowerSGD-{rank}": Contender(
            f"PowerSGD, rank {rank}", PowerSGD, (("rank", rank), ("transport", "collective"))
        )
        for rank in (1, 4)
    },
}

BEGINNINGS = {
    f"{bits}-for-1/{parts}": replace(
        ONE_OF_8, title=f"{bits} bits for 1/{parts}, then one of 8", first=(bits, 1 / parts)
    )
    for bits in (4, 32)
    for parts in (8, 4)
}
"""Other bits until the lag of a beginning is over."""

CONTENDERS |= BEGINNINGS

_RECIPE = BEGINNINGS["4-for-1/4"]
CONTENDERS["4-for-1/4-small-32"] = replace(
    _RECIPE,
    title=f"{_RECIPE.title}; parameters below 1,024 values 32 bits",
    options=(*_RECIPE.options, ("bits_of", {"<1024": 32})),
)
"""Biases and the gains of norms are few, and decide much in deep models."""
