"""The learner for PyTorch models: a module's parameters, trained by all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..algorithms import Algorithm
from ..communication import Communicator
from ..errors import UserError
from ..optimizers import Optimizer
from ..state import Cause
from ..training import Learner as ArrayLearner
from ..training.arguments import Options, require_communicator
from ..training.consistency import EVERY
from ..training.feed import Feed
from ..training.fixed_attributes import AS_MADE
from ..training.non_finite import MOST_SKIPPED, NotFinite
from ..training.recovery.rollback import COMMIT_EVERY
from ..training.session.batches import Samples
from ..training.session.means import Score, sums_over, weighted_means
from ..validation import kind_of
from .adapter import Reduction, TorchModel
from .arrays import on_default_stream
from .model_state import Buffers, ModelState
from .module import device_of
from .sharded_model import NOT_ELEMENTWISE, ShardedModel


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
            start with rank 0's values. A model sharded by FSDP2 is given as a `ShardedModel`.
        optimizer: a PyTorch optimizer of the model's parameters, in any parameter groups; a list
            of several, each of a part of the parameters, such as ``[muon, adamw]``; or an optimizer
            of `parallel_sgd`. `step` calls each of them, in the order of the list.
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
        UserError: on all ranks, if the model, an optimizer or an option does not support training
            or differs between ranks, or if a parameter is in two optimizers or in none. The message
            names the cause.

    Attributes:
        model, reduction: as given.

    `step` clears all gradients, so ``zero_grad`` is not needed. Calls of an optimizer's own
    ``step`` raise a UserError until the learner is closed. Learning rate schedulers work as usual.
    If no rank has used a parameter, the optimizer leaves that parameter unchanged, as PyTorch does.
    If only some ranks have used a parameter, its gradient is zero on the remaining ranks.
    Checkpoints hold the optimizer's state, all residuals, buffers, the loss scale, and the states
    of PyTorch's random generators.

    As soon as backward completes a gradient, the gradient is moved into the learner's `gradient`,
    and the parameter's ``grad`` is a view of its place there.

    Collective. Memory: the gradient, in place of PyTorch's own gradients, and the algorithm's
    state; with ``overlap=True`` a second gradient. Optimizer state in the shapes of parameters is
    kept in vectors of all parameters, one for each name ("exp_avg"): also if one of several
    optimizers has that name. Cost: one copy of each gradient and one more
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

    adapter: TorchModel
    fixed = ArrayLearner.fixed | dict.fromkeys(
        ("model", "reduction", "clip_norm", "scaler", "buffers"), AS_MADE
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Optimizer,
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
        self.model, self.reduction = model, reduction
        if isinstance(model, ShardedModel):
            comm = model.sharding.join(
                comm, lambda: _require_shardable(algorithm, optimizer, reduction, scaler)
            )
        adapter = TorchModel(
            model,
            optimizer,
            algorithm,
            reduction=reduction,
            clip_norm=clip_norm,
            scaler=scaler,
            buffers=buffers,
        )
        options = Options(
            sync_perf_stats, minibatch_size, commit_every, not_finite, most_skipped, compare_every
        )
        try:
            with on_default_stream(device_of(model)):
                self._start(adapter, algorithm, comm, options)
        except BaseException:
            self._leave()
            raise

    @property
    def model_state(self) -> ModelState:
        """Buffers, loss scale and random generators: part of a checkpoint. Local."""
        return self.adapter.model_state

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the latest update's gradient before clipping; None without `clip_norm`."""
        return self.adapter.gradients.norm

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
        self.access.require_open()
        self.access.require_own("step")
        if self.serves:
            return super().step(samples)
        with on_default_stream(self.adapter.module.device):
            if self.ledger.next_local_samples() == 0:  # the sampler's sample is only a filler
                samples = 0
            loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
            if isinstance(self.model, ShardedModel):  # each of its ranks has as many
                samples *= self.model.sharding.shards
            return super().step(samples, loss)

    def announce(self, samples: int, total: int) -> None:
        """See `parallel_sgd.Learner.announce`. Local."""
        shards = self.model.sharding.shards if isinstance(self.model, ShardedModel) else 1
        super().announce(samples * shards, total)

    def scaled(self, loss: Any) -> Any:
        """Scale a loss by the `scaler`, if any, for its `backward`. Several losses give a list.
        Local.
        """
        if not isinstance(loss, torch.Tensor):
            if not isinstance(loss, list | tuple | Iterator):
                raise UserError(f"loss must be a tensor of one value: it is {kind_of(loss)}")
            return [self.scaled(part) for part in loss]
        return loss if self.adapter.scaling is None else self.adapter.scaling.scaler.scale(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager for every backward of a step but the last. If several backwards
        accumulate a gradient, ``overlap=True`` then sends nothing before the last backward. Local.
        """
        overlap = self.adapter.overlap
        return nullcontext() if overlap is None else overlap.paused()

    def feed(self) -> Feed:
        """Open a feed as `parallel_sgd.Learner.feed` does. If no gradient is pending, first discard
        the minibatches left over from an earlier pass: a DataLoader's workers may have fetched a
        whole epoch by the time the loop was left. Local.
        """
        if isinstance(self.model, ShardedModel):
            raise UserError(
                "a ShardedModel takes no minibatches from psgd.torch.sampler or a "
                "psgd.data.Source, which know nothing of the ranks that share a model: give all "
                "ranks equally many samples, such as by torch.utils.data.DistributedSampler"
            )
        if not self.serves and not self.adapter.module.has_gradients():
            self.ledger.discard_unstepped()
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
        with on_default_stream(self.adapter.module.device):
            self.meet()
            self.adapter.synchronize_buffers()
            modes = [(part, part.training) for part in self.model.modules()]
            with self.timer.outside_training("evaluate"), self.shared_model(), torch.no_grad():
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
            The mean of every metric, the same on all ranks. Empty if training has rolled back to
            before the call, after a rank failure: see `Learner.between_steps`.
        Raises:
            UserError: on all ranks, if batches or scores are not as described on any rank, if the
                samples of a batch cannot be counted, or if no rank has a sample.

        Collective; not for ranks that only serve. Training continues unaffected, apart from the
        synchronized buffers.
        """
        batches = self.recovery.repeatable(batches)

        def means() -> dict[str, float]:
            with self.evaluation():
                problem, sums, total = None, dict[str, float](), 0
                try:
                    sums, total = sums_over(batches, self.model, score, samples)
                except UserError as error:
                    problem = str(error)
                ranks = (
                    self.model.sharding.ranks if isinstance(self.model, ShardedModel) else self.comm
                )
                ranks.raise_together(problem)
                return weighted_means(ranks, sums, total)

        with on_default_stream(self.adapter.module.device):
            return self.between_steps(means) or {}

    def finish(self) -> None:
        """Complete all pending work. All ranks then hold the final model, with buffers synchronized
        as the learner's `buffers` says. Collective.
        """
        with on_default_stream(self.adapter.module.device):
            super().finish()

    def state_replaced(self, cause: Cause) -> None:
        """See `parallel_sgd.Learner.state_replaced`. Collective, too, with a `ShardedModel`.

        Raises:
            SharedError: on all ranks: they have loaded shards of different steps.
        """
        super().state_replaced(cause)
        if isinstance(self.model, ShardedModel):
            ranks = self.model.sharding.ranks
            ranks.require_agreement({"samples of the loaded checkpoint": self.samples})

    def _close(self, *, failed: bool) -> None:
        super()._close(failed=failed)
        self._leave()

    def _leave(self) -> None:
        if isinstance(self.model, ShardedModel):
            self.model.sharding.leave()


def _require_shardable(
    algorithm: Algorithm[Any], optimizer: Any, reduction: Reduction, scaler: Any
) -> None:
    """Refuse what cannot train a `ShardedModel`. Local.

    Raises:
        UserError: naming the unsuited argument.
    """
    if algorithm.asynchronous:
        raise UserError(
            f"algorithm={type(algorithm).__name__} must not be given with a ShardedModel: servers "
            "would mix the shards of different ranks"
        )
    if reduction != "mean":
        raise UserError(
            f"reduction={reduction!r} must be 'mean' with a ShardedModel: FSDP averages gradients "
            "over the ranks that share a model"
        )
    if scaler is not None:
        raise UserError(
            "scaler must not be given with a ShardedModel: use FSDP's MixedPrecisionPolicy with "
            "bfloat16, which needs no scaler"
        )
    for one in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        if type(one).__name__ in NOT_ELEMENTWISE:
            raise UserError(
                f"optimizer {type(one).__name__} needs whole matrices, and a rank of a "
                "ShardedModel has parts of them: use an optimizer of single values, such as AdamW"
            )
