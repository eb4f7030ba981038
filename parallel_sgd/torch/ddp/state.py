"""The state of DDP's hook, and its work on the buckets of an iteration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from ...communication import Communicator, InBackground
from ...compression import problem_with
from ...errors import SharedError, UserError
from ...exchange import ExchangeOptions
from ...kernels import on_device
from ..arrays import as_array
from .bucket_sum import BucketSum
from .buckets import Buckets, Job
from .saved import SavedState, gathered, state_for

Array = Any  #: a NumPy or CuPy array

POLL_S = 0.05  #: interval of checks for a failure of the background thread


class HookState:
    """The state of `hook` between calls: residuals, exchanges and their communicator.

    Args:
        comm: the ranks, for exclusive use.
        options: of the exchanges.
        named: the parameters by name; None numbers the parameters in order of appearance.
        scaler: of the loss; None: no scaling.
        process_group: DDP's; None: the default one.

    Attributes:
        steps: iterations with summed buckets: the clock of a schedule of bits.

    Made by `compress` or `hook_state`, for a single DDP module.
    """

    def __init__(
        self,
        comm: Communicator,
        options: ExchangeOptions,
        named: Mapping[str, torch.Tensor] | None = None,
        scaler: Any = None,
        process_group: Any = None,
    ) -> None:
        self.steps = 0
        self._comm, self._scaler, self._process_group = comm, scaler, process_group
        self._buckets = Buckets(comm, options, named)
        self._scale = 1.0  #: loss scale; also the unit of gradients and residuals
        self._summed_values = self._summed_bytes = 0  #: of all summed gradients
        self._skipped, self._latest_skip = 0, ""  #: minibatches with an overflow
        self._next = 0  #: the index of the next bucket
        self._jobs: SimpleQueue[Job | None]  #: queue of this iteration
        self._deferred: list[Job] = []
        self._background: InBackground[None] | None = None
        self._closed = False

    def begin(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Start the sum of a bucket; for the last bucket of an iteration, complete all sums.

        Args:
            bucket: DDP's, or a similar object.
        Returns:
            A Future of the bucket's buffer.
        Raises:
            SharedError: on all ranks, at the last bucket: a gradient is not finite on some rank,
                without a scaler; or the options do not fit the parameters. DDP cannot continue
                after an error.
            UserError: the bucket is out of order, or the state is closed.

        With a scaler nothing is sent before the last bucket. An overflow on any rank then makes the
        gradients infinite on all ranks, so that every rank's scaler skips the step, and residuals
        stay unchanged. Collective.
        """
        self._require_open()
        job = Job.of(bucket)
        if job.index == 0 and self._next == 0:
            require_ranks_of(self._process_group, self._comm)
        if job.index != self._next:
            raise UserError(
                f"DDP's bucket {job.index} came when bucket {self._next} was due: an error has "
                "ended the previous backward pass, or several modules use this state"
            )
        self._next = 0 if job.last else job.index + 1
        if self._scaler is None:
            self._begin(job)
        else:
            self._deferred.append(job)
            if job.last:
                jobs, self._deferred = self._deferred, []
                self._sum_scaled(jobs)
        if job.last:
            self.steps += 1
        return job.future

    @property
    def comm(self) -> Communicator:
        """The ranks, for use between steps."""
        return self._comm

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank so far. Local."""
        return self._buckets.bytes_sent

    def report(self) -> dict[str, Any]:
        """Return this rank's statistics since the start of the program, in a form that JSON can
        hold.

        Returns:
            "steps": steps so far, including those before a loaded state. "bytes_sent": by this
            rank. "bytes_in_32_bit": bytes that a sum in full precision would have sent.
            "bytes_per_value": bytes sent, for each value of a gradient. "ratio_to_32_bits":
            bytes_in_32_bit / bytes_sent; None if nothing was sent. "skipped": "minibatches" that
            all ranks skipped together because of an overflow, and the reason of the "latest".

        Local.
        """
        sent, ranks = self.bytes_sent, self._comm.size
        full = 2 * (ranks - 1) * self._summed_bytes // ranks
        return {
            "steps": self.steps,
            "bytes_sent": sent,
            "bytes_in_32_bit": full,
            "bytes_per_value": sent / max(1, self._summed_values),
            "ratio_to_32_bits": full / sent if sent else None,
            "skipped": {"minibatches": self._skipped, "latest": self._latest_skip},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: this rank's residuals, and the number of steps.

        Returns:
            Numbers, and tensors on the CPU, suitable for `torch.save`.

        Residuals differ between ranks: each rank must save its own state, in a file of its own.
        Only between backward passes. Local.
        """
        return self._saved("state_dict").as_dict()

    def gathered_state_dicts(self) -> list[dict[str, Any]]:
        """Return the states of all ranks on rank 0, for a checkpoint in a single file.

        Returns:
            On rank 0 the result of every rank's `state_dict`, in rank order; an empty list on the
            other ranks.

        Only between backward passes. Collective. Cost: every rank sends its residuals to rank 0.
        Memory: the residuals of all ranks on rank 0, of n values on K ranks 4·K·n + 4·n bytes.
        """
        return gathered(self._saved("gathered_state_dicts"), self._comm)

    def load_state_dict(self, state: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> None:
        """Restore a saved state.

        Args:
            state: the result of `state_dict` from this rank, on the same number of ranks; or from
                all ranks, in a list or an iterator. Needed on another number of ranks.
        Raises:
            SharedError: on all ranks: a state is of another rank, number of ranks, or model; the
                states of all ranks are incomplete, or of different steps; or the ranks have loaded
                different steps. Nothing has changed then.

        On the same number of ranks training repeats bit for bit if DDP has the same buckets as when
        saved. A new process starts with the buckets of a first iteration (DDP rebuilds them after
        that iteration, except with find_unused_parameters): the sum of all residuals is then the
        same, but steps differ. On another number of ranks the sum of all residuals is the same,
        too.

            state.load_state_dict(torch.load(f"hook_{k}.pt") for k in range(ranks_before))

        Only between backward passes. Collective.
        """
        self._require_idle("load_state_dict")
        comm = self._comm

        def checked() -> SavedState:
            saved = state_for(state, comm.rank, comm.size)
            self._buckets.require_fitting(saved.residuals)
            return saved

        saved = comm.together(checked)
        comm.require_agreement(
            {
                "the number of steps that load_state_dict restores": saved.steps,
                "the loss scale that load_state_dict restores": saved.scale,
            }
        )
        self._buckets.set_residuals(saved.residuals)
        self.steps, self._scale = saved.steps, saved.scale

    def close(self) -> None:
        """Free the communicator, and end pending sums. Collective, but does not wait for other
        ranks.
        """
        if self._closed:
            return
        self._closed = True
        if self._background is not None:
            self._background.end()
        self._buckets.close()
        self._comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Close, unless an error may have kept other ranks from closing."""
        if error is None or isinstance(error, SharedError):
            self.close()

    def _begin(self, job: Job) -> None:
        """Queue a bucket for the background thread, after earlier buckets. Without a scaler."""
        known = self._buckets.has(job.index, job.parameters)
        if self._background is None:
            jobs: SimpleQueue[Job | None] = SimpleQueue()
            self._jobs = jobs
            self._background = InBackground(
                f"gradient buckets of rank {self._comm.rank}",
                partial(self._sum_in_turn, jobs),
                stop=lambda: jobs.put(None),
            )
        background = self._background
        self._jobs.put(job)
        if not known:  # backward must not disturb measurements
            # bounded: for the thread in the background, whose waits are watched, or which has ended
            while not (job.done.wait(POLL_S) or background.done):
                pass
        if job.last or background.done:
            self._background = None
            background.result()

    def _sum_in_turn(self, jobs: SimpleQueue[Job | None]) -> None:
        """Sum all buckets of an iteration, in the background thread."""
        problem = None
        # bounded: for this rank's own backward; stop() ends it
        while (job := jobs.get()) is not None:
            try:
                vector = self._vector(job)
                with on_device(vector):
                    bucket = self._buckets.use(job.index, vector, self.steps)
                    own = problem_with(vector, bucket.fewest_bits)
                    if own:  # keep NaN out of all ranks' residuals
                        vector.fill(0)
                    problem = problem or own
                    if job.last:
                        self._comm.agree(problem)
                    self._mean(bucket, vector)
                    job.end(vector)
            finally:
                job.done.set()
            if job.last:
                return

    def _sum_scaled(self, jobs: list[Job]) -> None:
        """Sum all buckets, or none after an overflow. With a scaler."""
        scale = float(self._scaler.get_scale())
        vectors = [self._vector(job) for job in jobs]
        buckets = [
            self._buckets.use(job.index, vector, self.steps)
            for job, vector in zip(jobs, vectors, strict=True)
        ]
        overflows = sum(
            problem_with(vector, bucket.fewest_bits) is not None
            for vector, bucket in zip(vectors, buckets, strict=True)
        )
        same = {"the scaler's scale (float32 bits)": int(np.float32(scale).view(np.uint32))}
        skipped = self._comm.agree(None, overflows, equal=same) > 0
        if skipped:
            self._skipped += 1
            self._latest_skip = f"gradients overflowed with a scale of {scale:g}"
        if not skipped and scale != self._scale:
            self._buckets.scale_residuals(scale / self._scale)
            self._scale = scale
        for job, vector, bucket in zip(jobs, vectors, buckets, strict=True):
            with on_device(vector):
                if skipped:
                    vector.fill(np.inf)
                else:
                    self._mean(bucket, vector)
                job.end(vector)

    def _mean(self, bucket: BucketSum, vector: Array) -> None:
        bucket.mean(vector)
        self._summed_values += vector.size
        self._summed_bytes += vector.nbytes

    def _vector(self, job: Job) -> Array:
        """Return the filled buffer of a bucket. Collective if the bucket is new."""
        # bounded: see Job.wait
        job.wait()
        if not self._buckets.has(job.index, job.parameters):
            self._buckets.set_up(job.index, job.parameters, job.buffer, self.steps)
        return as_array(job.buffer)

    def _saved(self, name: str) -> SavedState:
        """Return the present state, with views of the residuals."""
        self._require_idle(name)
        rank, ranks = self._comm.rank, self._comm.size
        return SavedState(rank, ranks, self.steps, self._scale, self._buckets.residuals())

    def _require_open(self) -> None:
        if self._closed:
            raise UserError("the state of DDP's hook is closed: DDP cannot train after its close()")

    def _require_idle(self, name: str) -> None:
        self._require_open()
        if self._next:
            raise UserError(
                f"{name}() must be called between backward passes: a pass is running, or has failed"
            )


def require_ranks_of(process_group: Any, comm: Communicator) -> None:
    """Check that DDP's process group has the ranks of `comm`, in the same order. Local.

    Raises:
        UserError: the ranks differ. No check without a process group.
    """
    if not dist.is_initialized():
        return
    has, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if rank < 0:
        raise UserError("process_group does not have this rank: it must be DDP's")
    if has != comm.size:
        raise UserError(
            f"comm has {comm.size} rank{'s' * (comm.size > 1)}, and DDP's process group has {has}: "
            "both must be the same (psgd.torch.init_process_group(comm))"
        )
    if rank != comm.rank:
        raise UserError(
            f"rank {comm.rank} of comm is rank {rank} of DDP's process group: both must have the "
            "same order of ranks (psgd.torch.init_process_group(comm))"
        )
