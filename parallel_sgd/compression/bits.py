"""How many bits a value has on its way: the same always, by samples, or by parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from ..errors import UserError
from ..options import ByPattern, BySamples, Options, group, option, options
from ..parameters import Parameters
from ..patterns import Patterns
from . import (  # noqa: F401 - registered
    entropy_coded,
    full_precision,
    half_precision,
    one_bit,
    uniform_levels,
)
from .codec import Codec, auto_bits
from .mixed import Mixed
from .options import AUTO, CompressionOptions, GradientBits


@options
class BitsOptions(Options):
    """With how many bits values travel, and how they become bits.

    Where the bits change, residuals stay, and enter the next message.
    """

    gradient_bits: float | str | Mapping[int, float] = option(
        32,
        BySamples(GradientBits(), words=(AUTO,)),
        "bits a value on the wire, or such from so many samples on; 32 is the parameters' own "
        "precision; auto: for each bucket the bits that are fastest by a measurement of links and "
        "kernels before training, more bits where they cost no more than 5 % of the time",
    )
    bits_of: Patterns[float] = option(
        Patterns({}),
        ByPattern(GradientBits()),
        "bits of their own for some parameters, by a shell pattern of their names (*.bias:32) or "
        "by size (<1024:32, of fewer than 1024 values); the first that matches counts, and all "
        "others have gradient_bits",
    )
    compression: CompressionOptions = group(CompressionOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compression.require_use_with(self.all_bits)

    @property
    def all_bits(self) -> set[float | str]:
        """The bits, or "auto", that are ever used."""
        return self.usual_bits.union(self.bits_of.values())

    @property
    def usual_bits(self) -> set[float | str]:
        """Those of parameters without bits of their own."""
        bits = self.gradient_bits
        return set(bits.values()) if isinstance(bits, Mapping) else {bits}

    @property
    def lossless(self) -> bool:
        """Whether nothing is ever lost on the way."""
        return self.all_bits == {32}

    def bits_after(self, samples: int) -> float | str:
        """The bits of a message after so many samples, or "auto". Local."""
        bits = self.gradient_bits
        if isinstance(bits, Mapping):
            return bits[max(start for start in bits if start <= samples)]
        return bits

    def require_for(self, parameters: Parameters) -> None:
        """See that these parameters can be sent so. Local.

        Raises:
            UserError: fewer than 32 bits for parameters that are not float32, or a pattern that
                counts for none of them.
        """
        self.bits_of.require_matches("bits_of", {name: x.size for name, x in parameters.items()})
        every = [("gradient_bits", bits) for bits in self.usual_bits - {AUTO}]
        every += [(f"bits_of[{pattern!r}]", bits) for pattern, bits in self.bits_of.items()]
        for name, bits in every:
            require_float32(self.compression.codec(cast(float, bits)), parameters, name)

    def first_calls(self) -> list[Callable[[], object]]:
        """Those of all codecs that may be used, for `kernels.prepare`. Local."""
        return [call for codec in self._codecs for call in codec.first_calls()]

    @property
    def has_entropy_code(self) -> bool:
        """Whether a codec may be used whose messages have lengths that depend on their values."""
        return not all(codec.has_fixed_length for codec in self._codecs)

    @property
    def _codecs(self) -> list[Codec]:
        """All that may be used."""
        possible = self.all_bits - {AUTO} | set(auto_bits() if AUTO in self.all_bits else ())
        return [self.compression.codec(cast(float, bits)) for bits in possible]

    def codec(self, bits: float) -> Codec:
        """Of parameters that have so many bits, but for those with bits of their own."""
        codec = self.compression.codec
        if not self.bits_of or self.lossless:
            return codec(bits)
        own = {pattern: codec(number) for pattern, number in self.bits_of.items()}
        return Mixed(others=codec(bits), own=Patterns(own))


def require_float32(codec: Codec, parameters: Parameters, name: str = "gradient_bits") -> None:
    """Refuse a lossy codec, of the option `name`, for parameters of another dtype. Local."""
    if codec.bits < 32 and parameters.dtype != np.float32:
        raise UserError(
            f"{name}={codec.bits} needs float32 parameters, but these are "
            f"{parameters.dtype}; use 32 (full precision) for them"
        )
