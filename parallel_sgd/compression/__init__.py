"""Codecs from 32 bits to 1, all with the same error feedback. No communication here."""

from .codecs import (
    GRADIENT_BITS,
    Codec,
    FullPrecision,
    HalfPrecision,
    OneBit,
    UniformLevels,
    codec_for,
    codec_from_dict,
)

__all__ = [
    "GRADIENT_BITS",
    "Codec",
    "FullPrecision",
    "HalfPrecision",
    "OneBit",
    "UniformLevels",
    "codec_for",
    "codec_from_dict",
]
