"""The learner for PyTorch models: a module's parameters, trained by all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from ..algorithms import Algorithm
from ..communication import Communicator
from ..errors import SharedError, UserError
from ..optimizers import Optimizer, UpdateRule
from ..state import Cause
from ..training import Learner as ArrayLearner
from ..training.arguments import require_communicator
from ..training.consistency import EVERY, mark_of
from ..training.feed import Feed
from ..training.learner_setup import AS_MADE, FIXED
from ..training.non_finite import MOST_SKIPPED, NotFinite
from ..training.recovery.rollback import COMMIT_EVERY
from ..training.session.batches import Samples
from ..training.session.means import weighted_means
from ..validation import choice, integer, kind_of, number
from .arrays import as_array, host_array, on_default_stream
from .evaluation import Score, sums_over
from .gradients import LATE, Gradients
from .loop_checks import LoopChecks
from .model_state import BUFFERS, Buffers, ModelState, broadcast
from .module import FlatModule, buffers_of, device_of, layout_of, tensors_of
from .optimizer.state import state_fingerprint
from .optimizer.update_rule import TorchStep, rule_of
from .overlap import Overlap
from .refusals import require_unchanged_by_forward
from .saved_buffers import SavedBuffers
from .scaling import Scaling, require_scaler

Reduction = Literal["mean", "sum"]


class Learner(ArrayLearner):
    """Train a PyTorch model with the gradients that `backward` leaves on each rank.

    All ranks together take the step of a single process whose minibatch is the union of their
    minibatches. With n_k samples and gradient g_k on rank k, and a loss that is the mean over a
    rank's minibatch,

        g = sum_k n_k g_k / sum_k n_k

    With a loss that is the sum over a minibatch, g = sum_k g_k. The number of ranks is never a
    divisor.

    Args:
        model: any module whose trainable parameters are all float32 or all float64, and on one
            device. They become views of one vector. Trainable and frozen parameters and buffers
            start with rank 0's values.
        optimizer: a PyTorch optimizer of the model's parameters, in any parameter groups, or an
            optimizer of `parallel_sgd`. `step` calls it.
        algorithm: how the ranks train together.
        comm: the ranks.
        reduction: "mean" or "sum": how the loss reduces over the samples of a minibatch.
        clip_norm: the largest norm of the gradient of all ranks. A larger gradient is scaled down
            to this norm before the optimizer step. None: no clipping.
        scaler: the `torch.amp.GradScaler` of the loss, if any. `step` unscales the gradients and
            updates the scaler. If a gradient overflows on any rank, all ranks skip the minibatch,
            and the residuals stay unchanged. (While ranks train independently, each rank decides
            alone.)
        buffers: how `evaluation` and `finish` synchronize buffers such as BatchNorm's statistics:
            "mean" over the ranks, those of the "first" rank, or "local" for no synchronization.
            During training every rank keeps its own buffers. None: "mean", and rank 0 warns of the
            first buffer outside BatchNorm that differs between ranks, such as a queue.
        sync_perf_stats, minibatch_size, commit_every: see `parallel_sgd.Learner`.
        not_finite, most_skipped, compare_every: see `parallel_sgd.Learner`. If `not_finite` skips a
            minibatch, BatchNorm's statistics are restored to their values before that minibatch.
    Raises:
        UserError: on all ranks, if the model, the optimizer or an option does not support training
            or differs between ranks. The message names the cause.

    Attributes:
        model, reduction: as given.

    `step` clears all gradients, so ``zero_grad`` is not needed. Calls of the optimizer's own
    ``step`` raise a UserError until the learner is closed. Learning rate schedulers work as usual.
    If no rank has used a parameter, the optimizer leaves that parameter unchanged, as PyTorch does.
    If only some ranks have used a parameter, its gradient is zero on the remaining ranks.
    Checkpoints hold the optimizer's state, all residuals, buffers, the loss scale, and the states
    of PyTorch's random generators.

    As soon as backward completes a gradient, the gradient is moved into the learner's `gradient`,
    and the parameter's ``grad`` is a view of its place there.

    Collective. Memory: the gradient, in place of PyTorch's own gradients, and the algorithm's
    state; with ``overlap=True`` a second gradient. Cost: one copy of each gradient and one more
    read to check for non-finite values; about 7 microseconds per parameter, compared with 20 for
    PyTorch's backward and optimizer (1,000 parameters of 16 values, SGD with momentum, one core).

    >>> import torch, parallel_sgd as psgd
    >>> comm = psgd.Communicator.single()
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(gradient_bits=4), comm)
    >>> x, y = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
    >>> for _ in range(3):
    ...     torch.nn.functional.cross_entropy(model(x), y).backward()
    ...     global_samples = learner.step(samples=len(x))
    >>> global_samples
    8
    """

    fixed = FIXED | dict.fromkeys(("model", "reduction", "clip_norm", "scaler", "buffers"), AS_MADE)

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Optimizer,
        algorithm: Algorithm[Any],
        comm: Communicator,
        *,
        reduction: Reduction = "mean",
        clip_norm: float | None = None,
        scaler: Any = None,
        buffers: Buffers | None = None,
        sync_perf_stats: int = 0,
        minibatch_size: int | None = None,
        commit_every: int = COMMIT_EVERY,
        not_finite: NotFinite = "stop",
        most_skipped: int = MOST_SKIPPED,
        compare_every: int = EVERY,
    ) -> None:
        require_communicator(comm)
        self.model, self._buffers = model, buffers
        self.reduction, self._mean, self._clip_norm = reduction, reduction == "mean", clip_norm
        made: list[FlatModule] = []

        def prepare() -> UpdateRule:
            choice("reduction", reduction, ("mean", "sum"))
            if buffers is not None:
                choice("buffers", buffers, BUFFERS)
            if clip_norm is not None:
                number("clip_norm", clip_norm, 0)
            if scaler is not None:
                require_scaler(scaler)
            made.append(FlatModule(model))
            if comm.size > 1 and getattr(algorithm, "synchronizes_every_step", False):
                require_unchanged_by_forward(model)
            if scaler is not None and getattr(algorithm, "overlap", False):
                raise UserError(
                    "overlap=True with a scaler: what has been sent of a gradient that overflows "
                    "cannot be taken back; use overlap=False, or bfloat16, which needs no scaler"
                )
            return rule_of(optimizer, made[0], algorithm, mean=self._mean)

        self._problem: str | None = None
        self._facts: dict[str, Any] = {}  #: present values; joining ranks start with these
        self._scaling: Scaling | None = None
        self._overlap: Overlap | None = None
        self._holds_model = False  #: this rank has the common frozen parameters and buffers
        with on_default_stream(device_of(model)):
            try:
                rule = None
                try:
                    rule = prepare()
                    self._module = made[0]
                    synchronous = getattr(algorithm, "synchronizes_every_step", False)
                    self._facts = {
                        "reduction": reduction,
                        "clip_norm": clip_norm,
                        "buffers": buffers,
                        "loss scale": None if scaler is None else scaler.state_dict(),
                        **layout_of(model),
                        **(state_fingerprint(optimizer) if synchronous else {}),
                    }
                    self._scaling = None if scaler is None else Scaling(scaler, self._module.device)
                except UserError as error:
                    self._problem = str(error)
                super().__init__(
                    made[0].parameters if made else None,  # type: ignore[arg-type]
                    rule,  # type: ignore[arg-type]
                    algorithm,
                    comm,
                    sync_perf_stats=sync_perf_stats,
                    minibatch_size=minibatch_size,
                    commit_every=commit_every,
                    not_finite=not_finite,
                    most_skipped=most_skipped,
                    compare_every=compare_every,
                )
            except BaseException:  # so that another learner can use model and optimizer
                for module in made:
                    module.release()
                step: Any = getattr(self, "local_step", None)
                if isinstance(step, TorchStep):
                    step.release()
                raise

    def _begin(self) -> None:
        if isinstance(getattr(self, "local_step", None), TorchStep):  # a retry after a failure
            self._release_hooks()
        super()._begin()

    def _compare_arguments(self) -> None:
        """Check that all ranks can train and have the same model and options. Collective."""
        self.world.raise_together(self._problem)
        self.world.require_agreement(self._facts)
        super()._compare_arguments()

    def _form_group(self) -> None:
        super()._form_group()
        root = 0
        if self.world.fault_tolerant:  # rank 0 may just have joined
            holders = self.world.allgather_object(self._holds_model)
            root = holders.index(True) if any(holders) else 0
        for tensor in (p for p in self.model.parameters() if not p.requires_grad):
            broadcast(tensor, self.world, root)
        for _, tensor in buffers_of(self.model):
            broadcast(tensor, self.world, root)
        self._holds_model = True
        if self._module.gradient is not self.gradient:
            self._build_gradient_path()

    def _build_gradient_path(self) -> None:
        """Build the objects between the model's gradients and the algorithm. Local."""
        algorithm = self.algorithm
        self._module.attach_gradient(self.gradient)
        self._overlap = None
        if algorithm.overlap:
            self._overlap = Overlap(self._module, self.ready, self._expected_weight)
        self._gradients = Gradients(
            self._module,
            self.comm,
            mean=self._mean,
            divides=self._mean and isinstance(self.local_step, TorchStep),
            clip_norm=self._clip_norm,
            scaling=self._scaling,
            overlap=self._overlap,
            synchronous=algorithm.synchronizes_every_step,
            gathered_flags=lambda: self.consistency.notes,
            sum_late=lambda vector: algorithm.sum_late(self.state, self.runner.work, vector),
        )
        self._loop_checks = LoopChecks(self._module, algorithm, self.comm)
        self.model_state = ModelState(
            module=self._module,
            scaler=self._scaling and self._scaling.scaler,
            gradients=self._gradients,
        )
        self._local_samples: int | None = None  # this rank's, in its latest step with samples
        self.skipped.kept["buffers"] = SavedBuffers(self.model)
        self.skipped.keep(self.samples)
        self.local_step.prepare = self._gradients.prepare
        if isinstance(self.local_step, TorchStep):
            self.local_step.used = self._gradients.used_by_any
            self.local_step.unit = lambda: self._gradients.unit

    def state_replaced(self, cause: Cause) -> None:
        super().state_replaced(cause)
        if cause is not Cause.RECOVERED:
            return
        self._gradients.reset()
        self._clear_gradients()
        if self._scaling is not None:
            self._scaling.reset()
        self._local_samples = None

    def _discard_minibatch(self) -> None:
        super()._discard_minibatch()
        self._clear_gradients()
        # The forward pass has changed buffers, and drawn random numbers.
        self.recovery.restore_part("model")

    def _clear_gradients(self) -> None:
        self._module.clear_gradients()
        if self._overlap is not None:
            self._overlap.reset()

    @property
    def states(self) -> dict[str, Any]:
        return {**super().states, "model": self.model_state}

    @property
    def rate_is_per_sample(self) -> bool:
        if isinstance(self.local_step, TorchStep):
            return not self._mean
        return super().rate_is_per_sample

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the latest update's gradient before clipping; None without `clip_norm`."""
        return self._gradients.norm

    def step(self, samples: int, loss: float | None = None) -> int:
        """Train on the minibatch whose gradients `backward` has left in the model.

        Args:
            samples: this rank's number of samples in the minibatch: the count over which the loss
                is a mean or a sum, over all backwards of this step together. 0: this rank has no
                samples, and its gradients are ignored.
            loss: see `parallel_sgd.Learner.step`; also a tensor of one value.
        Returns:
            The number of samples of all ranks in this minibatch; 0 if ranks have failed and the
            minibatch is issued again: see `parallel_sgd.Learner.step`.
        Raises:
            UserError: on all ranks, as in `parallel_sgd.Learner.step`, and if the model's
                parameters have changed since the learner was made.

        Collective: every rank takes every step.
        """
        self.require_open()
        self.require_own_model("step")
        if self.serves:
            return super().step(samples)
        with on_default_stream(self._module.device):
            if self._ledger.next_local_samples() == 0:  # the sampler's sample is only a filler
                samples = 0
            loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
            return super().step(samples, loss)

    def _timed_step(self, samples: int) -> int:
        if self.serves:
            return super()._timed_step(samples)
        gradients = self._gradients
        try:
            samples = integer("samples", samples, 0)
            self._module.require_unchanged()
            if isinstance(self.local_step, TorchStep):
                self.local_step.require_ready(self._scaling)
            gradients.settle_unit(samples, self.runner.agree)
            given = self._ledger.since_step
            self._loop_checks.before_step(samples, given, distributed=self.distributed)
            used = gradients.gather(samples)
        except UserError as error:
            self._module.clear_gradients()
            if isinstance(error, SharedError):
                raise
            self.fail(str(error))
        synchronous = self.algorithm.synchronizes_every_step
        if self._scaling and synchronous:
            gradients.overflow = self.runner.agree(int(gradients.overflow)) > 0
        if not gradients.overflow and (samples or synchronous):
            gradients.begin(used)
        self.consistency.note = gradients.flags(used)
        try:
            total = super()._timed_step(samples)
        except BaseException:
            gradients.reset()
            if self._scaling is not None:
                self._scaling.reset()
            raise
        finally:
            self.consistency.note = 0
        try:
            self._loop_checks.after_step(samples, self._ledger.taken)
        except UserError as error:
            self.fail(str(error))
        if not total or self.skipped.is_latest(self.samples):
            gradients.skip(used)
        used.agreed = self.consistency.notes % LATE > 0
        self._local_samples = samples or self._local_samples
        if self._scaling and total:
            self._scaling.update(overflow=gradients.overflow)
        return total

    def _step(self, samples: int, *, skip: bool = False) -> int:
        synchronous = self.algorithm.synchronizes_every_step or not self.distributed
        skip = self._gradients.overflow and synchronous
        return super()._step(samples, skip=skip)

    def _gradient_mark(self) -> int:
        if self._overlap is None:
            return super()._gradient_mark()
        first = self._overlap.first
        return 0 if first is None else mark_of(as_array(first).reshape(-1))

    def _expected_weight(self, backwards: int) -> float | None:
        """Estimate the weight of the gradients of `backwards` backwards in the next step."""
        if not self.distributed or not self._gradients.unit:
            return None
        if not self._mean:
            return 1.0
        announced = self._ledger.next_local_samples(backwards)
        accumulated = backwards > 1 and self._local_samples  # of one minibatch or several: unknown
        if announced is None or accumulated:
            announced = self._local_samples
        return announced / self._gradients.unit if announced else None

    def scaled(self, loss: Any) -> Any:
        """Scale a loss by the `scaler`, if any, for its `backward`. Several losses give a list.
        Local.
        """
        if not isinstance(loss, torch.Tensor):
            if not isinstance(loss, list | tuple | Iterator):
                raise UserError(f"loss must be a tensor of one value: it is {kind_of(loss)}")
            return [self.scaled(part) for part in loss]
        return loss if self._scaling is None else self._scaling.scaler.scale(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager for every backward of a step but the last. If several backwards
        accumulate a gradient, ``overlap=True`` then sends nothing before the last backward. Local.
        """
        return nullcontext() if self._overlap is None else self._overlap.paused()

    def feed(self) -> Feed:
        """Open a feed as `parallel_sgd.Learner.feed` does. If no gradient is pending, first discard
        the minibatches left over from an earlier pass: a DataLoader's workers may have fetched a
        whole epoch by the time the loop was left. Local.
        """
        if not self.serves and not self._module.has_gradients():
            self._ledger.discard_unstepped()
        return super().feed()

    def run_dry(self) -> None:
        """Take steps without samples until no rank has samples left. For ranks with data sets of
        their own of different lengths: every rank calls `run_dry` after its last minibatch.
        Collective.
        """
        while not self.serves and self.step(samples=0):
            pass

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Switch to the ranks' common model for a `with` block, in ``eval`` mode and without
        gradients.

        The buffers are synchronized as the learner's `buffers` says, and stay so after the block.
        Collective, at the beginning of the block; not for ranks that only serve.
        """
        with on_default_stream(self._module.device):
            self.meet()
            self.model_state.synchronize_buffers(self._buffers, self.comm)
            modes = [(part, part.training) for part in self.model.modules()]
            with self.outside_training("evaluate"), self.shared_model(), torch.no_grad():
                self.model.eval()
                try:
                    yield
                finally:
                    for part, training in modes:
                        part.training = training

    def evaluate(
        self, batches: Iterable[Any], score: Score, *, samples: Samples | None = None
    ) -> dict[str, float]:
        """Return the mean of every metric over the samples of all ranks, for their common model.

        Args:
            batches: this rank's part of the data, such as a DataLoader over that part; may be
                empty.
            score: called with the model and the parts of each batch, in ``eval`` mode and without
                gradients. Returns the mean of every metric over the batch's samples, by name.
            samples: maps a batch to the number of samples over which its score is a mean. None: the
                length of the first axis, which must be equal in all tensors of the batch, however
                nested; for `data.Padded` sequences the number of tokens; for a PackedSequence the
                number of sequences or of tokens, whichever equals the length of the remaining
                tensors.
        Returns:
            The mean of every metric, the same on all ranks.
        Raises:
            UserError: on all ranks, if batches or scores are not as described on any rank, if the
                samples of a batch cannot be counted, or if no rank has a sample.

        Collective; not for ranks that only serve. Training continues unaffected, apart from the
        synchronized buffers.
        """
        if self.recovery.ranks_may_change and isinstance(batches, Iterator):
            batches = list(batches)  # a retry after a failure reads them again

        def means() -> dict[str, float]:
            with self.evaluation():
                problem, sums, total = None, dict[str, float](), 0
                try:
                    sums, total = sums_over(batches, self.model, score, samples)
                except UserError as error:
                    problem = str(error)
                self.comm.raise_together(problem)
                return weighted_means(self.comm, sums, total)

        with on_default_stream(self._module.device):
            return self.between_steps(means)

    def finish(self) -> None:
        """Complete all pending work. All ranks then hold the final model, with buffers synchronized
        as the learner's `buffers` says. Collective.
        """
        with on_default_stream(self._module.device):
            super().finish()

    def model_arrays(self) -> dict[str, Any]:
        """Return the contents of a model file, by name: all parameters, including frozen ones, and
        all buffers in ``state_dict``, as NumPy arrays. Local.
        """
        return {name: host_array(tensor) for name, tensor in tensors_of(self.model).items()}

    def _complete(self) -> None:
        super()._complete()
        if not self.serves:
            self.model_state.synchronize_buffers(self._buffers, self.comm)

    def _close(self, *, failed: bool) -> None:
        super()._close(failed=failed)
        self._module.release()
        self._release_hooks()

    def _release_hooks(self) -> None:
        if self._overlap is not None:
            self._overlap.release()
        if isinstance(self.local_step, TorchStep):
            self.local_step.release()
