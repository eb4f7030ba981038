"""Codecs from 32 bits to 0.05 bits per value, all with error feedback. No communication."""

from .bits import BitsOptions, require_float32
from .codec import (
    CODE,
    Codec,
    auto_bits,
    checked_bits,
    codec_for,
    codec_from_dict,
    register,
    registered_bits,
    registered_codes,
    unregister,
)
from .entropy_coded import EntropyCoded
from .full_precision import FullPrecision
from .half_precision import HalfPrecision
from .message import Allowance, AllowanceOf, VariableMessage
from .mixed import Mixed
from .one_bit import OneBit
from .options import (
    AUTO,
    LARGEST,
    CompressionOptions,
    GradientBits,
    problem_with,
    problem_with_largest,
)
from .step_search import find_step, message_room, sample_of_sums, sampled_values
from .top_k import TopK
from .uniform_levels import UniformLevels

__all__ = [
    "AUTO",
    "CODE",
    "LARGEST",
    "Allowance",
    "AllowanceOf",
    "BitsOptions",
    "Codec",
    "CompressionOptions",
    "EntropyCoded",
    "FullPrecision",
    "GradientBits",
    "HalfPrecision",
    "Mixed",
    "OneBit",
    "TopK",
    "UniformLevels",
    "VariableMessage",
    "auto_bits",
    "checked_bits",
    "codec_for",
    "codec_from_dict",
    "find_step",
    "message_room",
    "problem_with",
    "problem_with_largest",
    "register",
    "registered_bits",
    "registered_codes",
    "require_float32",
    "sample_of_sums",
    "sampled_values",
    "unregister",
]
