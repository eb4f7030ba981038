"""All of DDP's buckets: how each is summed, and where residuals go as DDP builds them anew.

DDP first cuts the parameters as they were registered, and after its first iteration once more, in
the order in which backward has come to their gradients. So residuals belong to parameters: what a
bucket that is no more has kept of them, the buckets that have them now go on with.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
import torch

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
    """One bucket of an iteration.

    Attributes:
        index, last, parameters, buffer: as DDP's bucket has them.
        future: to be completed with the buffer.
        filled: on a GPU, when the buffer is.
        done: whether this has been summed, or has failed.
    """

    index: int
    last: bool
    parameters: list[torch.Tensor]
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]
    filled: torch.cuda.Event | None
    done: threading.Event = field(default_factory=threading.Event)

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
        """Until the buffer is filled."""
        if self.filled is not None:
            self.filled.synchronize()

    def end(self, vector: Array) -> None:
        """The buffer, as `vector`, has what DDP is to go on with."""
        finish_on_device(vector)
        self.future.set_result(self.buffer)


class Buckets:
    """
    Args:
        comm: the ranks, for this alone.
        options: of all exchanges.
        named: the parameters by name; None numbers them as they come: "0", "1", ...

    Creation is local.
    """

    def __init__(
        self,
        comm: Communicator,
        options: ExchangeOptions,
        named: Mapping[str, torch.Tensor] | None,
    ) -> None:
        self._comm, self._options, self._numbered = comm, options, named is None
        # The parameters are held, so that no other one is ever at the place of one in memory.
        self._named = {id(tensor): (name, tensor) for name, tensor in (named or {}).items()}
        self._buckets: list[tuple[tuple[int, ...], BucketSum]] = []
        self._kept: dict[str, ParameterResidual] = {}  #: of parameters that no bucket has
        self._plans: dict[bool, ExchangePlan] = {}
        self._measured: Measured | None = None
        self._bytes_sent = 0  #: of buckets that are no more

    def __getitem__(self, index: int) -> BucketSum:
        return self._buckets[index][1]

    def has(self, index: int, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether a bucket is known, with just these parameters. Local."""
        ids = tuple(map(id, parameters))
        return index < len(self._buckets) and self._buckets[index][0] == ids

    def set_up(
        self, index: int, parameters: Sequence[torch.Tensor], buffer: torch.Tensor, steps: int
    ) -> None:
        """From now on a bucket has these parameters; those after it are forgotten.

        Args:
            buffer: of the bucket, [sum of the parameters' sizes].
            steps: by which the bits go.
        Raises:
            SharedError: the bucket cannot be exchanged so, or ranks have different ones.

        Collective. Cost: where something is measured (transport or bits "auto"), some tenths of a
        second once.
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
        """A bucket that is known, with the bits that it has after so many steps. Local."""
        bucket = self[index]
        bits = self._options.bits_after(steps)
        if bits != AUTO:
            bucket.use(cast(float, bits), vector)
        return bucket

    @property
    def bytes_sent(self) -> int:
        """By this rank to others. Local."""
        return self._bytes_sent + sum(bucket.bytes_sent for _, bucket in self._buckets)

    def residuals(self) -> dict[str, ParameterResidual]:
        """Of all parameters by name, views. Local."""
        kept = dict(self._kept)
        for _, bucket in self._buckets:
            kept |= bucket.residuals()
        return kept

    def set_residuals(self, kept: Mapping[str, ParameterResidual]) -> None:
        """Go on with these, whatever there was. Local.

        Raises:
            UserError: one is of another size than its parameter; nothing has changed then.
        """
        for _, bucket in self._buckets:
            _require_sizes(bucket.sizes, kept)
        self._kept = dict(kept)
        for _, bucket in self._buckets:
            own = {name: self._kept.pop(name) for name in bucket.sizes if name in self._kept}
            bucket.set_residuals(own)

    def scale_residuals(self, factor: float) -> None:
        """As the unit of gradients changes. Local."""
        for _, bucket in self._buckets:
            bucket.scale_residuals(factor)
        for name, one in self._kept.items():
            self._kept[name] = ParameterResidual(
                one.worker_error * factor, one.owner_error * factor, one.owner_begin
            )

    def close(self) -> None:
        """Give back what was taken. Collective."""
        for _, bucket in self._buckets:
            self._bytes_sent += bucket.bytes_sent
            bucket.close()
        self._buckets.clear()
        for plan in self._plans.values():
            plan.close()

    def _sizes(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> dict[str, int]:
        """Of the parameters by name.

        Raises:
            UserError: they cannot be exchanged as the options say.
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
        whose = f"the gradient of {', '.join(sizes)}"
        if buffer.layout != torch.strided:
            raise UserError(f"{whose} is sparse: this hook is for dense gradients")
        require_dtype(whose, buffer.dtype, self._options)
        assert sum(sizes.values()) == buffer.numel(), "a bucket has its parameters' values alone"
        _require_sizes(sizes, self._kept)
        return sizes

    def _name(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._named:
            if not self._numbered:
                raise UserError(
                    f"DDP has a parameter of shape {[*parameter.shape]} that is none of module=: "
                    "hook_state must be given the module that DDP has"
                )
            self._named[id(parameter)] = str(len(self._named)), parameter
        return self._named[id(parameter)][0]

    def _bits(self, vector: Array, steps: int) -> float:
        """Of a new bucket. Collective where they are to be measured."""
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
        """Of a new bucket: all long ones have one, by the first of them, and so have all short
        ones, for which nothing is measured. Collective."""
        options, route = self._options, self._options.route
        short = vector.size < SHORT_VECTOR and route.transport != "nccl"
        if short not in self._plans:
            codec = options.codec(bits)
            if isinstance(codec, Mixed):  # try what most values have
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
    """See that values of this type can be exchanged so. Local.

    Args:
        what: has it, for the error.
    Raises:
        UserError: they cannot.
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
