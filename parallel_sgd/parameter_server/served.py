"""A server's part of the model: applies pushes, and decides when a worker may continue.

A push is the sum of a worker's gradients since its pull, or the sum of its local steps since then
(model updates). With K workers, n_k samples in a push and N in a round of pushes:

    async, bounded, geo   every push at once           x <- step(x, g_k / n_k)    or    x - Δ_k
    sync                  one push of every worker     x <- step(x, sum g_k / N)  or    x - sum n_k / N Δ_k
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ..compression import Codec, FullPrecision, VariableMessage
from ..errors import UserError
from ..kernels import Blocks, body, empty_like
from ..local_step import LocalStep
from ..optimizers import SGD, Optimizer
from ..parameters import Parameters
from .rules import Rules

Array = npt.NDArray[Any]
SERVER_COUNTERS = 3  #: counters of the server in `ServedModel.state`, before the workers' counters
COUNTERS_PER_WORKER = 4


class Round(NamedTuple):
    """A round of mode "sync", after its change of the model.

    Attributes:
        samples: of each worker in the round, by worker number; 0 for a push without samples.
        factor: of the learning rate.
    """

    samples: dict[int, int]
    factor: float


@dataclass
class Push:
    """A decoded push: [n]. Gradients are summed over the samples."""

    vector: Array
    samples: int
    factor: float


class ServedModel:
    """A server's part of the model, its optimizer, and the clock of every worker.

    Args:
        initial: the part [n] with its layout, as training begins. Changed by training.
        optimizer: for gradients.
        rules: of pushes.
        workers: number of workers.
        unread: given the current vector, returns memory for the changed model: the same vector if
            no transfer reads it, else a different vector.
        codec: given bits, returns the codec of a push. Default: the codec of the rules.

    Local. Memory for n values: the model and the optimizer's state; with a lossy codec 4 n bytes;
    in mode "sync" a copy of every worker's push; with delay compensation a copy of the model for
    every worker (two with pipeline).
    """

    def __init__(
        self,
        initial: Parameters,
        optimizer: Optimizer,
        rules: Rules,
        workers: int,
        unread: Callable[[Array], Array] = lambda x: x,
        codec: Callable[[float], Codec] | None = None,
    ) -> None:
        self.parameters, self.rules, self._unread = initial, rules, unread
        # With model updates the workers have the optimizer; the server needs only a clock.
        self.local_step = LocalStep(SGD(lr=0.0) if rules.pushes_updates else optimizer, initial)
        self.local_step.compile()
        self.version = 0  #: number of changes of the model
        # Of each worker:
        self.clocks = [0] * workers  #: pushes, including those without samples
        self.pushes = [0] * workers  #: pushes that have changed the model
        self.pulled = [0] * workers  #: version of the model at the latest pull
        self.based = [0] * workers  #: version of the model that the next push is based on
        self.live = set(range(workers))
        # For each worker: the bases of its next push, and of the push after that.
        self._compensates = rules.delay_compensation > 0
        backups = (1 + rules.pipeline) * self._compensates
        self._backups = [[initial.flat.copy() for _ in range(backups)] for _ in range(workers)]
        codec = codec or rules.codec
        coded = {bits: codec(bits) for bits in rules.possible_bits}
        self._coded = {bits: (codec, codec.blocks(initial)) for bits, codec in coded.items()}
        self._variable = {
            bits: VariableMessage(codec, blocks)
            for bits, (codec, blocks) in self._coded.items()
            if not codec.has_fixed_length
        }
        self._round: dict[int, Push | None] = {}
        self._ended: Round | None = None
        lossy = any(not isinstance(codec, FullPrecision) for codec in coded.values())
        self._decoded: Array | None = empty_like(self.x, self.x.size) if lossy else None

    @property
    def x(self) -> Array:
        """The part [n]."""
        return cast(Array, self.parameters.flat)

    @property
    def samples(self) -> int:
        """Samples of all applied pushes: the clock of the server's learning rate."""
        return self.local_step.samples

    def push_bytes(self, bits: float) -> tuple[int, int] | None:
        """Return the smallest and largest size of a push in bytes. None: impossible `bits`."""
        coded = self._coded.get(bits)
        if coded is None:
            return None
        most = int(coded[1].offsets[-1])
        return (0 if bits in self._variable else most), most

    def push(
        self, worker: int, payload: Array, samples: int, factor: float, bits: float = 32
    ) -> int:
        """Handle a push.

        Args:
            worker: number of the worker, from 0.
            payload: uint8, encoded; changed. Empty without samples.
            samples: in the push.
            factor: of the learning rate.
            bits: per value of the push.
        Returns:
            The staleness: number of changes of the model since the version that the push is based
            on.
        """
        staleness = self.version - self.based[worker]
        self.clocks[worker] += 1
        push = None
        if samples:
            codec, blocks = self._coded[bits]
            if isinstance(codec, FullPrecision):
                vector = payload.view(self.x.dtype)
            else:
                vector = cast(Array, self._decoded)
                self._decode(bits, codec, blocks, payload, vector)
                if self.rules.mode == "sync":
                    vector = vector.copy()
            push = Push(vector, samples, factor)
        if self.rules.mode == "sync":
            self._round[worker] = push
            self._end_round()
        elif push:
            self._apply(worker, push)
        return staleness

    def _decode(
        self, bits: float, codec: Codec, blocks: Blocks, payload: Array, out: Array
    ) -> None:
        if bits not in self._variable:
            codec.decode(blocks, payload, out, add=False)
        elif (length := self._variable[bits].decode(payload, out, add=False)) != len(payload):
            raise UserError(f"a push of {len(payload)} bytes must have the {length} of its message")

    def skip(self, worker: int) -> None:
        """Count a push already contained in the model."""
        self.clocks[worker] += 1

    def _apply(self, worker: int, push: Push) -> None:
        """Change the model by a single worker's push."""
        mean = 1 / len(self.clocks) if self.rules.merge == "mean" else 1.0
        if self.rules.pushes_updates:
            self._subtract(push.vector, mean, push.samples)
        else:
            if self._compensates:
                factor = self.rules.delay_compensation / push.samples
                backup = self._backups[worker][0]
                body(self.x).compensate_delay(push.vector, self.x, backup, factor)
            if mean != 1:
                push.vector *= push.vector.dtype.type(mean)
            self._step(push.vector, push.samples, push.factor)
        self.version += 1
        self.pushes[worker] += 1

    def _end_round(self) -> None:
        """Change the model by the round, once every active worker has pushed."""
        if not self.live <= self._round.keys():
            return
        pushed = {k: push for k, push in sorted(self._round.items()) if push}
        of_each = {k: push.samples if push else 0 for k, push in self._round.items()}
        self._round = {}
        if not pushed:
            return
        samples = sum(of_each.values())
        self._ended = Round(of_each, max(push.factor for push in pushed.values()))
        total = next(iter(pushed.values())).vector
        for k, push in pushed.items():
            weight = self._weight(push, samples)
            if weight != 1:
                push.vector *= push.vector.dtype.type(weight)
            if push.vector is not total:
                total += push.vector
            self.pushes[k] += 1
        if self.rules.pushes_updates:
            self._subtract(total, 1.0, samples)
        else:
            self._step(total, samples, self._ended.factor)
        self.version += 1

    def take_ended_round(self) -> Round | None:
        """Return the round that has changed the model since the previous call, or None."""
        ended, self._ended = self._ended, None
        return ended

    def _weight(self, push: Push, samples: int) -> float:
        """Return a push's weight in its round. `_step` divides the sum by the round's samples."""
        if self.rules.pushes_updates:
            return push.samples / samples if self.rules.merge == "mean" else 1.0
        per_sample = self.local_step.optimizer.lr is None  # the rate is for summed gradients
        return 1.0 if per_sample or self.rules.merge == "mean" else samples / push.samples

    def _elsewhere(self) -> Array | None:
        """Return a vector for the changed model, or None to change the model in place."""
        free = self._unread(self.x)
        return None if free is self.x else free

    def _subtract(self, update: Array, weight: float, samples: int) -> None:
        out = self._elsewhere()
        body(self.x).sgd_step(self.x, update, weight, out)
        if out is not None:
            self.parameters.rebind(out)
        self.local_step(update, 0, samples)

    def _step(self, gradient: Array, samples: int, factor: float) -> None:
        self.local_step.state.lr_factor = factor
        self.local_step(gradient, samples, out=self._elsewhere())

    def may_answer(self, worker: int, meeting: Set[int] = frozenset()) -> bool:
        """Return True if the worker's push may be answered.

        Args:
            meeting: workers that wait at a meeting. These push nothing until all workers have come,
                so the staleness bound ignores their clocks.
        """
        if self.rules.mode == "sync":
            return worker not in self._round
        if self.rules.mode == "bounded":
            others = self.live - meeting
            slowest = min((self.clocks[k] for k in others), default=self.clocks[worker])
            return self.clocks[worker] - slowest <= self.rules.staleness
        return True

    def give(self, worker: int) -> Array:
        """Return the current part [n] for a worker's pull, and record the pull."""
        self.based[worker] = self.pulled[worker] if self.rules.pipeline else self.version
        self.pulled[worker] = self.version
        if self._compensates:
            backups = self._backups[worker]
            backups.append(backups.pop(0))
            backups[-1][...] = self.x
        return self.x

    def leave(self, worker: int) -> None:
        """Remove a worker. Later rounds and bounds do not wait for its pushes."""
        self.live.discard(worker)
        if self.rules.mode == "sync":
            self._end_round()

    def finished_clock(self, worker: int) -> int:
        """Return a worker's number of pushes, excluding a push that waits for its round."""
        return self.clocks[worker] - (worker in self._round)

    @property
    def vectors(self) -> list[Array]:
        """The part, and the optimizer's buffers, ordered by name."""
        buffers = self.local_step.state.buffers
        return [self.x, *(buffers[name] for name in sorted(buffers))]

    def _require_no_round(self) -> None:
        if self._round:
            raise UserError("the model is in the midst of a round: let all workers meet first")

    @property
    def state_bytes(self) -> int:
        """Length of `state` in bytes."""
        counters = SERVER_COUNTERS + COUNTERS_PER_WORKER * len(self.clocks)
        return sum(vector.nbytes for vector in self.vectors) + 8 * counters

    def state(self) -> Array:
        """Serialize the part, the optimizer's buffers (ordered by name), and the counters: uint8.

        Sufficient for a checkpoint together with `set_state`, except for the models that workers
        have pulled.

        Raises:
            UserError: called within a round.
        """
        self._require_no_round()
        optimizer = self.local_step.state
        counters = [self.version, optimizer.steps, optimizer.samples]
        for of_each_worker in (self.clocks, self.pushes, self.pulled, self.based):
            counters += of_each_worker
        arrays = [*self.vectors, np.array(counters, np.int64)]
        return np.concatenate([array.view(np.uint8) for array in arrays])

    def set_state(self, state: Array) -> None:
        """Restore a serialized `state`.

        Raises:
            UserError: called within a round, or `state` is invalid.
        """
        self._require_no_round()
        if len(state) != self.state_bytes:
            raise UserError(f"body={len(state)} of the state must be {self.state_bytes}")
        workers, optimizer = len(self.clocks), self.local_step.state
        begin = len(state) - 8 * (SERVER_COUNTERS + COUNTERS_PER_WORKER * workers)
        counters = state[begin:].copy().view(np.int64).tolist()
        if min(counters) < 0:
            raise UserError(f"the counters of a state must not be negative: {counters}")
        self.parameters.rebind(self._unread(self.x))  # all of it is written
        n = self.x.nbytes
        for i, vector in enumerate(self.vectors):
            vector[...] = state[i * n : (i + 1) * n].view(vector.dtype)
        self.version, optimizer.steps, optimizer.samples = counters[:SERVER_COUNTERS]
        self.clocks, self.pushes, self.pulled, self.based = (
            counters[i : i + workers] for i in range(SERVER_COUNTERS, len(counters), workers)
        )

    def set_backup(self, worker: int, models: Array) -> None:
        """Set the models that a worker's next pushes are based on, after `set_state`.

        Args:
            models: uint8, a model [n], or two with pipeline.
        Raises:
            UserError: delay compensation is off, or the length is wrong.
        """
        backups = self._backups[worker]
        if not backups:
            raise UserError("no server keeps what workers pulled without delay_compensation")
        if models.nbytes != len(backups) * self.x.nbytes:
            raise UserError(
                f"{models.nbytes} bytes of models must be {len(backups) * self.x.nbytes}"
            )
        for backup, model in zip(backups, models.reshape(len(backups), -1), strict=True):
            backup[...] = model.view(self.x.dtype)
