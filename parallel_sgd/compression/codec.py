"""The base class of codecs, and the registry of codecs by bits per value."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..kernels import Blocks
from ..parameters import Parameters
from ..validation import choice, integer, kind_of, mapping, number, set_validated, shown, text

Array = Any  #: a NumPy or CuPy array
ALIGNED = 4  #: bytes: message lengths are multiples, so that the next message is aligned
CodecT = TypeVar("CodecT", bound="Codec")
LengthT = TypeVar("LengthT", int, npt.NDArray[np.int64])


def padded(length: LengthT) -> LengthT:
    """Return the length of a message, or lengths, padded to multiples of `ALIGNED`."""
    return -(-length // ALIGNED) * ALIGNED


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """A method to turn float32 values into bytes and back.

    All lossy codecs carry error feedback in the same way: `encode` sends q for v = g + r and leaves
    the residual r' = v - q, so the error of a message is sent by later messages (Seide, Fu, Droppo,
    Li, Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014, §3.2; convergence: Karimireddy et
    al., ICML 2019).

    Codecs are values: equal options, equal codec. A codec holds no arrays; the caller keeps the
    residual. All methods are local.

    Attributes:
        bits: per value, without the data shared by a block of values. A codec registered for
            several numbers of bits has a field for it.
        learns: True if training is nearly as good as with 32 bits, also with momentum and Adam
            (docs/experiments.md). ``gradient_bits="auto"`` chooses only such codecs.
        learns_blocks: True if this also holds for blocks of local updates.
        has_fixed_length: True if the length of a message depends only on its blocks. Otherwise the
            bytes of the blocks are an upper limit, and `encode` returns the length.
        block_size: the number of values with common quantization levels. Vectors are cut only
            between blocks.
    """

    bits: ClassVar[float]
    has_fixed_length: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    learns_blocks: ClassVar[bool] = True
    block_size: int = 1024

    def __post_init__(self) -> None:
        set_validated(self, block_size=integer("block_size", self.block_size, 1, 2**20))

    @abstractmethod
    def blocks(self, parameters: Parameters) -> Blocks:
        """Return the position of each block of the parameters in the vector and in the payload."""

    @abstractmethod
    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> int | None:
        """Encode v = vector + residual, and keep the error in the residual.

        Args:
            blocks: the part of the whole vector held by the arrays below.
            vector: float32 [n], unchanged.
            residual: float32 [n], in: the errors of earlier messages; out: v - q.
            payload: uint8 [bytes of `blocks`], written.
        Returns:
            The length of the message in bytes, a multiple of 4; None for a fixed length.
        Cost: reads `vector`, reads and writes `residual` once each.
        """

    @abstractmethod
    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> int | None:
        """Set ``out = q``, or with `add` ``out += q``; `out` is float32 [n].

        Returns:
            The length in bytes of the message at the beginning of `payload`; None for a fixed
            length.
        """

    def encoded_bytes(self, values: int) -> float:
        """Return the bytes of this number of values in full blocks, on average if lengths vary."""
        return self.room_bytes(values)

    def room_bytes(self, values: int) -> float:
        """Return the bytes of memory for messages of this number of values in full blocks."""
        block = Parameters({"x": np.zeros(self.block_size, np.float32)})
        room: int = self.blocks(block).bytes.stop
        return values * (room / self.block_size)

    def first_calls(self) -> list[Callable[[], object]]:
        """Return calls for `kernels.prepare` to load the codec's kernels for NumPy, and no more.

        Empty for a codec without such kernels. Local.
        """
        return []

    def _calls_without_values(self) -> list[Callable[[], object]]:
        """Return calls for `first_calls` that encode and decode no blocks."""
        none = np.zeros(1, np.int64)
        blocks, values, payload = Blocks(none, none), np.zeros(0, np.float32), np.zeros(0, np.uint8)
        return [
            lambda: self.encode(blocks, values, values, payload),
            lambda: self.decode(blocks, payload, values, False),
        ]

    @classmethod
    def for_bits(cls: type[CodecT], bits: float, **options: Any) -> CodecT:
        """Create the codec with `bits`, and with those of `options` that it has as fields."""
        options["bits"] = bits
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in names})

    def to_dict(self) -> dict[str, Any]:
        """Return the codec's name and options, as values for JSON: see `codec_from_dict`."""
        return {"name": type(self).__name__, **asdict(self)}


_registry: dict[float, dict[str, type[Codec]]] = {}  # by bits, then by code
_usual: dict[float, type[Codec]] = {}  # by bits: the default without a code


@dataclass(frozen=True)
class _Range:
    """A codec for all bits from `least` to `most`; see `register_range`."""

    least: float
    most: float
    points: tuple[float, ...]
    code: str
    codec: type[Codec]
    usual: bool

    def __contains__(self, bits: float) -> bool:
        return self.least <= bits <= self.most


_ranges: list[_Range] = []

CODE = "auto"
"""The value of ``code`` for the default codec."""


def register(
    *bits: float, code: str = "", usual: bool = True
) -> Callable[[type[CodecT]], type[CodecT]]:
    """Decorate a subclass of `Codec`, so that these values of ``gradient_bits`` select it.

    The fields of the class are its options; options of `codec_for` with the same name are passed
    on, including `bits`. All uses of bits consult the registry: the check of ``gradient_bits``, the
    choice of "auto", and the measurement of kernels. Register the same codecs on all ranks.

    Args:
        bits: per value, more than 0; a fraction if several values share a bit.
        code: its name among codecs with the same bits, selected by the option ``code``.
        usual: True to make the codec the default for these bits.
    Raises:
        UserError: an argument is invalid, the bits already have a codec, or the decorated object is
            not a subclass of `Codec`.

    Local. A codec is one file: its three kernels for NumPy, Numba and CUDA, and this line.
    """

    if not bits:
        raise UserError("register() needs the bits per value, such as register(6)")
    numbers = [_number_of_bits(value) for value in bits]
    code = text("code", code)

    def registered(codec: type[CodecT]) -> type[CodecT]:
        if not (isinstance(codec, type) and issubclass(codec, Codec)):
            raise UserError(f"register() must decorate a subclass of Codec: it is {kind_of(codec)}")
        for count in numbers:
            others = _registry.get(count, {})
            taken = others.get(code) or (_usual.get(count) if usual else None)
            if taken or (others and "" in (code, *others)):
                taken = taken or next(iter(others.values()))
                named = f" and code={code!r}" if code and code in others else ""
                raise UserError(
                    f"{codec.__name__}: {taken.__name__} is already registered for {count} "
                    f"bits{named}"
                )
        for count in numbers:
            _registry.setdefault(count, {})[code] = codec
            if usual:
                _usual[count] = codec
        return codec

    return registered


def register_range(
    least: float, most: float, *, points: tuple[float, ...] = (), code: str, usual: bool = True
) -> Callable[[type[CodecT]], type[CodecT]]:
    """Decorate a codec for all bits in a range.

    The codec is used if ``code`` selects it, or by default for bits of which no other codec is the
    default.

    Args:
        least, most: the range of bits.
        points: the bits at which its kernels are measured, and from which "auto" chooses.
        code: see `register`.
        usual: False to use the codec only if ``code`` selects it. The range must then lie within
            that of a usual codec.

    Local.
    """

    def registered(codec: type[CodecT]) -> type[CodecT]:
        _ranges.append(_Range(least, most, points, code, codec, usual))
        return codec

    return registered


def _number_of_bits(value: Any) -> float:
    """Return valid bits as errors show them: 2 rather than 2.0."""
    bits = number("bits", value, 0)
    if bits == 0:
        raise UserError(f"bits={shown(value)} must be more than 0")
    return int(bits) if bits.is_integer() else bits


def unregister(codec: type[Codec]) -> None:
    """Remove a codec from the registry. Local."""
    for bits in [*_registry]:
        left = {code: other for code, other in _registry[bits].items() if other is not codec}
        if left:
            _registry[bits] = left
        else:
            del _registry[bits]
        if _usual.get(bits) is codec:
            del _usual[bits]


def registered_bits() -> tuple[float, ...]:
    """Return the bits to measure and choose from, ascending.

    These are all registered bits, and the points of ranges. Local.
    """
    points = {point for bits_range in _ranges for point in bits_range.points}
    return tuple(sorted({*_registry, *points}))


def checked_bits(name: str, value: Any) -> float:
    """Return bits that have a codec.

    Raises:
        UserError: there is no such codec.

    Local.
    """
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, int | float) and not isinstance(plain, bool):
        bits = int(plain) if math.isfinite(plain) and plain == int(plain) else plain
        if bits in _registry or any(bits in bits_range for bits_range in _ranges):
            return bits
    usual = [bits_range for bits_range in _ranges if bits_range.usual]
    ranges = [f"a number from {bits_range.least:g} to {bits_range.most:g}" for bits_range in usual]
    others = [
        f"{bits:g}"
        for bits in sorted(_registry)
        if not any(bits in bits_range for bits_range in usual)
    ]
    *first, last = [*ranges, *others]
    raise UserError(f"{name}={shown(value)} must be {', '.join(first)} or {last}")


def auto_bits(*, of_blocks: bool = False) -> tuple[float, ...]:
    """Return the bits that ``gradient_bits="auto"`` chooses from, ascending.

    Args:
        of_blocks: True for the changes of blocks of local updates, False for gradients.

    Local.
    """
    codecs = {bits: codec_for(bits) for bits in registered_bits()}
    return tuple(
        bits
        for bits, codec in codecs.items()
        if codec.learns and (codec.learns_blocks or not of_blocks)
    )


def registered_codes() -> tuple[str, ...]:
    """Return the valid values of ``code``. Local."""
    named = {code for codes in _registry.values() for code in codes if code}
    return (CODE, *sorted(named | {bits_range.code for bits_range in _ranges}))


def _codecs(bits: float) -> dict[str, type[Codec]]:
    """Return all codecs for these bits, by code."""
    ranges = {
        bits_range.code: bits_range.codec
        for bits_range in sorted(_ranges, key=lambda bits_range: not bits_range.usual)
        if bits in bits_range
    }
    return {**ranges, **_registry.get(bits, {})}


def _codec(bits: float, code: str) -> type[Codec]:
    """Return the codec with this code, or the default codec if none has this code."""
    codecs = _codecs(bits)
    return codecs.get(code) or _usual.get(bits) or next(iter(codecs.values()))


def bits_for_code(code: str) -> str:
    """Return the values of ``gradient_bits`` for a code, as text for errors. Local."""
    ranges = [
        f"{bits_range.least:g} to {bits_range.most:g}"
        for bits_range in _ranges
        if bits_range.code == code
    ]
    exact = [f"{bits:g}" for bits, codecs in sorted(_registry.items()) if code in codecs]
    return " or ".join(f"gradient_bits={bits}" for bits in [*ranges, *exact])


def has_code(bits: float, code: str) -> bool:
    """Return True if a codec for these bits has this code. Local."""
    return code in _codecs(bits)


def codecs_with(option: str) -> dict[type[Codec], str]:
    """Return the codecs with an option of this name, and the options that select each. Local."""
    found: dict[type[Codec], str] = {}
    for bits, codes in _registry.items():
        for code, codec in codes.items():
            if option in {field.name for field in fields(codec)}:
                asked = "" if _usual.get(bits) is codec else f" and code={code!r}"
                found.setdefault(codec, f"gradient_bits={bits}{asked}")
    return found


def codec_for(
    gradient_bits: float,
    *,
    code: str = CODE,
    block_size: int = 1024,
    threshold: str = "zero",
    half_format: str = "float16",
) -> Codec:
    """Return the codec for `gradient_bits` bits per value, with the options that apply to it.

    Args:
        gradient_bits: per value.
        code: selects among several codecs for the same bits. "auto", or a code that none of them
            has, gives the default codec.
        block_size, threshold, half_format: options of some codecs.
    Raises:
        UserError: no codec is registered for the bits, or an option's value is invalid.

        >>> codec_for(0.3)
        EntropyCoded(bits=0.3, block_size=1024)
        >>> codec_for(1, code="sign")
        OneBit(block_size=1024, threshold='zero')
    """
    bits = checked_bits("gradient_bits", gradient_bits)
    codec = _codec(bits, choice("code", code, registered_codes()))
    return codec.for_bits(bits, block_size=block_size, threshold=threshold, half_format=half_format)


def codec_from_dict(options: Mapping[str, Any]) -> Codec:
    """Create a codec from the result of `Codec.to_dict`.

    Raises:
        UserError: the argument is not a mapping, or names no registered codec.
    """
    every = [codec for codes in _registry.values() for codec in codes.values()]
    every += [bits_range.codec for bits_range in _ranges]
    codecs = {codec.__name__: codec for codec in every}
    rest = mapping("options", options, optional=False)
    name = rest.pop("name", None)
    if name not in codecs:
        raise UserError(f"codec name={name!r} must be one of {', '.join(codecs)}")
    return codecs[name](**rest)
