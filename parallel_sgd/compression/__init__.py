"""Codecs from 32 bits to a quarter of one, all with error feedback. No communication here."""

from .bits import BitsOptions, require_float32
from .codec import (
    CODE,
    Codec,
    auto_bits,
    codec_for,
    codec_from_dict,
    register,
    registered_bits,
    registered_codes,
    unregister,
)
from .full_precision import FullPrecision
from .half_precision import HalfPrecision
from .mixed import Mixed
from .one_bit import OneBit
from .one_of import OneOf
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
    "CODE",
    "LARGEST",
    "BitsOptions",
    "Codec",
    "CompressionOptions",
    "FullPrecision",
    "GradientBits",
    "HalfPrecision",
    "Mixed",
    "OneBit",
    "OneOf",
    "UniformLevels",
    "auto_bits",
    "codec_for",
    "codec_from_dict",
    "problem_with",
    "problem_with_largest",
    "register",
    "registered_bits",
    "registered_codes",
    "require_float32",
    "unregister",
]
