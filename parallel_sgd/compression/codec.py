"""What a codec is, and the registry of codecs by their bits a value."""

from __future__ import annotations

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
        block_size: values that share quantization levels; and where a vector may be cut.
    """

    bits: ClassVar[float]
    learns: ClassVar[bool] = True
    learns_blocks: ClassVar[bool] = True
    block_size: int = 1024

    def __post_init__(self) -> None:
        set_validated(self, block_size=integer("block_size", self.block_size, 1, 2**20))

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


_registry: dict[float, dict[str, type[Codec]]] = {}  # by bits, and by code where there are several

CODE = "largest"
"""Which of several codecs with the same bits is meant where nothing is said."""


def register(*bits: float, code: str = "") -> Callable[[type[CodecT]], type[CodecT]]:
    """Decorates a subclass of `Codec`: ``gradient_bits`` of any of these numbers means it.

    Its fields are its options. Those that `codec_for` has by the same name are passed on, `bits`
    among them. Whatever goes by bits goes by the registry: the check of ``gradient_bits``, what
    "auto" chooses from, and the measurement of kernels. Register on all ranks alike.

    Args:
        bits: a value, more than 0; a fraction where several values share a bit.
        code: its name beside other codecs with the same bits, of which the option ``code`` chooses.
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
            if code in others or (others and "" in (code, *others)):
                taken = others.get(code) or next(iter(others.values()))
                named = f" and code={code!r}" if code and code in others else ""
                raise UserError(
                    f"{codec.__name__}: {taken.__name__} is registered for {count} bits{named}"
                )
        for count in numbers:
            _registry.setdefault(count, {})[code] = codec
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
    for bits in registered_bits():
        left = {code: other for code, other in _registry[bits].items() if other is not codec}
        if left:
            _registry[bits] = left
        else:
            del _registry[bits]


def registered_bits() -> tuple[float, ...]:
    """What ``gradient_bits`` may be, ascending. Local."""
    return tuple(sorted(_registry))


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
    """What ``code`` may be: of all bits with which there are several codecs. Local."""
    several = (codes for codes in _registry.values() if len(codes) > 1)
    return tuple(sorted({code for codes in several for code in codes}))


def _codec(bits: float, code: str) -> type[Codec] | None:
    codes = _registry[bits]
    return next(iter(codes.values())) if len(codes) == 1 else codes.get(code)


def users_of(option: str, code: str | None = None) -> dict[float, str]:
    """The bits whose codec has an option of that name, and the code that takes; "" for any.

    Args:
        code: look at the codecs of this code only.

    Local.
    """
    found: dict[float, str] = {}
    for bits in registered_bits():
        several = len(_registry[bits]) > 1
        if option == "code":
            if several:
                found[bits] = ""
            continue
        for name, codec in _registry[bits].items():
            looked_at = code is None or not several or name == code
            if looked_at and option in {field.name for field in fields(codec)}:
                found[bits] = name if several else ""
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
        code: which of them, where several codecs send so many bits.
    Raises:
        UserError: bits for which no codec is registered, or an option's value that is not known.

    >>> codec_for(1)
    OneOf(block_size=1024, group=8)
    >>> codec_for(1, code="sign")
    OneBit(block_size=1024, threshold='zero')
    """
    bits = choice("gradient_bits", gradient_bits, registered_bits())
    codec = _codec(bits, choice("code", code, registered_codes()))
    if codec is None:
        raise UserError(f"code={code!r} must be one of {', '.join(map(repr, _registry[bits]))}")
    return codec.for_bits(bits, block_size=block_size, threshold=threshold, half_format=half_format)


def codec_from_dict(options: Mapping[str, Any]) -> Codec:
    """The inverse of `Codec.to_dict`.

    Raises:
        UserError: it is no mapping, or names no codec that is registered.
    """
    every = [codec for codes in _registry.values() for codec in codes.values()]
    codecs = {codec.__name__: codec for codec in every}
    rest = mapping("options", options, optional=False)
    name = rest.pop("name", None)
    if name not in codecs:
        raise UserError(f"codec name={name!r} must be one of {', '.join(codecs)}")
    return codecs[name](**rest)
