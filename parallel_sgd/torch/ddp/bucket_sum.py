"""One of DDP's buckets: its sum over all ranks, and what is kept of it by parameter."""

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
    """What one rank's messages of one parameter have lost so far; see `exchange.Residuals`.

    Attributes:
        worker_error: [values of the parameter], of this rank's messages to owners.
        owner_error: [some of them], of its messages as their owner.
        owner_begin: where these begin in the parameter.
    """

    worker_error: Array
    owner_error: Array
    owner_begin: int


class BucketSum:
    """Sums one bucket over all ranks, time and again, with residuals that know their parameters.

    Args:
        sizes: of the bucket's parameters by name, in the order in which they lie in it.
        vector: [n] of the bucket, of which only kind and dtype count.
        comm: the ranks; nothing else may use it while a sum is under way.
        options: of the exchange.
        plan: of the exchange.
        bits: a value, for parameters without bits of their own.

    Attributes:
        sizes: as given.

    Creation is local. Memory: as `Exchange`, and residuals unless nothing is ever lost.
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
        """From now on send so many bits a value. Residuals stay. Local."""
        if bits != self._bits:
            self._bits, before = bits, self._exchange
            self._exchange = self._exchange_of(self._layout(vector))
            self._exchange.carry_over_bytes_sent(before)

    @property
    def fewest_bits(self) -> float:
        """Of any value."""
        (codec,) = self._exchange.codecs
        return 32 if codec is None else codec.bits

    @property
    def bytes_sent(self) -> int:
        """By this rank to others. Local."""
        return self._exchange.bytes_sent

    def mean(self, vector: Array) -> None:
        """Replace `vector` by its sum over all ranks, divided by their number.

        Args:
            vector: [n] finite, on the current device; the same bits on all ranks on return, and
                done on its GPU.

        Collective.
        """
        self._exchange.sum_in_background(vector, self._residuals)
        vector /= self._comm.size

    def scale_residuals(self, factor: float) -> None:
        """As the unit of what is summed changes. Local."""
        if self._residuals is not None:
            self._residuals.worker_error *= factor
            for error in self._residuals.owner_error.values():
                error *= factor

    def residuals(self) -> dict[str, ParameterResidual]:
        """Of every parameter by name: views, which the next sum changes. Local."""
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
        """Go on with these; zero for parameters that have none.

        The owner's error of values that this rank does not own any more becomes a worker's: it
        is sent to their owner with the next sum. So the sum of all residuals over all ranks is
        conserved, and where this rank owns what it did everything stays as it was. Local.
        """
        if self._residuals is None:
            return
        self._residuals.reset()
        self._residuals.has_non_owned = True  # another rank of the host may lead now
        worker, (owned, error) = self._residuals.worker_error, self._owned
        xp = array_module(worker)
        for name, place in self._places.items():
            if name not in kept:
                continue
            one = kept[name]
            worker[place] += xp.asarray(one.worker_error)
            lost, first = xp.asarray(one.owner_error), place.start + one.owner_begin
            begin, end = _common(owned, slice(first, first + lost.size))
            error[begin - owned.start : end - owned.start] += lost[begin - first : end - first]
            worker[first:begin] += lost[: begin - first]
            worker[end : first + lost.size] += lost[end - first :]

    def close(self) -> None:
        """Let go of all buffers. Local."""
        self._exchange.close()

    @property
    def _owned(self) -> tuple[slice, Array]:
        """Where this rank's stripe lies in the bucket, and its owner's error."""
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
            error_feedback=options.compression.error_feedback,
            block_size=options.compression.block_size,
            nccl=plan.nccl,
        )


def _common(owned: slice, place: slice) -> tuple[int, int]:
    """Where what both slices have begins and ends; an empty place within both bounds if nothing."""
    begin = min(max(owned.start, place.start), place.stop)
    return begin, max(begin, min(owned.stop, place.stop))
