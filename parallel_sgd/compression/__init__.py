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
from .options import AUTO, LARGEST, CompressionOptions, GradientBits, problem_with

__all__ = [
    "AUTO",
    "GRADIENT_BITS",
    "LARGEST",
    "Codec",
    "CompressionOptions",
    "FullPrecision",
    "GradientBits",
    "HalfPrecision",
    "OneBit",
    "UniformLevels",
    "codec_for",
    "codec_from_dict",
    "problem_with",
]
