"""Every algorithm in Lightning: a DDPStrategy whose optimizer steps are those of a learner."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...algorithms import Algorithm
from ...communication import Communicator
from ...errors import UserError
from ...training import Checkpoints, load_checkpoint
from ...warning import warn
from ..learner import Learner

FOLDER = ".parallel_sgd"  #: appended to a checkpoint's name: the folder with the learner's state


class Learned:
    """Train by a learner in place of DDP: a base class in front of DDPStrategy.

    Args:
        algorithm: how the ranks train together.
        samples: maps a batch to its number of samples; None: Lightning's estimate, the length of
            the first axis.
        timeout_s: longest wait for other ranks, in seconds.
        options: of the learner.
        arguments: of DDPStrategy.

    Attributes:
        learner: the learner of the present fit, or of the latest; None before the first.
    """

    def __init__(
        self,
        *,
        algorithm: Algorithm[Any],
        samples: Callable[[Any], int] | None,
        timeout_s: float | None,
        options: Mapping[str, Any],
        batch_size_of: Callable[[Any], int],
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.learner: Learner | None = None
        self._algorithm, self._timeout_s, self._options = algorithm, timeout_s, dict(options)
        self._samples_of = samples or batch_size_of
        self._samples: int | None = None  #: of the minibatches since the latest step, if any
        self._stepped_samples = 0  #: of the latest step
        self._resumed: Path | None = None  #: the checkpoint of this fit
        self._evaluation = ExitStack()  #: holds the common model during a validation
        self._error: BaseException | None = None

    # A fit.

    def configure_ddp(self) -> None:
        """Leave the model without DDP. Lightning calls this in each fit. Local."""
        self._error, self._samples, self.learner = None, None, None

    def on_train_start(self) -> None:
        """Make the learner, after Lightning has restored a checkpoint. Collective."""
        super().on_train_start()  # type: ignore[misc]
        this: Any = self
        comm = Communicator.of_process_group(timeout_s=self._timeout_s)
        trainer, optimizers = this.lightning_module.trainer, this.optimizers

        def checked() -> None:
            if len(optimizers) != 1:
                raise UserError(
                    "LightningStrategy(algorithm=...): configure_optimizers must return one "
                    f"optimizer, and it has returned {len(optimizers)}"
                )
            if type(optimizers[0]).__name__ == "_MockOptimizer":  # Lightning's, in place of None
                raise UserError(
                    "LightningStrategy(algorithm=...): configure_optimizers must return one "
                    "optimizer, and it has returned None"
                )
            if trainer.gradient_clip_val:
                raise UserError(
                    f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) clips the gradient of "
                    "one rank: give LightningStrategy(algorithm=..., clip_norm=...) instead"
                )

        comm.together(checked)
        self.learner = Learner(
            this.lightning_module,
            optimizers[0],
            self._algorithm,
            comm,
            scaler=getattr(this.precision_plugin, "scaler", None),
            **self._options,
        )
        if self._resumed is not None:
            folder = _folder(self._resumed)
            if comm.allgather_object(folder.is_dir())[0]:
                load_checkpoint(self.learner, folder)
            elif comm.rank == 0:
                warn(f"LightningStrategy: there is no {folder}, so the algorithm begins anew")
            self._resumed = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count the minibatch's samples. Local."""
        self._samples = (self._samples or 0) + self._samples_of(batch)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **named: Any
    ) -> Any:
        """Take a step of all ranks, in place of the optimizer's. Collective."""
        this: Any = self
        assert self.learner is not None
        result = closure()
        this.precision_plugin._after_closure(this.lightning_module, optimizer)
        if this.lightning_module.trainer.fit_loop._skip_backward:  # StochasticWeightAveraging's
            return result
        if self._samples is not None:  # else a further step in a batch, by manual optimization
            self._stepped_samples, self._samples = self._samples, None
        self.learner.step(self._stepped_samples)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Send nothing while gradients of several minibatches are added up."""
        assert self.learner is not None
        with self.learner.no_sync():
            yield

    def on_train_end(self) -> None:
        """Complete all work, so that all ranks have the final model. Collective."""
        assert self.learner is not None
        self.learner.finish()
        super().on_train_end()  # type: ignore[misc]

    def on_exception(self, exception: BaseException) -> None:
        self._error = exception
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        """Close the learner. Collective, except after an error."""
        self._evaluation.close()
        self._resumed = None  # a checkpoint that was only tested
        if self.learner is not None and not self.learner.access.is_closed:
            comm = self.learner.comm
            self.learner.__exit__(None, self._error, None)
            if self._error is None:
                comm.close()
        super().teardown()  # type: ignore[misc]

    # Validation, with the common model.

    def on_validation_start(self) -> None:
        super().on_validation_start()  # type: ignore[misc]
        if self._trains:
            assert self.learner is not None
            self._evaluation.enter_context(self.learner.evaluation())

    def on_validation_end(self) -> None:
        self._evaluation.close()
        super().on_validation_end()  # type: ignore[misc]

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the common model. Local."""
        self._evaluation.close()  # Lightning saves before it reports the end of a validation
        if not self._trains:
            return dict(super().lightning_module_state_dict())  # type: ignore[misc]
        assert self.learner is not None
        with self.learner.shared_model():
            state = super().lightning_module_state_dict()  # type: ignore[misc]
            return {name: _copied(value) for name, value in state.items()}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint, and beside it a folder with the learner's state. Collective."""
        super().save_checkpoint(  # type: ignore[misc]
            checkpoint, filepath, storage_options=storage_options
        )
        if "optimizer_states" not in checkpoint:  # weights only
            return
        if not self._trains:
            warn(
                "LightningStrategy: a checkpoint that is saved after fit has no state of the "
                "algorithm: save by a ModelCheckpoint, during fit"
            )
            return
        assert self.learner is not None
        self._remove_folder(filepath)
        self.learner.meet()  # the folder is gone
        with Checkpoints(_folder(filepath), keep=1) as checkpoints:
            checkpoints.save(self.learner, background=False)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        self._remove_folder(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **named: Any) -> Any:
        """Load a checkpoint, whose learner's state is loaded later. Local."""
        self._resumed = Path(checkpoint_path).resolve()  # ModelCheckpoint(save_last="link")
        return super().load_checkpoint(checkpoint_path, *arguments, **named)  # type: ignore[misc]

    def _remove_folder(self, filepath: Any) -> None:
        folder = _folder(filepath)
        if self.is_global_zero and folder.is_dir():  # type: ignore[attr-defined]
            shutil.rmtree(folder)

    @property
    def _trains(self) -> bool:
        """Return True while there is an open learner."""
        return self.learner is not None and not self.learner.access.is_closed


def _folder(checkpoint: Any) -> Path:
    return Path(f"{checkpoint}{FOLDER}")


def _copied(value: Any) -> Any:
    return value.detach().clone() if hasattr(value, "detach") else value
