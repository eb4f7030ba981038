"""What a codec is, and the registry of codecs by their bits a value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

from ..errors import UserError
from ..kernels import Blocks
from ..parameters import Parameters
from ..validation import choice, integer, set_validated

Array = Any  #: a NumPy or CuPy array


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
        block_size: values that share quantization levels; and where a vector may be cut.
    """

    bits: ClassVar[float]
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

    def to_dict(self) -> dict[str, Any]:
        """The options and the codec's name, as JSON can hold them: see `codec_from_dict`."""
        return {"name": type(self).__name__, **asdict(self)}


CodecT = TypeVar("CodecT", bound=Codec)

_registry: dict[float, type[Codec]] = {}


def register(*bits: float) -> Callable[[type[CodecT]], type[CodecT]]:
    """Decorates a subclass of `Codec`: ``gradient_bits`` of any of these numbers means it.

    Its fields are its options. Those that `codec_for` has by the same name are passed on, `bits`
    among them. Whatever goes by bits goes by the registry: the check of ``gradient_bits``, what
    "auto" chooses from, and the measurement of kernels. Register on all ranks alike.

    Args:
        bits: a value, more than 0; a fraction where several values share a bit.
    Raises:
        UserError: they are another codec's.

    Local. A codec is one file: its three kernels for NumPy, Numba and CUDA, and this line.
    """

    def registered(codec: type[CodecT]) -> type[CodecT]:
        for number in bits:
            assert number > 0, number
            if number in _registry:
                taken = _registry[number].__name__
                raise UserError(f"{codec.__name__}: {taken} is registered for {number} bits")
        _registry.update(dict.fromkeys(bits, codec))
        return codec

    return registered


def unregister(codec: type[Codec]) -> None:
    """Take a codec out of the registry. Local."""
    for bits in registered_bits():
        if _registry[bits] is codec:
            del _registry[bits]


def registered_bits() -> tuple[float, ...]:
    """What ``gradient_bits`` may be, ascending. Local."""
    return tuple(sorted(_registry))


def bits_with(option: str) -> tuple[float, ...]:
    """Those whose codec has an option of that name. Local."""
    has = {bits: {field.name for field in fields(_registry[bits])} for bits in registered_bits()}
    return tuple(bits for bits, names in has.items() if option in names)


def codec_for(
    gradient_bits: float,
    *,
    block_size: int = 1024,
    threshold: str = "zero",
    half_format: str = "float16",
) -> Codec:
    """The codec that sends `gradient_bits` bits a value, with those of the options that it has.

    Raises:
        UserError: bits for which no codec is registered, or an option's value that is not known.

    >>> codec_for(1)
    OneBit(block_size=1024, threshold='zero')
    """
    bits = choice("gradient_bits", gradient_bits, registered_bits())
    codec = _registry[bits]
    options: dict[str, Any] = {
        "bits": bits,
        "block_size": block_size,
        "threshold": threshold,
        "half_format": half_format,
    }
    names = {field.name for field in fields(codec)}
    return codec(**{name: value for name, value in options.items() if name in names})


def codec_from_dict(options: Mapping[str, Any]) -> Codec:
    """The inverse of `Codec.to_dict`."""
    codecs = {_registry[bits].__name__: _registry[bits] for bits in registered_bits()}
    rest = dict(options)
    name = rest.pop("name", None)
    if name not in codecs:
        raise UserError(f"codec name={name!r} must be one of {', '.join(codecs)}")
    return codecs[name](**rest)
