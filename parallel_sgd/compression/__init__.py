"""Codecs from 32 bits to 1, all with the same error feedback. No communication here."""

from .codec import Codec, codec_for, codec_from_dict, register, registered_bits, unregister
from .full_precision import FullPrecision
from .half_precision import HalfPrecision
from .one_bit import OneBit
from .options import (
    AUTO,
    LARGEST,
    CompressionOptions,
    GradientBits,
    problem_with,
    problem_with_largest,
)
from .uniform_levels import UniformLevels

__all__ = [
    "AUTO",
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
    "problem_with_largest",
    "register",
    "registered_bits",
    "unregister",
]
