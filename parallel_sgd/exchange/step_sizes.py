"""The steps of quantization in an exchange with an entropy code: one for all of a vector.

A rank finds a step for what it sends to owners, and another one for what it sends as an owner, when
all values are there. Where buckets are sent while others are still being computed, each bucket has
steps of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..compression import Allowance, EntropyCoded
from .residuals import Residuals

Array = Any  #: a NumPy or CuPy array


class Span(NamedTuple):
    """Consecutive values with one codec.

    Attributes:
        bucket: whose values they are, by the name in `Residuals.owner_error`; "" for the vector.
        values: in the vector, or in an owner's stripe of the bucket.
    """

    codec: EntropyCoded
    bucket: str
    values: slice


class StepSizes:
    """Finds steps, once for each sum.

    Args:
        sent: what this rank encodes for owners.
        owned: what it encodes as an owner.

    Local.
    """

    def __init__(self, sent: Iterable[Span], owned: Iterable[Span]) -> None:
        self._sent, self._owned = _by_codec(sent), _by_codec(owned)
        self._found: dict[tuple[EntropyCoded, bool], Allowance] = {}

    def begin(self) -> None:
        """Another sum begins."""
        self._found = {}

    def of_worker(self, codec: EntropyCoded, vector: Array, residuals: Residuals) -> Allowance:
        """For values that this rank sends to owners, of which all are in `vector`."""
        if (codec, False) not in self._found:
            places = [span.values for span in self._sent[codec]]
            pairs = [(vector[place], residuals.worker_error[place]) for place in places]
            self._found[codec, False] = Allowance(codec, pairs)
        return self._found[codec, False]

    def of_owner(self, codec: EntropyCoded, residuals: Residuals) -> Allowance:
        """For the sums that this rank owns, of which all are in the owner's error."""
        if (codec, True) not in self._found:
            errors = residuals.owner_error
            pairs = [(None, errors[span.bucket][span.values]) for span in self._owned[codec]]
            self._found[codec, True] = Allowance(codec, pairs)
        return self._found[codec, True]


def _by_codec(spans: Iterable[Span]) -> dict[EntropyCoded, list[Span]]:
    """With neighbours as one span."""
    by_codec: dict[EntropyCoded, list[Span]] = {}
    for span in spans:
        before = by_codec.setdefault(span.codec, [])
        last = before[-1] if before else None
        if last and (last.bucket, last.values.stop) == (span.bucket, span.values.start):
            before[-1] = last._replace(values=slice(last.values.start, span.values.stop))
        else:
            before.append(span)
    return by_codec
