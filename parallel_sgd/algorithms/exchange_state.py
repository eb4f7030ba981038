"""The exchange in a training state: residuals and chosen bits, and what carries them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ..communication import Communicator, InBackground
from ..compression import AUTO, Codec, Mixed, auto_bits, registered_bits
from ..costs import Measured
from ..errors import SharedError, UserError
from ..exchange import (
    Bucket,
    Exchange,
    ExchangeOptions,
    ExchangePlan,
    OverlappedExchange,
    Projections,
    Residuals,
    choose_bits,
    choose_plan,
    cut_buckets,
    topology_for,
)
from ..kernels import body, finish_on_device
from ..parameters import Parameters
from ..second_moment import Quantized
from ..state import Component, across, workspace
from ..validation import shown

Array = Any  #: a NumPy or CuPy array

LARGEST_RESIDUAL = 1e34
"""More than what gradients that can be exchanged leave behind, on any number of ranks."""


@dataclass(kw_only=True)
class ExchangeState(Component):
    """Sums vectors of one layout over all ranks, with the bits that hold after so many samples.

    Attributes:
        residuals: what the messages of this rank have lost; None in full precision.
        bits: of each bucket, by its number, where ``gradient_bits="auto"`` has chosen them.
        projections: "sums": of the last gradient whose sum has ended, until `quantized` is asked.
        options: of the exchange.
        parameters: of the vectors' layout.
        clock: how many samples all ranks have seen.
        comm: the ranks.
        own_comm: the same for sums alone, where these may run in the background; else None.
        buckets: of the vector.
        plan: which transport the sums have, and which ranks add up first.
        measured: what bits were chosen by, unless a checkpoint has brought them.
        bits_change: whether they do so by samples.
        overlaps: whether sums may begin while their vector is still being computed.
        projecting: makes them, where the optimizer has a use for them; else None.
        current, current_bits: the exchange with its buffers, and its bits.
        background: the sum under way in the background.
        overlapped: the sum under way of a vector that is still being computed.

    Made by `init`.
    """

    residuals: Residuals | None = None
    bits: dict[str, float] | None = across("same", default=None)
    projections: dict[str, Array] = across("same", open=True, default_factory=dict)
    options: ExchangeOptions = workspace()
    parameters: Parameters = workspace()
    clock: Callable[[], int] = workspace()
    comm: Communicator = workspace()
    own_comm: Communicator | None = workspace()
    buckets: list[Bucket] = workspace()
    plan: ExchangePlan = workspace()
    measured: Measured | None = workspace(default=None)
    bits_change: bool = workspace(default=False)
    overlaps: bool = workspace(default=False)
    projecting: Projections | None = workspace(default=None)
    current: Exchange = workspace(default=None)
    current_bits: float | str = workspace(default=32)
    background: InBackground[None] | None = workspace(default=None)
    overlapped: OverlappedExchange | None = workspace(default=None)

    @classmethod
    def init(
        cls,
        options: ExchangeOptions,
        parameters: Parameters,
        clock: Callable[[], int],
        comm: Communicator,
        *,
        background: bool = False,
        overlap: bool = False,
        of_blocks: bool = False,
        projected_step: Callable[[], int] | None = None,
        choices: dict[str, Any] | None = None,
        name: str = "exchange",
    ) -> ExchangeState:
        """The state before training.

        Args:
            options: of the exchange.
            parameters: of the vectors' layout.
            clock: how many samples all ranks have seen.
            comm: the ranks.
            background: whether sums may run in the background, beside other collectives.
            overlap: whether they may begin while their vector is still being computed.
            of_blocks: whether vectors are what blocks of local updates have changed: see
                `auto_bits`.
            projected_step: see `Projections`; None where the optimizer has no use for them.
            choices: of `Work`; added to.
            name: of the exchange, among those of its algorithm.
        Raises:
            SharedError: as `ExchangeOptions.require_for` and `choose_plan`; or MPI does not allow
                sums in the background.

        Collective.
        """
        comm.together(lambda: options.require_for(parameters))
        own = comm.duplicate() if background or overlap else None
        try:
            named = Choices({} if choices is None else choices, name)
            state = cls._init(options, parameters, clock, comm, own, of_blocks, overlap, named)
        except SharedError:
            if own is not None:
                own.close()
            raise
        if projected_step is not None and options.has_entropy_code:
            state.projecting = Projections(parameters.flat, own or comm, projected_step)
        if overlap:
            thread = f"gradient exchange of rank {comm.rank}"
            state.overlapped = OverlappedExchange(state.buckets, thread)
            if state.projecting is not None:
                state.overlapped.on_complete = state.projecting.add
        return state

    @classmethod
    def _init(
        cls,
        options: ExchangeOptions,
        parameters: Parameters,
        clock: Callable[[], int],
        comm: Communicator,
        own_comm: Communicator | None,
        of_blocks: bool,
        overlaps: bool,
        choices: Choices,
    ) -> ExchangeState:
        block_size, route = options.compression.block_size, options.route
        starts = options.codec(32).blocks(parameters).starts
        buckets = cut_buckets(parameters, block_size, route.bucket_values, starts)
        chosen, measured = None, None
        if AUTO in options.all_bits:
            flat = route.transport == "collective"
            topology = topology_for(comm.hosts, False if flat else route.hierarchical)
            chosen = choices["bits"]
            if chosen is None:
                chosen, measured = choose_bits(
                    buckets,
                    parameters,
                    own_comm or comm,
                    topology,
                    block_size,
                    auto_bits(of_blocks=of_blocks),
                )
                choices["bits"] = chosen
        bits = options.bits_after(0)
        codecs = _codecs(options, chosen, bits, len(buckets))
        sizes = [bucket.values.stop - bucket.values.start for bucket in buckets]
        largest = sizes.index(max(sizes))
        codec = codecs[largest]
        if isinstance(codec, Mixed):  # try what most values have
            size, name = max((parameters[name].size, name) for name in buckets[largest].names)
            codec = codec.codec_of(name, size)
        plan = choose_plan(
            parameters,
            own_comm or comm,
            route.transport,
            route.hierarchical,
            codec=codec,
            lossless=options.lossless,
            chosen=choices["transport"],
        )
        choices["transport"] = plan.choice
        state = cls(
            bits=chosen,
            options=options,
            parameters=parameters,
            clock=clock,
            comm=comm,
            own_comm=own_comm,
            buckets=buckets,
            plan=plan,
            measured=measured,
            bits_change=isinstance(options.gradient_bits, Mapping),
            overlaps=overlaps,
        )
        state.current = state._exchange(bits)
        if not options.lossless:
            state.residuals = state.current.residuals(parameters)
        return state

    def sum(self, vector: Array) -> None:
        """Replace `vector` by (the decoded form of) its sum over all ranks. Collective.

        Args:
            vector: [n] of the parameters' dtype, finite; on return the same bits on all ranks.
        """
        exchange = self._at_present()
        self._project(exchange, vector)
        exchange.sum(vector, self.residuals)
        self._sum_projections()

    def _project(self, exchange: Exchange, vector: Array) -> None:
        """A gradient that the exchange is about to sum. Local."""
        if self.projecting is not None:
            self.projecting.begin(exchange.quantized)
            self.projecting.add(vector, slice(0, vector.size))

    def _sum_projections(self) -> None:
        """Collective, after a sum."""
        self.projections.clear()
        sums = None if self.projecting is None else self.projecting.sum()
        if sums is not None:
            self.projections["sums"] = sums

    def quantized(self) -> Quantized | None:
        """How the last sum that has ended was quantized; projections are told once. Local."""
        places = self.current.quantized
        return Quantized(places, self.projections.pop("sums", None)) if places else None

    def begin_sum(self, vector: Array, name: str, clock: int | None = None) -> None:
        """`sum` in the background, until `wait`: nobody may touch the vector meanwhile.

        Args:
            name: of the sum, for whoever looks at this rank's threads.
            clock: by which the bits go; the present one if not given.
        """
        exchange = self._at_present(clock)
        self._project(exchange, vector)
        finish_on_device(vector)
        summed = partial(exchange.sum_in_background, vector, self.residuals)
        self.background = InBackground(f"{name} of rank {self.comm.rank}", summed)

    def wait(self) -> None:
        if self.background is not None:
            self.background.result()
            self.background = None
            self._sum_projections()

    def ready(self, name: str, vector: Array) -> None:
        """With overlap: some of the values, a parameter's, are there; begin to sum them. Local."""
        self._begun_overlapped(vector).ready(name, self.fewest_bits)

    def finish_overlapped(self, vector: Array) -> None:
        """With overlap: `sum` of a vector of which all values are there, and this or another rank
        has begun. Collective."""
        overlapped = self._begun_overlapped(vector)
        overlapped.all_ready(32)
        overlapped.finish()
        self._sum_projections()

    def _begun_overlapped(self, vector: Array) -> OverlappedExchange:
        assert self.overlapped is not None
        if not self.overlapped.running:
            exchange = self._at_present()
            if self.projecting is not None:
                self.projecting.begin(exchange.quantized)
            self.overlapped.begin(exchange, vector, self.residuals)
        return self.overlapped

    def drain(self) -> None:
        if self.overlapped is not None:
            exchange = self._at_present()
            empty = self.parameters.like
            self.overlapped.drain(exchange, lambda: empty().flat, self.residuals, self.comm)

    def abandon(self) -> None:
        if self.overlapped is not None:
            self.overlapped.abandon()
        if self.background is not None:
            self.background.error()
            self.background = None

    @property
    def fewest_bits(self) -> float:
        """Of any value, in an exchange now. Local."""
        usual: Any = [*(self.bits or {}).values()] or [self.options.bits_after(self.clock())]
        fewest: float = min([*usual, *self.options.bits_of.values()])
        return fewest

    @property
    def bytes_sent(self) -> int:
        self.wait()  # what is counted does not depend on how far it has come
        projections = 0 if self.projecting is None else self.projecting.bytes_sent
        return self.current.bytes_sent + projections

    def values_by_bits(self) -> dict[float, int]:
        """How many values travel with so many bits, where ``gradient_bits="auto"`` has chosen."""
        values: dict[float, int] = {}
        for number, bits in (self.bits or {}).items():
            for name in self.buckets[int(number)].names:
                size = self.parameters[name].size
                own = self.options.bits_of.value_of(name, size) or bits
                values[own] = values.get(own, 0) + size
        return dict(sorted(values.items()))

    def report(self) -> dict[str, Any] | None:
        """What "auto" has chosen, and by what: the way of messages, and how many values have so
        many bits. None on one rank."""
        if self.comm.size == 1:
            return None
        report = self.plan.as_dict()
        if self.bits is not None:
            report["gradient_bits"] = {str(b): n for b, n in self.values_by_bits().items()}
            report |= self.measured.as_dict() if self.measured else {}
        return report

    def check(self, saved: Mapping[str, Any], ranks: int) -> None:
        if self.residuals is None:
            if saved["residuals"] is not None:
                raise UserError("has residuals, which full precision has not")
        else:
            had, has = saved["residuals"]["owner_error"].keys(), self.residuals.owner_error.keys()
            if had != has:
                raise UserError(f"has residuals of buckets {[*had]}, but there are {[*has]}")
            saved_errors = (
                saved["residuals"]["worker_error"],
                *saved["residuals"]["owner_error"].values(),
            )
            for error in saved_errors:
                largest = body(error).largest_magnitude(error)
                if not largest <= LARGEST_RESIDUAL:
                    raise UserError(f"has residuals of up to {largest}, which no message leaves")
        bits, buckets = saved["bits"], {str(number) for number in range(len(self.buckets))}
        possible = {*registered_bits()}
        if (bits is None) != (self.bits is None):
            raise UserError(f"has bits={shown(bits)}, unlike these options")
        if bits is not None and (bits.keys() != buckets or not {*bits.values()} <= possible):
            raise UserError(f"has bits={shown(bits)}, which must be of each bucket")

    def restored(self) -> None:
        self.measured = None
        # A bucket's bits may be other ones, or its sender.
        self._replace(self.options.bits_after(self.clock()))
        if self.residuals is not None:
            self.residuals.has_non_owned = True

    def close(self, *, failed: bool = False) -> None:
        if failed and self.overlapped is not None and self.overlapped.running:
            return  # to its end with the program's: nobody knows who else has begun
        try:
            if not failed:
                self.drain()
            self.wait()
        finally:
            self.current.close()
            if self.projecting is not None:
                self.projecting.close()
            self.plan.close()
            if self.own_comm is not None:
                self.own_comm.close()

    def _at_present(self, clock: int | None = None) -> Exchange:
        """The exchange; where the bits change, in place of the one before. Local."""
        if self.bits_change:
            bits = self.options.bits_after(self.clock() if clock is None else clock)
            if bits != self.current_bits:
                self._replace(bits)
        return self.current

    def _replace(self, bits: float | str) -> None:
        self.wait()  # what is under way is counted by the exchange that does it
        before, self.current = self.current, self._exchange(bits)
        self.current.carry_over_bytes_sent(before)

    def _exchange(self, bits: float | str) -> Exchange:
        self.current_bits, compression = bits, self.options.compression
        return Exchange(
            self.parameters,
            self.own_comm or self.comm,
            _codecs(self.options, self.bits, bits, len(self.buckets)),
            buckets=self.buckets,
            transport=self.plan.transport,
            topology=self.plan.topology,
            error_feedback=compression.error_feedback,
            block_size=compression.block_size,
            overlapped=self.overlaps,
            nccl=self.plan.nccl,
        )


class Choices:
    """What measurements for one exchange have chosen, among all choices of an algorithm."""

    def __init__(self, choices: dict[str, Any], name: str) -> None:
        self._choices, self._name = choices, name

    def __getitem__(self, what: str) -> Any:
        return self._choices.get(f"{what} of the {self._name}")

    def __setitem__(self, what: str, chosen: Any) -> None:
        if chosen is not None:
            self._choices[f"{what} of the {self._name}"] = chosen


def _codecs(
    options: ExchangeOptions, chosen: Mapping[str, float] | None, bits: float | str, buckets: int
) -> list[Codec | None]:
    """Of each bucket. Full precision needs none where nothing was ever lost."""
    of_buckets = [chosen[str(i)] if chosen else cast(float, bits) for i in range(buckets)]
    lossless = options.lossless or (chosen is not None and not options.bits_of)
    return [None if b == 32 and lossless else options.codec(b) for b in of_buckets]
