"""The option for bits per value in messages: constant, by samples, or by parameter."""

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
    top_k,
    uniform_levels,
)
from .codec import Codec, auto_bits
from .mixed import Mixed
from .options import AUTO, CompressionOptions, GradientBits


@options
class BitsOptions(Options):
    """Bits per value of messages, and the method of compression.

    When the bits change, residuals stay and enter the next message.
    """

    gradient_bits: float | str | Mapping[int, float] = option(
        32,
        BySamples(GradientBits(), words=(AUTO,)),
        "bits per value in messages, or bits by samples; 32 is the parameters' own precision; "
        "auto: for each bucket the fastest bits, by a measurement of links and kernels before "
        "training, or more bits if these cost at most 5 % more time",
    )
    bits_of: Patterns[float] = option(
        Patterns({}),
        ByPattern(GradientBits()),
        "different bits for some parameters, by a shell pattern of their names (*.bias:32) or "
        "by size (<1024:32: fewer than 1024 values); the first match counts, and all other "
        "parameters have gradient_bits",
    )
    compression: CompressionOptions = group(CompressionOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compression.require_use_with(self.all_bits)

    @property
    def all_bits(self) -> set[float | str]:
        """All bits in use at any time, possibly with "auto"."""
        return self.usual_bits.union(self.bits_of.values())

    @property
    def usual_bits(self) -> set[float | str]:
        """The bits of parameters without a matching pattern in `bits_of`."""
        bits = self.gradient_bits
        return set(bits.values()) if isinstance(bits, Mapping) else {bits}

    @property
    def lossless(self) -> bool:
        """True if nothing is ever lost in messages."""
        return self.all_bits == {32}

    def bits_after(self, samples: int) -> float | str:
        """Return the bits of a message after this number of samples, or "auto". Local."""
        bits = self.gradient_bits
        if isinstance(bits, Mapping):
            return bits[max(start for start in bits if start <= samples)]
        return bits

    def require_for(self, parameters: Parameters) -> None:
        """Check that these parameters can be sent with these options. Local.

        Raises:
            UserError: fewer than 32 bits for parameters that are not float32, or a pattern without
                effect on any of them.
        """
        self.bits_of.require_matches("bits_of", {name: x.size for name, x in parameters.items()})
        every = [("gradient_bits", bits) for bits in self.usual_bits - {AUTO}]
        every += [(f"bits_of[{pattern!r}]", bits) for pattern, bits in self.bits_of.items()]
        for name, bits in every:
            require_float32(self.compression.codec(cast(float, bits)), parameters, name)

    def first_calls(self) -> list[Callable[[], object]]:
        """Return the calls of all codecs in use, for `kernels.prepare`. Local."""
        return [call for codec in self._codecs for call in codec.first_calls()]

    @property
    def has_entropy_code(self) -> bool:
        """True if any codec in use has messages of variable length."""
        return not all(codec.has_fixed_length for codec in self._codecs)

    @property
    def _codecs(self) -> list[Codec]:
        """All codecs in use."""
        possible = self.all_bits - {AUTO} | set(auto_bits() if AUTO in self.all_bits else ())
        return [self.compression.codec(cast(float, bits)) for bits in possible]

    def codec(self, bits: float) -> Codec:
        """Return the codec for `bits`, combined with the codecs of `bits_of`. Local."""
        codec = self.compression.codec
        if not self.bits_of or self.lossless:
            return codec(bits)
        own = {pattern: codec(number) for pattern, number in self.bits_of.items()}
        return Mixed(others=codec(bits), own=Patterns(own))


def require_float32(codec: Codec, parameters: Parameters, name: str = "gradient_bits") -> None:
    """Raise a UserError if a lossy codec is used for parameters other than float32. Local.

    Args:
        codec: chosen by the option `name`.
        parameters: to be sent.
        name: of the option, for the error text.
    """
    if codec.bits < 32 and parameters.dtype != np.float32:
        raise UserError(
            f"{name}={codec.bits} needs float32 parameters, but these are "
            f"{parameters.dtype}; use 32 (full precision) for them"
        )
