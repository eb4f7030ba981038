"""What algorithms have in common whose ranks meet in an exchange: residuals, warm start, errors.

`DataParallelSGD` exchanges gradients in every step; the local updates exchange models now and then.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

from ..communication import Communicator
from ..compression import Codec, registered_bits
from ..costs import Measured
from ..errors import SharedError, UserError
from ..exchange import (
    TRANSPORTS,
    Bucket,
    Exchange,
    ExchangePlan,
    Residuals,
    choose_bits,
    choose_plan,
    cut_buckets,
    require_float32,
    topology_for,
)
from ..optimizers import LocalStep
from ..parameters import Parameters
from ..state import across, workspace
from ..validation import check_counts, choice, integer, settle, shown
from .compressed import AUTO, CompressedAlgorithm, problem_with


@dataclass(kw_only=True)
class SynchronousState:
    """
    Attributes:
        residuals: what the messages of this rank have lost; None in full precision.
        bits: of each bucket, where ``gradient_bits="auto"`` has chosen them.
        measured: what they were chosen by, unless a checkpoint has brought them.
        exchanges: the one for the present bits, with its buffers.
        buckets: of the vector.
        plan: which transport exchanges have, and which ranks add up first.
        apart: the ranks, for exchanges; a communicator of its own where they may run in the
            background.
    """

    residuals: Residuals | None
    bits: dict[str, float] | None = across("same", default=None)
    exchanges: dict[int | str, Exchange] = workspace()
    buckets: list[Bucket] = workspace()
    plan: ExchangePlan = workspace()
    apart: Communicator = workspace()
    measured: Measured | None = workspace(default=None)

    counts: ClassVar[tuple[str, ...]] = ()
    """Numbers that a checkpoint can have only where they are finite and at least 0. (A subclass of
    one's own may have others.)"""

    def values_by_bits(self) -> dict[float, int]:
        """How many values travel with so many bits, where ``gradient_bits="auto"`` has chosen."""
        found: dict[float, int] = {}
        for number, bits in (self.bits or {}).items():
            values = self.buckets[int(number)].values
            found[bits] = found.get(bits, 0) + values.stop - values.start
        return dict(sorted(found.items()))


SynchronousStateT = TypeVar("SynchronousStateT", bound=SynchronousState)


@dataclass(frozen=True, kw_only=True)
class SynchronousAlgorithm(CompressedAlgorithm[SynchronousStateT], ABC):
    """Options of every exchange, beside those of `CompressedAlgorithm`.

    Args:
        distributed_after: train on the whole minibatch on every rank, without exchange, until so
            many samples have been seen (CNTK's warm start); then begin from rank 0's model.
        transport: "collective" (the MPI library's all-to-all and all-gather), "pipelined" (pieces
            of which some are encoded while others travel), or "auto": the faster of them, by a
            short measurement before training. The sums have the same bits. "nccl", for CuPy with a
            GPU for each rank, lets NCCL add up within hosts, or over all ranks at 32 bits unless
            `hierarchical` is True: equal to rounding, and the same bits on all ranks.
        hierarchical: True lets the ranks of each host add up among themselves, in full precision,
            and send one message; "auto" does so where there are several hosts, and several ranks
            on one of them.
        bucket_values: at least so many values are exchanged as one bucket (whole parameters).

    `gradient_bits` may be a mapping from samples to bits: ``{0: 32, 20_000: 1}``. The residuals
    stay when the bits change, and enter the next sum. Or it is "auto": for each bucket the bits
    that are fastest by a measurement of links and kernels before training; more bits where they
    cost no more than 5 % of the time.

    Raises:
        UserError: an option's value that is not possible.
    """

    takes_auto_bits: ClassVar[bool] = True

    distributed_after: int = 0
    transport: str = AUTO
    hierarchical: bool | str = AUTO
    bucket_values: int = 1 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(
            self,
            distributed_after=integer("distributed_after", self.distributed_after, 0),
            transport=choice("transport", self.transport, (AUTO, *TRANSPORTS)),
            hierarchical=choice("hierarchical", self.hierarchical, (AUTO, True, False)),
            bucket_values=integer("bucket_values", self.bucket_values, 1),
        )

    def bits_after(self, samples: int) -> int | str:
        """The bits of an exchange after so many samples, or "auto". Local."""
        bits = self.gradient_bits
        if isinstance(bits, Mapping):
            return bits[max(start for start in bits if start <= samples)]
        return bits

    @property
    def _all_bits(self) -> set[int | str]:
        bits = self.gradient_bits
        return set(bits.values()) if isinstance(bits, Mapping) else {bits}

    def fewest_bits(self, state: SynchronousStateT, samples: int) -> float:
        """Of any bucket, in an exchange after so many samples. Local."""
        bits = self.bits_after(samples)
        return min(state.bits.values()) if state.bits else cast(float, bits)

    def distributed(self, samples: int) -> bool:
        return samples >= self.distributed_after

    def bytes_sent(self, state: SynchronousStateT) -> int:
        return sum(exchange.bytes_sent for exchange in state.exchanges.values())

    def report(self, state: SynchronousStateT) -> dict[str, Any] | None:
        """What "auto" has chosen, and by what: the plan of exchanges, and how many values have so
        many bits. None on one rank."""
        if state.apart.size == 1:
            return None
        found = state.plan.as_dict()
        if state.bits is not None:
            found["gradient_bits"] = {str(b): n for b, n in state.values_by_bits().items()}
            found |= state.measured.as_dict() if state.measured else {}
        return found

    def close(self, state: SynchronousStateT, comm: Communicator, *, failed: bool = False) -> None:
        try:
            super().close(state, comm, failed=failed)
        finally:
            for exchange in state.exchanges.values():
                exchange.close()
            state.plan.close()
            if state.apart is not comm:
                state.apart.close()

    def check_saved(
        self,
        state: SynchronousStateT,
        saved: Mapping[str, Any],
        parameters: Parameters,
        local_step: LocalStep,
        ranks: int,
    ) -> None:
        check_counts(saved, state.counts, "algorithm")
        if state.residuals is not None:
            had, has = saved["residuals"]["owner_error"].keys(), state.residuals.owner_error.keys()
            if had != has:
                raise UserError(f"has residuals of buckets {[*had]}, but there are {[*has]}")
        bits, buckets = saved["bits"], {str(number) for number in range(len(state.buckets))}
        chosen = bits is None or (
            bits.keys() == buckets and {*bits.values()} <= {*registered_bits()}
        )
        if not chosen:
            raise UserError(f"has algorithm.bits={shown(bits)}, which must be of each bucket")

    @contextmanager
    def ranks_apart(self, comm: Communicator, *, apart: bool) -> Iterator[Communicator]:
        """The ranks for exchanges, which are closed where all ranks fail in the `with` block.

        Args:
            apart: whether exchanges may run in the background, and need their own.
        """
        made = comm.duplicate() if apart else comm
        try:
            yield made
        except SharedError:
            if apart:
                made.close()
            raise

    def first_exchange(self, parameters: Parameters, comm: Communicator) -> dict[str, Any]:
        """The fields of `SynchronousState` with which training begins. Collective.

        Args:
            comm: for exchanges.
        Raises:
            UserError: fewer than 32 bits for parameters that are not float32.
        """
        all_bits = self._all_bits
        for each in all_bits - {AUTO}:
            require_float32(self.codec(cast(float, each)), parameters)
        buckets = cut_buckets(parameters, self.block_size, self.bucket_values)
        chosen, measured = None, None
        if all_bits == {AUTO}:
            flat = self.transport == "collective"
            topology = topology_for(comm.hosts, False if flat else self.hierarchical)
            chosen, measured = choose_bits(buckets, parameters, comm, topology, self.block_size)
        state = SynchronousState(
            residuals=None,
            bits=chosen,
            measured=measured,
            exchanges={},
            buckets=buckets,
            plan=choose_plan(
                parameters,
                comm,
                self.transport,
                self.hierarchical,
                codec=self._codecs(chosen, buckets, self.bits_after(0))[_largest(buckets)],
                lossless=all_bits == {32},
            ),
            apart=comm,
        )
        first = self._exchange(state, self.bits_after(0), parameters)
        if all_bits != {32}:
            state.residuals = first.residuals(parameters)
        state.exchanges[self.bits_after(0)] = first
        return vars(state)

    def exchange_after(
        self, state: SynchronousStateT, samples: int, parameters: Parameters
    ) -> Exchange:
        """The exchange after so many samples; where the bits change, in place of the one before.

        Local.
        """
        bits = self.bits_after(samples)
        if bits not in state.exchanges:
            self._replace(state, bits, parameters)
        return state.exchanges[bits]

    def restored(
        self,
        state: SynchronousStateT,
        parameters: Parameters,
        local_step: LocalStep,
        comm: Communicator,
    ) -> None:
        bits = self.bits_after(local_step.samples)
        state.measured = None
        self._replace(state, bits, parameters)  # a bucket's bits may be other ones, or its sender
        if state.residuals is not None:
            state.residuals.has_non_owned = True

    def _replace(self, state: SynchronousStateT, bits: int | str, parameters: Parameters) -> None:
        self.wait(state)  # what is under way is counted by the exchange that does it
        sent = SynchronousAlgorithm.bytes_sent(self, state)
        state.exchanges.clear()
        state.exchanges[bits] = self._exchange(state, bits, parameters)
        state.exchanges[bits].bytes_sent = sent

    def _exchange(
        self, state: SynchronousState, bits: int | str, parameters: Parameters
    ) -> Exchange:
        """One for the present bits."""
        codecs = self._codecs(state.bits, state.buckets, bits)
        return Exchange(
            parameters,
            state.apart,
            codecs,
            buckets=state.buckets,
            transport=state.plan.transport,
            topology=state.plan.topology,
            error_feedback=self.error_feedback,
            block_size=self.block_size,
            nccl=state.plan.nccl,
        )

    def _codecs(
        self, chosen: Mapping[str, float] | None, buckets: Sequence[Bucket], bits: int | str
    ) -> list[Codec | None]:
        """Of each bucket. Full precision needs none where nothing was ever lost."""
        if chosen is not None:
            each: list[float] = [chosen[str(number)] for number in range(len(buckets))]
        else:
            each = [cast(float, bits)] * len(buckets)
        lossless = chosen is not None or self._all_bits == {32}
        return [None if b == 32 and lossless else self.codec(b) for b in each]

    def train_alone(
        self,
        parameters: Parameters,
        gradient: Parameters,
        samples: int,
        local_step: LocalStep,
        comm: Communicator,
    ) -> int:
        """One step of the warm start: all ranks have the same whole minibatch. Collective."""
        name = "samples of a minibatch before distributed_after"
        comm.agree(problem_with(gradient.flat), samples, alike={name: samples})
        ends = self.distributed(local_step.samples + samples)
        if samples:
            local_step(gradient.flat, samples)
        if ends:  # machines may round differently: all go on from one model
            for array in (parameters.flat, *local_step.state.buffers.values()):
                comm.broadcast(array)
        return samples


def _largest(buckets: Sequence[Bucket]) -> int:
    """The number of the one with the most values."""
    sizes = [bucket.values.stop - bucket.values.start for bucket in buckets]
    return sizes.index(max(sizes))
