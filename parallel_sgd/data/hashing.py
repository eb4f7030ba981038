"""Hashing of numbers to 64-bit ids, the same on every machine and in every process."""

from __future__ import annotations

import numpy as np

from .validation import Array

STEP = np.uint64(0x9E3779B97F4A7C15)  #: odd: its 2^64 multiples all differ and lie far apart
LARGEST_ID = (1 << 63) - 1


def mixed(numbers: Array) -> Array:
    """Mix the bits of numbers in place: neighbouring numbers become apparently random ones.

    A bijection of the 64-bit numbers: different numbers stay different, and 0 stays 0.

    Args:
        numbers: uint64 [...], changed.
    Returns:
        `numbers`.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
    with the constants of Stafford's variant 13, as in SplitMix64. Local.
    """
    with np.errstate(over="ignore"):
        numbers ^= numbers >> np.uint64(30)
        numbers *= np.uint64(0xBF58476D1CE4E5B9)
        numbers ^= numbers >> np.uint64(27)
        numbers *= np.uint64(0x94D049BB133111EB)
        numbers ^= numbers >> np.uint64(31)
    return numbers


def fractions(numbers: Array) -> Array:
    """Convert mixed uint64 numbers to float64 in [0, 1), multiples of 2^-53. Local."""
    scaled: Array = (numbers >> np.uint64(11)) * 2.0**-53
    return scaled
