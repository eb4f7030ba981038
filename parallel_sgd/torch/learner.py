"""A PyTorch model, trained by the ranks together."""

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
    """Trains a PyTorch model with the gradients that `backward` leaves on each rank.

    The ranks together take the step that one process would take with the minibatches of all ranks
    as one. With a loss that is the mean over a rank's minibatch, gradients count by their samples,

        g = sum_k n_k g_k / sum_k n_k

    and with one that is the sum, they are added up. Nobody divides by the number of ranks.

    Args:
        model: any module whose trainable parameters are float32 (or float64) and on one device.
            They become views of one vector, with rank 0's values; frozen parameters and buffers
            become rank 0's, too.
        optimizer: of PyTorch's, made of the model's parameters, in any groups; or one of
            `parallel_sgd`'s. `step` calls it.
        algorithm: how the ranks train together.
        comm: the ranks.
        reduction: "mean" or "sum": what the loss is over the samples of a minibatch.
        clip_norm: the gradient of all ranks is scaled down to this norm, where it is larger, before
            the optimizer is given it.
        scaler: a `torch.amp.GradScaler`, where the loss is scaled by it. `step` unscales, and
            updates it; where a gradient overflows on any rank, all skip the minibatch, and the
            residuals stay as they were. (Where ranks train alone for a while, each by itself.)
        buffers: what becomes of BatchNorm's statistics and the like in `evaluation` and `finish`:
            all ranks have the "mean" of them, or those of the "first" rank, or each its own,
            "local". In training every rank goes on with its own. None: "mean", and rank 0 warns of
            the first buffer beside BatchNorm's that differs between the ranks, such as a queue.
        sync_perf_stats, minibatch_size, commit_every: as of `parallel_sgd.Learner`.
        not_finite, most_skipped, compare_every: likewise. What `not_finite` leaves out takes
            BatchNorm's statistics along: they are what they were before.
    Raises:
        UserError: on all ranks, naming what of the model, the optimizer or the options cannot be
            trained with, or differs between the ranks.

    Attributes:
        model, reduction: as they were given.

    `step` leaves no gradients behind, so that ``zero_grad`` is not needed. The optimizer's own
    ``step`` is refused as long as the learner is open; schedulers of learning rates go on as they
    are. A parameter that no rank has used is left alone by the optimizer, as PyTorch does; one that
    some have used counts as zero on the others. Checkpoints hold the optimizer's state, all
    residuals, buffers, the loss scale, and PyTorch's random generators.

    As soon as backward has completed a gradient, it lies in the learner's `gradient`, of which the
    parameter's ``grad`` is then a view.

    Collective. Memory: the gradient, which is where PyTorch's would be, and what the algorithm
    needs; with ``overlap=True`` a second gradient. Cost: each gradient is copied once, and read
    once more, to see that it is finite; and some 7 microseconds a parameter, where PyTorch's own
    backward and optimizer take 20 (1,000 parameters of 16 values, SGD with momentum, one core).

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
        self._facts: dict[str, Any] = {}  # as they are now: ranks that join begin like this
        self._scaling: Scaling | None = None
        self._overlap: Overlap | None = None
        self._holds_model = False  # what is not trained of it, as all ranks have it
        with on_default_stream(device_of(model)):
            try:
                rule = None
                try:
                    rule = prepare()
                    self._module = made[0]
                    together = getattr(algorithm, "synchronizes_every_step", False)
                    self._facts = {
                        "reduction": reduction,
                        "clip_norm": clip_norm,
                        "buffers": buffers,
                        "loss scale": None if scaler is None else scaler.state_dict(),
                        **layout_of(model),
                        **(state_fingerprint(optimizer) if together else {}),
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
            except BaseException:  # another learner may have both
                for module in made:
                    module.release()
                step: Any = getattr(self, "local_step", None)
                if isinstance(step, TorchStep):
                    step.release()
                raise

    def _begin(self) -> None:
        self._agree()
        if isinstance(getattr(self, "local_step", None), TorchStep):  # ranks died in a beginning
            self._release_hooks()
        super()._begin()

    def reconfigure(self) -> None:
        self._agree()
        super().reconfigure()

    def _agree(self) -> None:
        """See that all ranks can train the same model in the same way. Collective."""
        self.world.raise_together(self._problem)
        self.world.require_agreement(self._facts)

    def _form(self) -> None:
        super()._form()
        root = 0
        if self.world.fault_tolerant:  # the first rank may be one that joins
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
        """Make what stands between the model's gradients and the algorithm. Local."""
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
            together=algorithm.synchronizes_every_step,
            gathered_flags=lambda: self.consistency.notes,
            sum_late=lambda vector: algorithm.sum_late(self.state, self.runner.work, vector),
        )
        self._loop_checks = LoopChecks(self._module, algorithm, self.comm)
        self.model_state = ModelState(
            module=self._module,
            scaler=self._scaling and self._scaling.scaler,
            gradients=self._gradients,
        )
        self._local_samples: int | None = None  # in the latest step that had some
        self.skipped.kept["buffers"] = SavedBuffers(self.model)
        self.skipped.keep(self.samples)
        self.local_step.prepare = self._gradients.prepare
        if isinstance(self.local_step, TorchStep):
            self.local_step.used = self._gradients.used_by_any
            self.local_step.unit = lambda: self._gradients.unit

    def restarted(self) -> None:
        super().restarted()
        self._gradients.forget()
        self._forget_gradients()
        if self._scaling is not None:
            self._scaling.reset()
        self._local_samples = None
        self.skipped.keep(self.samples)

    def _forget_minibatch(self) -> None:
        super()._forget_minibatch()
        self._forget_gradients()
        assert self.recovery is not None
        self.recovery.set_back("model")  # its forward pass has changed buffers, and drawn numbers

    def _forget_gradients(self) -> None:
        self._module.clear_gradients()
        if self._overlap is not None:
            self._overlap.forget()

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
        """Of the latest update's gradient, before it was clipped; None without `clip_norm`."""
        return self._gradients.norm

    def step(self, samples: int, loss: float | None = None) -> int:
        """Train on the minibatch whose gradients `backward` has left in the model.

        Args:
            samples: of this rank in it: over so many the loss is the mean, or the sum; of several
                backwards together. 0 where it has none: then gradients are not looked at.
            loss: as of `parallel_sgd.Learner.step`; also a tensor of one value.
        Returns:
            The samples of all ranks in this minibatch; 0 where ranks have died, and it is dealt out
            anew: see `parallel_sgd.Learner.step`.
        Raises:
            UserError: on all ranks, as `parallel_sgd.Learner.step`, and if the model has other
                parameters than when the learner was made.

        Collective: every rank takes every step.
        """
        self.require_open()
        self.require_own_model("step")
        if self.serves:
            return super().step(samples)
        with on_default_stream(self._module.device):
            if self._announced.next_own() == 0:  # what a sampler gives a rank that has none
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
            given = self._announced.since_step
            self._loop_checks.before_step(samples, given, distributed=self.distributed)
            used = gradients.gather(samples)
        except UserError as error:
            self._module.clear_gradients()
            if isinstance(error, SharedError):
                raise
            self.fail(str(error))
        together = self.algorithm.synchronizes_every_step
        if self._scaling and together:
            gradients.overflow = self.runner.agree(int(gradients.overflow)) > 0
        if not gradients.overflow and (samples or together):
            gradients.begin(used)
        self.consistency.note = gradients.flags(used)
        try:
            total = super()._timed_step(samples)
        except BaseException:
            gradients.forget()
            if self._scaling is not None:
                self._scaling.reset()
            raise
        finally:
            self.consistency.note = 0
        try:
            self._loop_checks.after_step(samples, self._announced.taken)
        except UserError as error:
            self.fail(str(error))
        if not total or self.skipped.was_latest(self.samples):
            gradients.skip(used)
        used.agreed = self.consistency.notes % LATE > 0
        self._local_samples = samples or self._local_samples
        if self._scaling and total:
            self._scaling.update(overflow=gradients.overflow)
        return total

    def _step(self, samples: int, *, skip: bool = False) -> int:
        together = self.algorithm.synchronizes_every_step or not self.distributed
        skip = self._gradients.overflow and together
        return super()._step(samples, skip=skip)

    def _own_mark(self) -> int:
        if self._overlap is None:
            return super()._own_mark()
        first = self._overlap.first
        return 0 if first is None else mark_of(as_array(first).reshape(-1))

    def _expected_weight(self, backwards: int) -> float | None:
        """What the gradients of so many backwards are likely to count in the next step."""
        if not self.distributed or not self._gradients.unit:
            return None
        if not self._mean:
            return 1.0
        announced = self._announced.next_own(backwards)
        accumulated = backwards > 1 and self._local_samples  # of one minibatch or several: unknown
        if announced is None or accumulated:
            announced = self._local_samples
        return announced / self._gradients.unit if announced else None

    def scaled(self, loss: Any) -> Any:
        """A loss as its `backward` is to be called: by the `scaler`, where there is one. Of several
        losses a list. Local."""
        if not isinstance(loss, torch.Tensor):
            if not isinstance(loss, list | tuple | Iterator):
                raise UserError(f"loss must be a tensor of one value: it is {kind_of(loss)}")
            return [self.scaled(part) for part in loss]
        return loss if self._scaling is None else self._scaling.scaler.scale(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """For a `with` block around each backward of a step but the last one, where several add up
        to its gradient: with ``overlap=True`` nothing is sent before the last. Local."""
        return nullcontext() if self._overlap is None else self._overlap.paused()

    def feed(self) -> Feed:
        """As of `parallel_sgd.Learner`; and where no gradient waits for a step, what an earlier
        pass has given is forgotten: a DataLoader's workers may have fetched all of an epoch when
        the loop over it was left. Local."""
        if not self.serves and not self._module.has_gradients():
            self._announced.forget_left()
        return super().feed()

    def run_dry(self) -> None:
        """Take steps without samples until no rank has any left: where each rank has data of its
        own, as much as it has. Every rank calls it after its last minibatch. Collective."""
        while not self.serves and self.step(samples=0):
            pass

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """For a `with` block the model is the one that all ranks have in common, in ``eval`` mode
        and without gradients.

        Its buffers become what the learner's `buffers` says, and stay so. Collective, as the block
        begins; not for ranks that only serve.
        """
        with on_default_stream(self._module.device):
            self.meet()
            self.model_state.synchronize_buffers(self._buffers, self.comm)
            modes = [(part, part.training) for part in self.model.modules()]
            with self.aside("evaluate"), self.shared_model(), torch.no_grad():
                self.model.eval()
                try:
                    yield
                finally:
                    for part, training in modes:
                        part.training = training

    def evaluate(
        self, batches: Iterable[Any], score: Score, *, samples: Samples | None = None
    ) -> dict[str, float]:
        """Means over the samples of all ranks, with the model that they have in common.

        Args:
            batches: this rank's part of the data, such as a DataLoader of it; may be empty.
            score: called with the model and the parts of each batch, in ``eval`` mode and without
                gradients; gives the mean of every metric over the batch's samples, by name.
            samples: given a batch, over how many samples a score is the mean. None: the length of
                the first axis, which all tensors of the batch must have in common, however they are
                nested; of `data.Padded` sequences the tokens; of a PackedSequence its sequences or
                its tokens, whichever the other tensors have.
        Returns:
            The mean of every metric, the same on all ranks.
        Raises:
            UserError: on all ranks, if batches or scores are not as described on any of them, the
                samples of a batch cannot be told, or no rank has a sample.

        Collective; not for ranks that only serve. Training goes on as if it had not been there.
        """
        if self.recovery is not None and isinstance(batches, Iterator):
            batches = list(batches)  # they may be needed again

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
        """Complete what is under way, so that all ranks hold the final model, with the buffers that
        the learner's `buffers` says. Collective."""
        with on_default_stream(self._module.device):
            super().finish()

    def model_arrays(self) -> dict[str, Any]:
        """Return what a file of the model is to hold, by name: all parameters, frozen ones too,
        and all buffers that ``state_dict`` has, as NumPy's arrays. Local."""
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
