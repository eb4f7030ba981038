"""All DDP buckets: the sum of each, and the residuals when DDP rebuilds its buckets.

DDP first forms buckets in the order of registration of the parameters. After the first iteration it
rebuilds them in the order of gradients in backward. So residuals belong to parameters: the
residuals of a removed bucket move to the buckets with its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
import torch

from ... import runtime
from ...communication import Communicator
from ...compression import AUTO, Mixed, auto_bits, problem_with
from ...costs import Measured, measure
from ...errors import UserError
from ...exchange import ExchangeOptions, ExchangePlan, choose_plan, topology_for
from ...exchange.plan import SHORT_VECTOR
from ...kernels import array_module, finish_on_device
from ...parameters import Parameters
from ...training.preparing import prepare_kernels
from ..arrays import as_array
from ..module import belongs_to_learner
from .bucket_sum import BucketSum, ParameterResidual

Array = Any  #: a NumPy or CuPy array


@dataclass(frozen=True)
class Job:
    """A bucket of an iteration.

    Attributes:
        index, last, parameters, buffer: from DDP's bucket.
        future: completed with the buffer.
        filled: on a GPU, the event of the filled buffer.
        done: whether the sum is complete, or has failed.
    """

    index: int
    last: bool
    parameters: list[torch.Tensor]
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]
    filled: torch.cuda.Event | None
    done: runtime.Event = field(default_factory=runtime.Event)

    @classmethod
    def of(cls, bucket: Any) -> Self:
        buffer = bucket.buffer()
        devices, filled = [], None
        if buffer.device.type == "cuda":
            devices, filled = [buffer.device], torch.cuda.Event()
            filled.record(torch.cuda.current_stream(buffer.device))
        future = torch.futures.Future(devices=devices)
        return cls(bucket.index(), bucket.is_last(), [*bucket.parameters()], buffer, future, filled)

    def wait(self) -> None:
        """Wait until the buffer is filled."""
        if self.filled is not None:
            # bounded: this rank's GPU: the others wait, and end the job
            self.filled.synchronize()

    def end(self, vector: Array) -> None:
        """Complete the future: the buffer, as `vector`, has the result for DDP."""
        finish_on_device(vector)
        self.future.set_result(self.buffer)


class Buckets:
    """The sums of all buckets, and the residuals of all parameters.

    Args:
        comm: the ranks, for exclusive use.
        options: of all exchanges.
        named: the parameters by name; None numbers the parameters in order of appearance: "0", "1",
            ...

    Creation is local.
    """

    def __init__(
        self,
        comm: Communicator,
        options: ExchangeOptions,
        named: Mapping[str, torch.Tensor] | None,
    ) -> None:
        self._comm, self._options, self._numbered = comm, options, named is None
        # Parameters are kept alive, so that their ids stay unique.
        self._named = {id(tensor): (name, tensor) for name, tensor in (named or {}).items()}
        self._buckets: list[tuple[tuple[int, ...], BucketSum]] = []
        self._kept: dict[str, ParameterResidual] = {}  #: of parameters in no bucket
        self._plans: dict[bool, ExchangePlan] = {}
        self._measured: Measured | None = None
        self._bytes_sent = 0  #: by removed buckets

    def __getitem__(self, index: int) -> BucketSum:
        return self._buckets[index][1]

    def has(self, index: int, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether a bucket is known with exactly these parameters. Local."""
        ids = tuple(map(id, parameters))
        return index < len(self._buckets) and self._buckets[index][0] == ids

    def set_up(
        self, index: int, parameters: Sequence[torch.Tensor], buffer: torch.Tensor, steps: int
    ) -> None:
        """Set the parameters of a bucket, and discard the later buckets.

        Args:
            index: of the bucket.
            parameters: of the bucket.
            buffer: of the bucket, [sum of the parameters' sizes].
            steps: the clock of the schedule of bits.
        Raises:
            SharedError: the options do not allow an exchange of the bucket, or buckets differ
                between ranks.

        Collective. Cost: some tenths of a second once, if transport or bits are "auto" and need to
        be measured.
        """
        for _, before in self._buckets[index:]:
            self._kept |= before.residuals()
            self._bytes_sent += before.bytes_sent
            before.close()
        del self._buckets[index:]
        sizes = self._comm.together(lambda: self._sizes(parameters, buffer))
        vector = as_array(buffer)
        self._comm.require_agreement(
            {f"the sizes of the parameters in DDP's bucket {index}": [*sizes.values()]}
        )
        if not self._buckets and array_module(vector) is np:
            none = vector[:0].copy()
            calls = [*self._options.first_calls(), lambda: problem_with(none)]
            prepare_kernels(self._comm, calls)
        bits = self._bits(vector, steps)
        plan = self._plan(sizes, vector, bits)
        made = BucketSum(sizes, vector, self._comm, self._options, plan, bits)
        made.set_residuals({name: self._kept.pop(name) for name in sizes if name in self._kept})
        self._buckets.append((tuple(map(id, parameters)), made))

    def use(self, index: int, vector: Array, steps: int) -> BucketSum:
        """Return a known bucket, with its bits set for the number of steps. Local."""
        bucket = self[index]
        bits = self._options.bits_after(steps)
        if bits != AUTO:
            bucket.use(cast(float, bits), vector)
        return bucket

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank. Local."""
        return self._bytes_sent + sum(bucket.bytes_sent for _, bucket in self._buckets)

    def residuals(self) -> dict[str, ParameterResidual]:
        """Return the residuals of all parameters by name, as views. Local."""
        kept = dict(self._kept)
        for _, bucket in self._buckets:
            kept |= bucket.residuals()
        return kept

    def require_fitting(self, kept: Mapping[str, ParameterResidual]) -> None:
        """Check that residuals are of this model, as far as its parameters are known. Local.

        Raises:
            UserError: a residual differs in size from its parameter, or no residual has a
                parameter.
        """
        sizes = {name: tensor.numel() for name, tensor in self._named.values()}
        _require_sizes(sizes, kept)
        if kept and sizes and sizes.keys().isdisjoint(kept):
            raise UserError(
                f"state has a residual of {next(iter(kept))!r}, and DDP's module has "
                f"{next(iter(sizes))!r}: no name is the same, so it is of another model"
            )

    def set_residuals(self, kept: Mapping[str, ParameterResidual]) -> None:
        """Replace all residuals, after `require_fitting`. Local."""
        self._kept = dict(kept)
        for _, bucket in self._buckets:
            own = {name: self._kept.pop(name) for name in bucket.sizes if name in self._kept}
            bucket.set_residuals(own)

    def scale_residuals(self, factor: float) -> None:
        """Multiply all residuals by `factor`, as the unit of gradients changes. Local."""
        for _, bucket in self._buckets:
            bucket.scale_residuals(factor)
        for name, residual in self._kept.items():
            self._kept[name] = ParameterResidual(
                residual.worker_error * factor, residual.owner_error * factor, residual.owner_begin
            )

    def close(self) -> None:
        """Close all exchanges and plans. Collective."""
        for _, bucket in self._buckets:
            self._bytes_sent += bucket.bytes_sent
            bucket.close()
        self._buckets.clear()
        for plan in self._plans.values():
            plan.close()

    def _sizes(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> dict[str, int]:
        """Return the parameters' sizes by name.

        Raises:
            UserError: the options do not allow an exchange of the parameters.
        """
        sizes = {}
        for parameter in parameters:
            name = self._name(parameter)
            require_dtype(f"parameter {name!r}", parameter.dtype, self._options)
            if belongs_to_learner(parameter):
                raise UserError(
                    f"parameter {name!r} belongs to a psgd.torch.Learner, which exchanges its "
                    "gradient itself: train the model by the learner, or by DDP with the hook"
                )
            sizes[name] = parameter.numel()
        label = f"the gradient of {', '.join(sizes)}"
        if buffer.layout != torch.strided:
            raise UserError(f"{label} is sparse: this hook is for dense gradients")
        require_dtype(label, buffer.dtype, self._options)
        assert sum(sizes.values()) == buffer.numel(), (
            "a bucket has only the values of its parameters"
        )
        _require_sizes(sizes, self._kept)
        return sizes

    def _name(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._named:
            if not self._numbered:
                raise UserError(
                    f"DDP has a parameter of shape {[*parameter.shape]} that is not a parameter of "
                    "module=: hook_state needs the module that DDP has"
                )
            self._named[id(parameter)] = str(len(self._named)), parameter
        return self._named[id(parameter)][0]

    def _bits(self, vector: Array, steps: int) -> float:
        """Return the bits of a new bucket. Collective if the bits need to be measured."""
        options, comm = self._options, self._comm
        bits = options.bits_after(steps)
        if bits != AUTO:
            return cast(float, bits)
        if comm.size == 1 or vector.dtype != np.float32:
            return 32
        if self._measured is None:
            flat = options.route.transport == "collective"
            topology = topology_for(comm.hosts, False if flat else options.route.hierarchical)
            block_size = options.compression.block_size
            self._measured = measure(comm, topology.hosts, block_size, vector, auto_bits())
        return self._measured.best_bits(vector.size)

    def _plan(self, sizes: Mapping[str, int], vector: Array, bits: float) -> ExchangePlan:
        """Return the plan of a new bucket.

        All long buckets share a plan, made for the first of them. All short buckets share another,
        without measurements. Collective.
        """
        options, route = self._options, self._options.route
        short = vector.size < SHORT_VECTOR and route.transport != "nccl"
        if short not in self._plans:
            codec = options.codec(bits)
            if isinstance(codec, Mixed):  # measure the codec of the largest parameter
                codec = codec.codec_of(*max(sizes.items(), key=lambda item: item[1]))
            self._plans[short] = choose_plan(
                Parameters({"bucket": vector}),
                self._comm,
                route.transport,
                route.hierarchical,
                codec=codec,
                lossless=options.lossless or vector.dtype != np.float32,
            )
        return self._plans[short]


def require_dtype(what: str, dtype: torch.dtype, options: ExchangeOptions) -> None:
    """Check that the options allow an exchange of values of this type. Local.

    Args:
        what: the name of the values, for the error.
        dtype: of the values.
        options: of the exchange.
    Raises:
        UserError: the options do not allow this type.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"{what} is {name}: this hook is for float32 parameters, or float64 with "
            "gradient_bits=32 (under torch.autocast parameters stay float32)"
        )
    lossy = options.all_bits - {32, AUTO}
    if dtype == torch.float64 and lossy:
        fewest = min(cast(set[float], lossy))
        raise UserError(f"{what} is {name}: gradient_bits={fewest:g} is for float32 parameters")


def _require_sizes(sizes: Mapping[str, int], kept: Mapping[str, ParameterResidual]) -> None:
    for name in sizes.keys() & kept.keys():
        has = kept[name].worker_error.size
        if has != sizes[name]:
            raise UserError(
                f"the residual of parameter {name!r} has {has} values, and the parameter has "
                f"{sizes[name]}: it is of another model"
            )
