"""What a codec is, and the registry of codecs by their bits a value."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

import numpy as np

from ..errors import UserError
from ..kernels import Blocks
from ..parameters import Parameters
from ..validation import choice, integer, kind_of, mapping, number, set_validated, shown, text

Array = Any  #: a NumPy or CuPy array
ALIGNED = 4  #: bytes, of which a message takes a multiple, for the numbers of what comes after it
CodecT = TypeVar("CodecT", bound="Codec")


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """One way to turn float32 values into bytes and back.

    Every lossy codec carries error feedback, and does so in one way: `encode` sends q for
    v = g + r and leaves r' = v - q behind, so what a message loses is sent by later ones (Seide,
    Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014, §3.2; Karimireddy et
    al., ICML 2019, for why it converges).

    Codecs are values: equal options, equal codec. They hold no arrays; the residual belongs to
    whoever calls. Everything here is local.

    Attributes:
        bits: a value, not counting what a block of values shares; a codec that is registered for
            several numbers of bits has a field for it.
        learns: whether it learns nearly as 32 bits do, with momentum and Adam, too
            (docs/experiments.md): only then ``gradient_bits="auto"`` may choose it.
        learns_blocks: whether that holds for blocks of local updates, too.
        has_fixed_length: whether a message takes just the bytes of its blocks. If not, these are
            room enough, and `encode` says how many a message takes.
        block_size: values that share quantization levels; and where a vector may be cut.
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
        """Where each block of these parameters lies in the vector and in the payload."""

    @abstractmethod
    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> int | None:
        """Encode v = vector + residual and keep what is lost.

        Args:
            blocks: which part of the whole the other arguments are.
            vector: float32 [n], unchanged.
            residual: float32 [n], in: what earlier messages lost; out: v - q.
            payload: uint8 [bytes of `blocks`], written.
        Returns:
            Bytes of the message, a multiple of 4; None where the length is fixed.
        Cost: reads `vector`, reads and writes `residual` once each.
        """

    @abstractmethod
    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> int | None:
        """``out = q``, or with `add` ``out += q``; `out` is float32 [n].

        Returns:
            Bytes of the message, with which `payload` begins; None where the length is fixed.
        """

    def encoded_bytes(self, values: int) -> float:
        """Bytes of so many values in full blocks, on average where the length is not fixed."""
        return self.room_bytes(values)

    def room_bytes(self, values: int) -> float:
        """Bytes of memory for the messages of so many values in full blocks."""
        block = Parameters({"x": np.zeros(self.block_size, np.float32)})
        room: int = self.blocks(block).bytes.stop
        return values * (room / self.block_size)

    def first_calls(self) -> list[Callable[[], object]]:
        """Calls for `kernels.prepare` that need the codec's kernels for NumPy arrays, and do
        nothing else; none if the codec has no such kernels. Local."""
        return []

    def _calls_without_values(self) -> list[Callable[[], object]]:
        """For `first_calls`: encode no blocks, and decode none."""
        none = np.zeros(1, np.int64)
        blocks, values, payload = Blocks(none, none), np.zeros(0, np.float32), np.zeros(0, np.uint8)
        return [
            lambda: self.encode(blocks, values, values, payload),
            lambda: self.decode(blocks, payload, values, False),
        ]

    @classmethod
    def for_bits(cls: type[CodecT], bits: float, **options: Any) -> CodecT:
        """With so many bits, and those of the options that it has."""
        options["bits"] = bits
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in names})

    def to_dict(self) -> dict[str, Any]:
        """The options and the codec's name, as JSON can hold them: see `codec_from_dict`."""
        return {"name": type(self).__name__, **asdict(self)}


_registry: dict[float, dict[str, type[Codec]]] = {}  # by bits, and by code
_usual: dict[float, type[Codec]] = {}  # by bits: where no code is asked for


@dataclass(frozen=True)
class _Range:
    """A codec for all numbers of bits from `least` to `most`."""

    least: float
    most: float
    points: tuple[float, ...]
    code: str
    codec: type[Codec]


_ranges: list[_Range] = []

CODE = "auto"
"""The usual codec of so many bits."""


def register(
    *bits: float, code: str = "", usual: bool = True
) -> Callable[[type[CodecT]], type[CodecT]]:
    """Decorates a subclass of `Codec`: ``gradient_bits`` of any of these numbers means it.

    Its fields are its options. Those that `codec_for` has by the same name are passed on, `bits`
    among them. Whatever goes by bits goes by the registry: the check of ``gradient_bits``, what
    "auto" chooses from, and the measurement of kernels. Register on all ranks alike.

    Args:
        bits: a value, more than 0; a fraction where several values share a bit.
        code: its name beside other codecs with the same bits, of which the option ``code`` chooses.
        usual: whether the codec is used where ``code`` is not given.
    Raises:
        UserError: an argument is not as required, they are another codec's, or what is decorated is
            no subclass of `Codec`.

    Local. A codec is one file: its three kernels for NumPy, Numba and CUDA, and this line.
    """

    if not bits:
        raise UserError("register() must have the bits a value: register(6), say")
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
                    f"{codec.__name__}: {taken.__name__} is registered for {count} bits{named}"
                )
        for count in numbers:
            _registry.setdefault(count, {})[code] = codec
            if usual:
                _usual[count] = codec
        return codec

    return registered


def register_range(
    least: float, most: float, *, points: tuple[float, ...], code: str
) -> Callable[[type[CodecT]], type[CodecT]]:
    """Decorates a codec for all numbers of bits in a range: used where ``code`` asks for it, or no
    other codec is the usual one of so many bits.

    Args:
        points: bits at which its kernels are measured, and among which "auto" chooses.

    Local.
    """

    def registered(codec: type[CodecT]) -> type[CodecT]:
        _ranges.append(_Range(least, most, points, code, codec))
        return codec

    return registered


def _number_of_bits(value: Any) -> float:
    """Bits a value as errors show them: 2 and not 2.0."""
    bits = number("bits", value, 0)
    if bits == 0:
        raise UserError(f"bits={shown(value)} must be more than 0")
    return int(bits) if bits.is_integer() else bits


def unregister(codec: type[Codec]) -> None:
    """Take a codec out of the registry. Local."""
    for bits in [*_registry]:
        left = {code: other for code, other in _registry[bits].items() if other is not codec}
        if left:
            _registry[bits] = left
        else:
            del _registry[bits]
        if _usual.get(bits) is codec:
            del _usual[bits]


def registered_bits() -> tuple[float, ...]:
    """The bits with which codecs are measured and chosen, ascending: all that are registered, and
    the points of ranges. Local."""
    points = {point for of_range in _ranges for point in of_range.points}
    return tuple(sorted({*_registry, *points}))


def checked_bits(name: str, value: Any) -> float:
    """Return bits for which there is a codec.

    Raises:
        UserError: there is none.

    Local.
    """
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, int | float) and not isinstance(plain, bool):
        bits = int(plain) if math.isfinite(plain) and plain == int(plain) else plain
        if bits in _registry or any(one.least <= bits <= one.most for one in _ranges):
            return bits
    ranges = [f"a number from {one.least:g} to {one.most:g}" for one in _ranges]
    others = [
        f"{bits:g}"
        for bits in sorted(_registry)
        if not any(one.least <= bits <= one.most for one in _ranges)
    ]
    *first, last = [*ranges, *others]
    raise UserError(f"{name}={shown(value)} must be {', '.join(first)} or {last}")


def auto_bits(*, of_blocks: bool = False) -> tuple[float, ...]:
    """What ``gradient_bits="auto"`` chooses from, ascending, for gradients or for what blocks of
    local updates have changed. Local."""
    codecs = {bits: codec_for(bits) for bits in registered_bits()}
    return tuple(
        bits
        for bits, codec in codecs.items()
        if codec.learns and (codec.learns_blocks or not of_blocks)
    )


def registered_codes() -> tuple[str, ...]:
    """What ``code`` may be. Local."""
    named = {code for codes in _registry.values() for code in codes if code}
    return (CODE, *sorted(named | {one.code for one in _ranges}))


def _codecs(bits: float) -> dict[str, type[Codec]]:
    """All for so many bits, by their code."""
    ranges = {one.code: one.codec for one in _ranges if one.least <= bits <= one.most}
    return {**ranges, **_registry.get(bits, {})}


def _codec(bits: float, code: str) -> type[Codec]:
    """The one with this code; the usual one, where none has it."""
    codecs = _codecs(bits)
    return codecs.get(code) or _usual.get(bits) or next(iter(codecs.values()))


def bits_with(code: str) -> str:
    """What ``gradient_bits`` must be for a code to mean anything, as errors show it. Local."""
    ranges = [f"{one.least:g} to {one.most:g}" for one in _ranges if one.code == code]
    exact = [f"{bits:g}" for bits, codecs in sorted(_registry.items()) if code in codecs]
    return " or ".join(f"gradient_bits={bits}" for bits in [*ranges, *exact])


def has_code(bits: float, code: str) -> bool:
    """Whether one of the codecs with so many bits has this code. Local."""
    return code in _codecs(bits)


def users_of(option: str) -> dict[type[Codec], str]:
    """The codecs with an option of that name, and what must be given for them. Local."""
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
    """The codec that sends `gradient_bits` bits a value, with those of the options that it has.

    Args:
        code: which of them, where several codecs send so many bits; the usual one where none of
            them has this code, as "auto".
    Raises:
        UserError: bits for which no codec is registered, or an option's value that is not known.

    >>> codec_for(0.3)
    EntropyCoded(bits=0.3, block_size=1024)
    >>> codec_for(1, code="sign")
    OneBit(block_size=1024, threshold='zero')
    """
    bits = checked_bits("gradient_bits", gradient_bits)
    codec = _codec(bits, choice("code", code, registered_codes()))
    return codec.for_bits(bits, block_size=block_size, threshold=threshold, half_format=half_format)


def codec_from_dict(options: Mapping[str, Any]) -> Codec:
    """The inverse of `Codec.to_dict`.

    Raises:
        UserError: it is no mapping, or names no codec that is registered.
    """
    every = [codec for codes in _registry.values() for codec in codes.values()]
    every += [one.codec for one in _ranges]
    codecs = {codec.__name__: codec for codec in every}
    rest = mapping("options", options, optional=False)
    name = rest.pop("name", None)
    if name not in codecs:
        raise UserError(f"codec name={name!r} must be one of {', '.join(codecs)}")
    return codecs[name](**rest)
