"""Codecs: how a gradient travels, from its full precision down to one bit a value.

Every lossy codec carries error feedback, and does so in one way: `encode` sends q for v = g + r
and leaves r' = v - q behind, so what a message loses is sent by later ones (Seide, Fu, Droppo,
Li, Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014, §3.2; Karimireddy et al., ICML
2019, for why it converges).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ..errors import UserError
from ..kernels import Blocks, body, payload_offsets
from ..parameters import Parameters
from ..validation import choice, integer, settle

Array = Any  #: a NumPy or CuPy array

GRADIENT_BITS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """One way to turn float32 values into bytes and back.

    Codecs are values: equal options, equal codec. They hold no arrays; the residual belongs to
    whoever calls. Everything here is local.
    """

    bits: ClassVar[int]

    @abstractmethod
    def blocks(self, parameters: Parameters) -> Blocks:
        """Where each block of these parameters lies in the vector and in the payload."""

    @abstractmethod
    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        """Encode v = vector + residual and keep what is lost.

        Args:
            blocks: which part of the whole the other arguments are.
            vector: float32 [n], unchanged.
            residual: float32 [n], in: what earlier messages lost; out: v - q.
            payload: uint8 [bytes of `blocks`], written.
        Cost: reads `vector`, reads and writes `residual` once each.
        """

    @abstractmethod
    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        """``out = q``, or with `add` ``out += q``; `out` is float32 [n]."""

    def to_dict(self) -> dict[str, Any]:
        """The options and the codec's name, as JSON can hold them: see `codec_from_dict`."""
        return {"name": type(self).__name__, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class OneBit(Codec):
    """One bit a value and two float32 levels a block (Seide et al. 2014, §3).

    Args:
        block_size: values that share their levels.
        threshold: "zero": the bit is v >= 0 and the levels are the means of the two classes;
            "mean": it is v >= mean(v), and the levels are mean ± mean|v - mean|.

    Seide's blocks are the columns of a weight matrix; ours have a fixed length, so that a
    parameter of any shape shrinks alike.
    """

    bits: ClassVar[int] = 1
    block_size: int = 1024
    threshold: str = "zero"

    def __post_init__(self) -> None:
        threshold = choice("threshold", self.threshold, ("zero", "mean"))
        settle(self, block_size=_block_size(self.block_size), threshold=threshold)

    def blocks(self, parameters: Parameters) -> Blocks:
        starts = parameters.block_starts(self.block_size)
        return Blocks(starts, payload_offsets(starts, self.bits))

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        mean = self.threshold == "mean"
        body(vector).encode_1bit(blocks, vector, residual, payload, mean)

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        body(out).decode_1bit(blocks, payload, out, add)


@dataclass(frozen=True, kw_only=True)
class UniformLevels(Codec):
    """2, 4 or 8 bits a value: 2**bits - 1 evenly spaced levels around an exact zero.

    Args:
        bits: 2, 4 or 8.
        block_size: values that share their spacing, one float32.
    """

    bits: int  # type: ignore[misc]
    block_size: int = 1024

    def __post_init__(self) -> None:
        bits = choice("bits", self.bits, (2, 4, 8))
        settle(self, block_size=_block_size(self.block_size), bits=bits)

    def blocks(self, parameters: Parameters) -> Blocks:
        starts = parameters.block_starts(self.block_size)
        return Blocks(starts, payload_offsets(starts, self.bits))

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        body(vector).encode_levels(self.bits, blocks, vector, residual, payload)

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        body(out).decode_levels(self.bits, blocks, payload, out, add)


@dataclass(frozen=True, kw_only=True)
class HalfPrecision(Codec):
    """16 bits a value.

    Args:
        format: "float16" (11 significant bits, beyond ±65504 the largest is sent and the rest
            stays in the residual) or "bfloat16" (8 significant bits, the range of float32).
        block_size: where the vector may be cut into stripes; as that of the codec to which or
            from which the bits change, whose residuals then fit.
    """

    bits: ClassVar[int] = 16
    format: str = "float16"
    block_size: int = 1024

    def __post_init__(self) -> None:
        format = choice("half_format", self.format, ("float16", "bfloat16"))
        settle(self, block_size=_block_size(self.block_size), format=format)

    def blocks(self, parameters: Parameters) -> Blocks:
        starts = parameters.block_starts(self.block_size)
        return Blocks(starts, 2 * starts)

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        body(vector).encode_half(vector, residual, payload, self.format == "bfloat16")

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        body(out).decode_half(payload, out, add, self.format == "bfloat16")


@dataclass(frozen=True, kw_only=True)
class FullPrecision(Codec):
    """The values as they are, float32 or float64: nothing is lost and no residual needed.

    Args:
        block_size: as for `HalfPrecision`.
    """

    bits: ClassVar[int] = 32
    block_size: int = 1024

    def __post_init__(self) -> None:
        settle(self, block_size=_block_size(self.block_size))

    def blocks(self, parameters: Parameters) -> Blocks:
        starts = parameters.block_starts(self.block_size)
        return Blocks(starts, parameters.dtype.itemsize * starts)

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        out = payload.view(vector.dtype)
        out[...] = vector
        out += residual
        residual.fill(0)

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        if add:
            out += payload.view(out.dtype)
        else:
            out[...] = payload.view(out.dtype)


def codec_for(
    gradient_bits: int,
    *,
    block_size: int = 1024,
    threshold: str = "zero",
    half_format: str = "float16",
) -> Codec:
    """The codec that sends `gradient_bits` bits a value.

    Raises:
        UserError: bits other than 1, 2, 4, 8, 16, 32, or an option's value that is not known.

    >>> codec_for(1)
    OneBit(block_size=1024, threshold='zero')
    """
    gradient_bits = choice("gradient_bits", gradient_bits, GRADIENT_BITS)
    if gradient_bits == 1:
        return OneBit(block_size=block_size, threshold=threshold)
    if gradient_bits in (2, 4, 8):
        return UniformLevels(bits=gradient_bits, block_size=block_size)
    if gradient_bits == 16:
        return HalfPrecision(format=half_format, block_size=block_size)
    return FullPrecision(block_size=block_size)


def codec_from_dict(options: Mapping[str, Any]) -> Codec:
    """The inverse of `Codec.to_dict`."""
    kinds = {kind.__name__: kind for kind in (OneBit, UniformLevels, HalfPrecision, FullPrecision)}
    rest = dict(options)
    name = rest.pop("name", None)
    if name not in kinds:
        raise UserError(f"codec name={name!r} must be one of {', '.join(kinds)}")
    return kinds[name](**rest)


def _block_size(value: Any) -> int:
    return integer("block_size", value, 1, 2**20)
