"""The step sizes of an exchange with an entropy code: one for all values that are encoded together.

A rank finds one step size for its messages to owners, and another for its messages as an owner,
once all of the values are present. If buckets are sent while later buckets are still being
computed, each bucket has step sizes of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..compression import Allowance, EntropyCoded
from .residuals import Residuals

Array = Any  #: a NumPy or CuPy array


class Span(NamedTuple):
    """Consecutive values with the same codec.

    Attributes:
        codec: of the values.
        bucket: the name in `Residuals.owner_error`; "" for values in the vector.
        values: a slice of the vector, or of the owner's stripe of the bucket.
    """

    codec: EntropyCoded
    bucket: str
    values: slice


class StepSizes:
    """Finds the step sizes, once for each sum.

    Args:
        sent: the values that this rank encodes for owners.
        owned: the values that this rank encodes as an owner.

    Local.
    """

    def __init__(self, sent: Iterable[Span], owned: Iterable[Span]) -> None:
        self._sent, self._owned = _by_codec(sent), _by_codec(owned)
        self._found: dict[tuple[EntropyCoded, bool], Allowance] = {}

    def begin(self) -> None:
        """Discard the step sizes of the previous sum."""
        self._found = {}

    def of_worker(self, codec: EntropyCoded, vector: Array, residuals: Residuals) -> Allowance:
        """Return the step for values sent to owners. All of these must be in `vector`."""
        if (codec, False) not in self._found:
            places = [span.values for span in self._sent[codec]]
            pairs = [(vector[place], residuals.worker_error[place]) for place in places]
            self._found[codec, False] = Allowance(codec, pairs)
        return self._found[codec, False]

    def of_owner(self, codec: EntropyCoded, residuals: Residuals) -> Allowance:
        """Return the step for sums owned by this rank. All of these must be in `owner_error`."""
        if (codec, True) not in self._found:
            errors = residuals.owner_error
            pairs = [(None, errors[span.bucket][span.values]) for span in self._owned[codec]]
            self._found[codec, True] = Allowance(codec, pairs)
        return self._found[codec, True]


def _by_codec(spans: Iterable[Span]) -> dict[EntropyCoded, list[Span]]:
    """Group spans by codec, and merge adjacent spans."""
    by_codec: dict[EntropyCoded, list[Span]] = {}
    for span in spans:
        before = by_codec.setdefault(span.codec, [])
        last = before[-1] if before else None
        if last and (last.bucket, last.values.stop) == (span.bucket, span.values.start):
            before[-1] = last._replace(values=slice(last.values.start, span.values.stop))
        else:
            before.append(span)
    return by_codec
