"""The exchange as a part of a training state: residuals, chosen bits, and the exchange itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..communication import Communicator, InBackground
from ..compression import registered_bits
from ..costs import Measured
from ..errors import UserError
from ..exchange import (
    Bucket,
    Exchange,
    ExchangeOptions,
    ExchangePlan,
    OverlappedExchange,
    Projections,
    Residuals,
)
from ..kernels import body, finish_on_device
from ..parameters import Parameters
from ..second_moment import Quantized
from ..state import Component, across, workspace
from ..validation import shown
from .exchange_choices import choose, codecs_of

Array = Any  #: a NumPy or CuPy array

LARGEST_RESIDUAL = 1e34
"""Larger than the residual of any valid gradient, on any number of ranks."""


@dataclass(kw_only=True)
class ExchangeState(Component):
    """Sums vectors of a fixed layout over all ranks, with bits by the clock.

    Created by `init`.

    Attributes:
        residuals: quantization errors of this rank's messages; None in full precision.
        bits: of each bucket, by number, chosen by ``gradient_bits="auto"``.
        projections: "sums": of the latest completed gradient sum, until `quantized` is called.
        options: of the exchange.
        parameters: layout of the vectors.
        clock: returns the number of samples seen by all ranks.
        comm: the ranks.
        own_comm: a duplicate of `comm` for sums that may run in the background; else None.
        buckets: of the vector.
        plan: transport and topology of the sums.
        measured: the measurement behind `bits`; None after loading a checkpoint.
        bits_change: True if bits depend on the clock.
        overlaps: True if sums may begin during the computation of their vector.
        projecting: computes projections for the optimizer; None if not needed.
        current, current_bits: the exchange with its buffers, and its bits.
        background: the sum under way in the background, or the latest.
        background_part: the part of the vector that it sums.
        overlapped: the sum under way of a vector that is still being computed.
        members: the ranks of the sums, if not all: see `sum_over`.
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
    background_part: int = workspace(default=0)
    overlapped: OverlappedExchange | None = workspace(default=None)
    members: Communicator | None = workspace(default=None)

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
        fragments: int = 1,
    ) -> ExchangeState:
        """Return the state before training.

        Args:
            options: of the exchange.
            parameters: layout of the vectors.
            clock: returns the number of samples seen by all ranks.
            comm: the ranks.
            background: True if sums may run in the background, at the same time as other
                collectives.
            overlap: True if sums may begin during the computation of their vector.
            of_blocks: True if vectors are the changes of blocks of local updates: see `auto_bits`.
            projected_step: see `Projections`; None if the optimizer needs no projections.
            choices: of `Work`; changed.
            name: of the exchange, unique within its algorithm.
            fragments: number of parts of the vector, each summed by itself.
        Raises:
            SharedError: as `ExchangeOptions.require_for`, `choose_plan` and `cut_buckets`; or MPI
                does not support sums in the background.

        Collective.
        """
        comm.together(lambda: options.require_for(parameters))
        own = comm.duplicate() if background or overlap else None
        try:
            earlier = {} if choices is None else choices
            chosen = choose(
                options, parameters, own or comm, of_blocks, overlap, earlier, name, fragments
            )
            state = cls(
                bits=chosen.bits,
                options=options,
                parameters=parameters,
                clock=clock,
                comm=comm,
                own_comm=own,
                buckets=chosen.buckets,
                plan=chosen.plan,
                measured=chosen.measured,
                bits_change=isinstance(options.gradient_bits, Mapping),
                overlaps=overlap,
            )
            state.current = state._exchange(options.bits_after(0))
        except UserError:  # on all ranks
            if own is not None:
                own.close()
            raise
        if not options.lossless:
            state.residuals = state.current.residuals(parameters)
        if projected_step is not None and options.has_entropy_code:
            state.projecting = Projections(parameters.flat, own or comm, projected_step)
        if overlap:
            thread = f"gradient exchange of rank {comm.rank}"
            state.overlapped = OverlappedExchange(state.buckets, thread)
            if state.projecting is not None:
                state.overlapped.on_complete = state.projecting.add
        return state

    @property
    def parts(self) -> list[slice]:
        """The slice of the vector of each part, in the order of the vector."""
        parts: dict[int, slice] = {}
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.values.start):
            first = parts.get(bucket.part, bucket.values)
            parts[bucket.part] = slice(first.start, bucket.values.stop)
        return [*parts.values()]

    def sum(self, vector: Array, part: int = 0, clock: int | None = None) -> None:
        """Replace a part of `vector` by (the decoded form of) its sum over all ranks. Collective.

        Args:
            vector: [n] of the parameters' dtype, finite; on return the part has the same bits on
                all ranks.
            part: its number, of `fragments`.
            clock: determines the bits. Default: the present clock.

        Waits for a sum of another part in the background: both use the same communicator.
        """
        self.wait()
        exchange = self._present_exchange(clock)
        self._project(exchange, vector)
        exchange.sum(vector, self.residuals, part=part)
        self._sum_projections()

    def sum_over(self, ranks: Communicator) -> None:
        """Sum over these ranks from now on: all ranks of the state, or a `Subset`. Local.

        The stripes change. The error of this rank's sums is added to the error of its own messages,
        so that it is sent with the next of these, and nothing is lost.
        """
        if [*ranks.world_ranks] == [*self.current.comm.world_ranks]:
            return
        residuals = self.residuals
        if residuals is not None:
            residuals.give_owned(self.current.owned)
        self.members = None if ranks is self.comm else ranks
        self._replace(self.current_bits)
        if residuals is not None:
            residuals.cut(self.current.owned)

    def _project(self, exchange: Exchange, vector: Array) -> None:
        """Begin the projections of a gradient before its sum. Local."""
        if self.projecting is not None:
            self.projecting.begin(exchange.quantized)
            self.projecting.add(vector, slice(0, vector.size))

    def _sum_projections(self) -> None:
        """Sum the projections after a sum. Collective."""
        self.projections.clear()
        sums = None if self.projecting is None else self.projecting.sum()
        if sums is not None:
            self.projections["sums"] = sums

    def quantized(self) -> Quantized | None:
        """Return the quantization of the latest sum. Projections are returned once. Local."""
        places = self.current.quantized
        return Quantized(places, self.projections.pop("sums", None)) if places else None

    def begin_sum(self, vector: Array, name: str, clock: int | None = None, part: int = 0) -> None:
        """Start `sum` in the background, after the sum of another part. The part of the vector must
        not be used until `wait`.

        Args:
            vector: [n], as for `sum`.
            name: of the sum, in lists of this rank's threads.
            clock: determines the bits. Default: the present clock.
            part: as for `sum`.
        """
        self.wait()
        exchange = self._present_exchange(clock)
        self._project(exchange, vector)
        finish_on_device(vector)
        summed = partial(exchange.sum_in_background, vector, self.residuals, part=part)
        self.background = InBackground(f"{name} of rank {self.comm.rank}", summed)
        self.background_part = part

    def wait(self, part: int | None = None) -> None:
        """See `Component`. With `part`, wait only for the sum of this part, if it is under way."""
        if self.background is not None and part in (None, self.background_part):
            self.background.result()
            self.background = None
            self._sum_projections()

    def ready(self, name: str, vector: Array) -> None:
        """With overlap: begin to sum a parameter's values, once complete. Local.

        Args:
            name: of the parameter.
            vector: [n], its values under `name` are complete.
        """
        self._begun_overlapped(vector).ready(name, self.fewest_bits)

    def finish_overlapped(self, vector: Array) -> None:
        """With overlap: complete the sum of a vector. Collective.

        Called once all values are complete. Any rank may have begun the sum by `ready`.
        """
        overlapped = self._begun_overlapped(vector)
        overlapped.all_ready(32)
        overlapped.finish()
        self._sum_projections()

    def _begun_overlapped(self, vector: Array) -> OverlappedExchange:
        assert self.overlapped is not None
        if not self.overlapped.running:
            exchange = self._present_exchange()
            if self.projecting is not None:
                self.projecting.begin(exchange.quantized)
            self.overlapped.begin(exchange, vector, self.residuals)
        return self.overlapped

    def drain(self) -> None:
        if self.overlapped is not None:
            exchange = self._present_exchange()
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
        """Fewest bits of any value in an exchange at present. Local."""
        usual: Any = [*(self.bits or {}).values()] or [self.options.bits_after(self.clock())]
        fewest: float = min([*usual, *self.options.bits_of.values()])
        return fewest

    @property
    def bytes_sent(self) -> int:
        self.wait()  # so that the count does not depend on timing
        projections = 0 if self.projecting is None else self.projecting.bytes_sent
        return self.current.bytes_sent + projections

    def values_by_bits(self) -> dict[float, int]:
        """Return the number of values by bits, as chosen by ``gradient_bits="auto"``."""
        values: dict[float, int] = {}
        for number, bits in (self.bits or {}).items():
            for name in self.buckets[int(number)].names:
                size = self.parameters[name].size
                own = self.options.bits_of.value_of(name, size) or bits
                values[own] = values.get(own, 0) + size
        return dict(sorted(values.items()))

    def report(self) -> dict[str, Any] | None:
        """Return the choices of "auto" and the measurement: the transport, and the values by bits.

        None on a single rank.
        """
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
                raise UserError("has residuals, but full precision has none")
        else:
            had, has = saved["residuals"]["owner_error"].keys(), self.residuals.owner_error.keys()
            if had != has:
                raise UserError(
                    f"has residuals of buckets {[*had]}, but this exchange has buckets {[*has]}"
                )
            saved_errors = (
                saved["residuals"]["worker_error"],
                *saved["residuals"]["owner_error"].values(),
            )
            for error in saved_errors:
                largest = body(error).largest_magnitude(error)
                if not largest <= LARGEST_RESIDUAL:
                    raise UserError(
                        f"has residuals as large as {largest}: no message can leave these"
                    )
        bits, buckets = saved["bits"], {str(number) for number in range(len(self.buckets))}
        possible = {*registered_bits()}
        if (bits is None) != (self.bits is None):
            raise UserError(f"has bits={shown(bits)}, which these options do not use")
        if bits is not None and (bits.keys() != buckets or not {*bits.values()} <= possible):
            raise UserError(
                f"has bits={shown(bits)}, which must give registered bits for each bucket"
            )

    def restored(self) -> None:
        self.measured = None
        # A bucket's bits or sender may have changed.
        self._replace(self.options.bits_after(self.clock()))
        if self.residuals is not None:
            self.residuals.has_non_owned = True

    def close(self, *, failed: bool = False) -> None:
        if failed and self.overlapped is not None and self.overlapped.running:
            return  # left to the program's exit: other ranks may not have begun the sum
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

    def _present_exchange(self, clock: int | None = None) -> Exchange:
        """Return the exchange with the present bits, replaced if the bits change. Local."""
        if self.bits_change:
            bits = self.options.bits_after(self.clock() if clock is None else clock)
            if bits != self.current_bits:
                self._replace(bits)
        return self.current

    def _replace(self, bits: float | str) -> None:
        self.wait()  # the previous exchange counts its own bytes
        before, self.current = self.current, self._exchange(bits)
        self.current.carry_over_bytes_sent(before)

    def _exchange(self, bits: float | str) -> Exchange:
        self.current_bits, compression = bits, self.options.compression
        # Some of the ranks send for themselves; NCCL knows only all of them.
        plan = self.plan if self.members is None else self.plan.of_subset(self.members.size)
        return Exchange(
            self.parameters,
            self.members or self.own_comm or self.comm,
            codecs_of(self.options, self.bits, bits, len(self.buckets)),
            buckets=self.buckets,
            transport=plan.transport,
            topology=plan.topology,
            residual_decay=compression.decay,
            block_size=compression.block_size,
            overlapped=self.overlaps,
            nccl=plan.nccl,
        )
