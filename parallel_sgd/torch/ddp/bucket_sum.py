"""The sum of a single DDP bucket over all ranks, with residuals by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ...communication import Communicator
from ...exchange import Exchange, ExchangeOptions, ExchangePlan
from ...kernels import array_module
from ...parameters import Parameters

Array = Any  #: a NumPy or CuPy array


@dataclass(frozen=True)
class ParameterResidual:
    """The compression error of one rank's messages for one parameter; see `exchange.Residuals`.

    Attributes:
        worker_error: [values of the parameter], of this rank's messages to owners.
        owner_error: [some values of the parameter], of this rank's messages as their owner.
        owner_begin: position of `owner_error` in the parameter.
    """

    worker_error: Array
    owner_error: Array
    owner_begin: int


class BucketSum:
    """Sum a bucket over all ranks, repeatedly, with residuals by parameter.

    Args:
        sizes: sizes of the bucket's parameters by name, in the order of the bucket.
        vector: [n] the bucket, of which only kind and dtype are used.
        comm: the ranks; not for any other use while a sum is in progress.
        options: of the exchange.
        plan: of the exchange.
        bits: per value, for parameters without bits of their own.

    Attributes:
        sizes: as given.

    Creation is local. Memory: see `Exchange`, plus residuals unless the exchange is lossless.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        vector: Array,
        comm: Communicator,
        options: ExchangeOptions,
        plan: ExchangePlan,
        bits: float,
    ) -> None:
        self.sizes = dict(sizes)
        ends = accumulate(sizes.values())
        self._places = {
            name: slice(end - size, end)
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        self._comm, self._options, self._plan, self._bits = comm, options, plan, bits
        self._lossless = options.lossless or vector.dtype != np.float32
        layout = self._layout(vector)
        self._exchange = self._exchange_of(layout)
        self._residuals = None if self._lossless else self._exchange.residuals(layout)

    def use(self, bits: float, vector: Array) -> None:
        """Set the bits per value from now on. Residuals stay. Local."""
        if bits != self._bits:
            self._bits, before = bits, self._exchange
            self._exchange = self._exchange_of(self._layout(vector))
            self._exchange.carry_over_bytes_sent(before)

    @property
    def fewest_bits(self) -> float:
        """The smallest number of bits of any value."""
        (codec,) = self._exchange.codecs
        return 32 if codec is None else codec.bits

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank. Local."""
        return self._exchange.bytes_sent

    def mean(self, vector: Array) -> None:
        """Replace `vector` by its mean over all ranks.

        Args:
            vector: [n] finite, on the current device. On return it is bitwise equal on all ranks,
                and its GPU is done.

        Collective.
        """
        self._exchange.sum_in_background(vector, self._residuals)
        vector /= self._comm.size

    def scale_residuals(self, factor: float) -> None:
        """Multiply the residuals by `factor`, as the unit of gradients changes. Local."""
        if self._residuals is not None:
            self._residuals.worker_error *= factor
            for error in self._residuals.owner_error.values():
                error *= factor

    def residuals(self) -> dict[str, ParameterResidual]:
        """Return the residual of every parameter, by name: views, changed by the next sum.
        Local.
        """
        if self._residuals is None:
            return {}
        owned, error = self._owned
        kept = {}
        for name, place in self._places.items():
            begin, end = _common(owned, place)
            kept[name] = ParameterResidual(
                self._residuals.worker_error[place],
                error[begin - owned.start : end - owned.start],
                begin - place.start,
            )
        return kept

    def set_residuals(self, kept: Mapping[str, ParameterResidual]) -> None:
        """Replace the residuals; zeros for parameters without a given residual.

        An owner error for values no longer owned by this rank becomes a worker error, sent to the
        values' present owner in the next sum. So the sum of all residuals over all ranks is
        conserved, and nothing changes for values still owned by this rank. Local.
        """
        if self._residuals is None:
            return
        self._residuals.reset()
        self._residuals.has_non_owned = True  # the host's leader may have changed
        worker, (owned, error) = self._residuals.worker_error, self._owned
        xp = array_module(worker)
        for name, place in self._places.items():
            if name not in kept:
                continue
            residual = kept[name]
            worker[place] += xp.asarray(residual.worker_error)
            lost, first = xp.asarray(residual.owner_error), place.start + residual.owner_begin
            begin, end = _common(owned, slice(first, first + lost.size))
            error[begin - owned.start : end - owned.start] += lost[begin - first : end - first]
            worker[first:begin] += lost[: begin - first]
            worker[end : first + lost.size] += lost[end - first :]

    def close(self) -> None:
        """Free all buffers. Local."""
        self._exchange.close()

    @property
    def _owned(self) -> tuple[slice, Array]:
        """This rank's stripe of the bucket, and the owner error of the stripe."""
        assert self._residuals is not None
        ((name, owned),) = self._exchange.owned.items()
        return owned, self._residuals.owner_error[name]

    def _layout(self, vector: Array) -> Parameters:
        return Parameters({name: vector[place] for name, place in self._places.items()})

    def _exchange_of(self, layout: Parameters) -> Exchange:
        options, plan = self._options, self._plan
        return Exchange(
            layout,
            self._comm,
            None if self._lossless else options.codec(self._bits),
            transport=plan.transport,
            topology=plan.topology,
            residual_decay=options.compression.decay,
            block_size=options.compression.block_size,
            nccl=plan.nccl,
        )


def _common(owned: slice, place: slice) -> tuple[int, int]:
    """Return begin and end of the overlap of two slices; an empty range within both if disjoint."""
    begin = min(max(owned.start, place.start), place.stop)
    return begin, max(begin, min(owned.stop, place.stop))
