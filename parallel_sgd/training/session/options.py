"""Options of a training session, and their checks before the session begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...communication import launched_size
from ...communication.liveness.preemption import preempt_on
from ...data import Dataset, Sequences, SequenceSource, as_dataset
from ...data.shares import checked_shares
from ...data.sources.minibatches import MinibatchSize, checked_minibatch_size
from ...errors import UserError
from ...options import Choice, Options, Real, Whole, option, options
from ...validation import checked_seed, choice, integer, kind_of, shown, with_article
from ..checkpoint.config import CheckpointConfig
from ..learner import Learner
from ..non_finite import MOST_SKIPPED
from .auto_tune import AutoLearningRate, AutoMinibatchSize
from .cross_validation import Callback, CrossValidation
from .objective import objective_of
from .run_folder import RunFolder
from .state import Progress
from .tracker import Tracker

FOLLOWS = ("constant", "linear", "sqrt")  #: growth of the learning rate with the minibatch size

KEEP_EVERY = 100
"""Default number of minibatches between two snapshots. Each snapshot costs a pass over memory."""


@options
class NotFinitePolicy(Options):
    """The treatment of a minibatch if its loss or gradient is not finite on any rank.

    "stop" ends training. "skip" skips the minibatch, as described at `Learner`'s `not_finite`.
    "reduce" lowers the learning rate for good, and restores the newest good state: all content of a
    checkpoint, kept in memory from time to time, including the place in the data. If training fails
    again before the next snapshot, the previous snapshot is restored. After too many failures in a
    row training ends.
    """

    not_finite: str = option(
        "stop",
        Choice("stop", "skip", "reduce"),
        "for a loss or a gradient that is not finite: stop training; skip the minibatch on all "
        "ranks; or reduce the learning rate, and restore a good state on all ranks",
    )
    not_finite_most: int = option(
        MOST_SKIPPED, Whole(), "most skips or reductions in a row; after more, training ends"
    )
    not_finite_factor: float = option(
        0.5, Real(positive=True, below=1), "with reduce: factor on the learning rate, each time"
    )
    not_finite_keep_every: int | None = option(
        None,
        Whole(1),
        f"with reduce: samples of all ranks between two snapshots in memory ({KEEP_EVERY} "
        "minibatches if not given)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_use("not_finite_factor", self.reduces, "not_finite='reduce'")
        self.require_use("not_finite_keep_every", self.reduces, "not_finite='reduce'")

    @property
    def reduces(self) -> bool:
        """Return whether training goes on at a lower learning rate. Local."""
        return self.not_finite == "reduce"


KINDS = {
    "validation": CrossValidation,
    "auto_minibatch_size": AutoMinibatchSize,
    "auto_learning_rate": AutoLearningRate,
    "not_finite": NotFinitePolicy,
    "checkpoints": CheckpointConfig,
    "folder": RunFolder,
    "tracker": Tracker,
}


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """The options of a `TrainingSession`, described there."""

    learner: Learner
    objective: Any
    train: Any
    minibatch_size: MinibatchSize | None = None
    epochs: int | None = None
    seed: int = 0
    rate_follows: str | None = None
    microbatch_size: int | None = None
    shares: Any = None
    validation: CrossValidation | None = None
    test: Any = None
    progress_every: int | None = None
    callbacks: Sequence[Callback] = ()
    auto_minibatch_size: AutoMinibatchSize | None = None
    auto_learning_rate: AutoLearningRate | None = None
    not_finite: NotFinitePolicy | str | None = None
    checkpoints: CheckpointConfig | None = None
    folder: RunFolder | None = None
    tracker: Tracker | None = None
    report: Callable[[Progress], object] | None = None
    started: Callable[[Learner], object] | None = None
    progress_bar: bool = False

    @property
    def may_end(self) -> bool:
        """Return whether training may end early, so that all ranks must be informed. Local."""
        patience = self.validation is not None and self.validation.patience is not None
        return bool(self.callbacks) or patience

    def checked(self) -> SessionOptions:
        """Return the same options with plain values.

        Raises:
            UserError: an option is not as required, or does not fit another option.

        Local.
        """
        if isinstance(self.not_finite, str):
            return replace(self, not_finite=NotFinitePolicy(not_finite=self.not_finite)).checked()
        for name, kind in KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise UserError(
                    f"{name} must be {with_article(kind.__name__)}: it is {kind_of(value)}"
                )
        optional: dict[str, Any] = {
            name: None if getattr(self, name) is None else integer(name, getattr(self, name), 1)
            for name in ("epochs", "microbatch_size", "progress_every")
        }
        size = self.minibatch_size
        if self.rate_follows is not None:
            choice("rate_follows", self.rate_follows, FOLLOWS)
        callbacks = self.callbacks
        listed = isinstance(callbacks, Sequence) and not isinstance(callbacks, str)
        if not listed or not all(map(callable, callbacks)):
            raise UserError(f"callbacks={shown(callbacks)} must be functions of a row, in a list")
        for name in ("report", "started"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise UserError(f"{name}={shown(function)} must be a function")
        checked = replace(
            self,
            **optional,
            objective=objective_of(self.objective),
            minibatch_size=None if size is None else checked_minibatch_size(size),
            seed=checked_seed(self.seed),
            shares=checked_shares(self.shares),
            progress_bar=choice("progress_bar", self.progress_bar, (True, False)),
            callbacks=tuple(callbacks),
            test=self._test(),
        )
        checked._require_possible()
        return checked

    def _test(self) -> Dataset | Sequences | None:
        if self.test is None or isinstance(self.test, Sequences):
            return self.test
        return as_dataset(self.test)

    def _require_possible(self) -> None:
        """Refuse combinations of options with each other or with this algorithm."""
        algorithm = self.learner.algorithm
        adjusted = [
            name
            for name in ("auto_minibatch_size", "auto_learning_rate", "rate_follows")
            if getattr(self, name) is not None
        ]
        reduces = isinstance(self.not_finite, NotFinitePolicy) and self.not_finite.reduces
        if reduces and not algorithm.roles.together:
            raise UserError(
                f"not_finite='reduce' must not be given with {type(algorithm).__name__}, whose "
                "servers end at numbers that are not finite"
            )
        if reduces:
            adjusted.append("not_finite='reduce'")
        on_servers = algorithm.optimizer_on_servers or bool(getattr(algorithm, "tables", None))
        if adjusted and (algorithm.asynchronous or on_servers):
            raise UserError(
                f"{adjusted[0]} must not be given with {type(algorithm).__name__}, whose workers "
                "are asynchronous, or whose servers take the steps"
            )
        rates = [name for name in adjusted if name != "auto_minibatch_size"]
        lacks = self.learner.local_step.optimizer.lacks_rate
        if rates and lacks:
            raise UserError(
                f"{rates[0]} must not be given: it changes the learning rate, but optimizer {lacks}"
            )
        if self.microbatch_size is not None and isinstance(self.train, SequenceSource):
            raise UserError(
                f"microbatch_size={self.microbatch_size} must not be given with a SequenceSource, "
                "whose minibatches are not cut"
            )
        if self.auto_minibatch_size is not None and not isinstance(self.minibatch_size, int | None):
            raise UserError(
                f"minibatch_size={shown(self.minibatch_size)} must be one number if "
                "auto_minibatch_size adjusts it"
            )
        all_ranks = self.learner.world.size == (launched_size() or 1)
        if self.checkpoints is None and all_ranks and preempt_on():
            raise UserError(
                "checkpoints=None must be a CheckpointConfig for a job with --preempt-on, which "
                "saves all state before it ends; train.py needs --checkpoint-every"
            )
        validation = self.validation
        if validation is not None and algorithm.asynchronous and validation.restore_best:
            raise UserError("restore_best=True must not be given with asynchronous workers")
