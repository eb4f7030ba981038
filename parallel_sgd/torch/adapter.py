"""The adapter of PyTorch models: connects a module and its optimizers with a learner."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import nn

from ..algorithms import Algorithm
from ..communication import Communicator
from ..errors import SharedError, UserError
from ..local_step import LocalStep
from ..state import Cause, StateReplaced
from ..training.consistency import mark_of
from ..training.model_adapter import AdaptedLearner, ModelAdapter, Take
from ..validation import choice, integer, number
from .arrays import as_array, host_array
from .gradients import LATE, Gradients
from .loop_checks import LoopChecks
from .model_state import BUFFERS, Buffers, ModelState, broadcast
from .module import FlatModule, buffers_of, layout_of, tensors_of
from .optimizer.update_rule import TorchOptimizer, TorchStep, rule_of
from .overlap import Overlap
from .refusals import require_unchanged_by_forward
from .scaling import Scaling, require_scaler

Reduction = Literal["mean", "sum"]


class TorchModel(ModelAdapter):
    """A PyTorch module with its optimizers. `torch.Learner` documents the arguments.

    Attributes:
        model: the module.
        module: the same module, with its parameters in one vector; valid from `prepare` on.
        gradients: of each minibatch, on their way to the optimizer; valid from `attach` on, as are
            the next three.
        scaling: the loss scale, if any.
        overlap: the overlapped exchange, if any.
        model_state: buffers, loss scale and random generators, for checkpoints.
    """

    module: FlatModule
    gradients: Gradients
    model_state: ModelState

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        algorithm: Algorithm[Any],
        *,
        reduction: Reduction,
        clip_norm: float | None,
        scaler: Any,
        buffers: Buffers | None,
    ) -> None:
        self.model, self._optimizer, self._algorithm = model, optimizer, algorithm
        self._reduction, self._mean, self._clip_norm = reduction, reduction == "mean", clip_norm
        self._scaler, self._buffers = scaler, buffers
        self.scaling: Scaling | None = None
        self.overlap: Overlap | None = None
        self._releases = ExitStack()  # undoes changes to model and optimizer
        self._facts: dict[str, Any] = {}  #: present values; joining ranks start with these
        self._holds_model = False  #: this rank has the common frozen parameters and buffers
        self._local_samples: int | None = None  # this rank's, in its latest step with samples

    # Setup.

    def prepare(self, world: Communicator) -> None:
        world.together(lambda: self._flatten(world.size))
        world.require_agreement(self._facts)

    def _flatten(self, ranks: int) -> None:
        """Put the module's parameters into one vector, and bind the optimizer to them. Local."""
        if self._facts:  # done by an earlier call
            return
        algorithm, scaler = self._algorithm, self._scaler
        choice("reduction", self._reduction, ("mean", "sum"))
        if self._buffers is not None:
            choice("buffers", self._buffers, BUFFERS)
        if self._clip_norm is not None:
            number("clip_norm", self._clip_norm, 0)
        if scaler is not None:
            require_scaler(scaler)
        self.module = FlatModule(self.model)
        self._releases.callback(self.module.release)
        synchronous = getattr(algorithm, "synchronizes_every_step", False)
        if ranks > 1 and synchronous:
            require_unchanged_by_forward(self.model)
        if scaler is not None and getattr(algorithm, "overlap", False):
            raise UserError(
                "overlap=True must not be given with a scaler: a gradient that overflows has "
                "partly been sent by then; use overlap=False, or bfloat16, which needs no scaler"
            )
        self.parameters = self.module.parameters
        self.optimizer = rule_of(self._optimizer, self.module, algorithm, mean=self._mean)
        self.scaling = None if scaler is None else Scaling(scaler, self.module.device)
        self._facts = {
            "reduction": self._reduction,
            "clip_norm": self._clip_norm,
            "buffers": self._buffers,
            "loss scale": None if scaler is None else scaler.state_dict(),
            **layout_of(self.model),
        }
        if isinstance(self.optimizer, TorchOptimizer):
            self._facts |= self.optimizer.members
            self._facts |= self.optimizer.fingerprint if synchronous else {}

    def attach(self, learner: AdaptedLearner) -> None:
        super().attach(learner)
        world = learner.world
        holders = world.allgather_object(self._holds_model)  # rank 0 may just have joined
        root = holders.index(True) if any(holders) else 0
        for tensor in (p for p in self.model.parameters() if not p.requires_grad):
            broadcast(tensor, world, root)
        for _, tensor in buffers_of(self.model):
            broadcast(tensor, world, root)
        self._holds_model = True
        if self.module.gradient is not learner.gradient:
            self._build_gradient_path(learner)

    def _build_gradient_path(self, learner: AdaptedLearner) -> None:
        """Build the objects between the model's gradients and the algorithm. Local."""
        algorithm, step, module = self._algorithm, learner.local_step, self.module
        module.attach_gradient(learner.gradient)
        self._releases.callback(module.release)
        self.overlap = None
        if algorithm.overlap:
            self.overlap = Overlap(module, learner.ready, self._expected_weight)
            self._releases.callback(self.overlap.release)
        self.gradients = Gradients(
            module,
            learner.comm,
            mean=self._mean,
            divides=self._mean and isinstance(step, TorchStep),
            clip_norm=self._clip_norm,
            scaling=self.scaling,
            overlap=self.overlap,
            synchronous=algorithm.synchronizes_every_step,
            gathered_flags=lambda: learner.consistency.notes,
            sum_late=lambda vector: algorithm.sum_late(learner.state, learner.runner.work, vector),
        )
        self._loop_checks = LoopChecks(module, algorithm, learner.comm)
        self.model_state = ModelState(
            module=module,
            scaler=self.scaling and self.scaling.scaler,
            gradients=self.gradients,
        )
        self._local_samples = None
        learner.skipped.kept["buffers"] = SavedBuffers(self.model)
        learner.skipped.keep(learner.samples)
        step.prepare = self.gradients.prepare
        if isinstance(step, TorchStep):
            step.used = self.gradients.used_by_any
            step.unit = lambda: self.gradients.unit

    def bind(self) -> LocalStep:
        step = super().bind()
        if isinstance(step, TorchStep):
            self._releases.callback(step.release)
        return step

    def detach(self) -> None:
        self._releases.close()

    # Steps.

    def step(self, samples: int, take: Take) -> int:
        learner, gradients = self.learner, self.gradients
        if learner.serves:
            return take(samples)
        try:
            samples = integer("samples", samples, 0)
            self.module.require_unchanged()
            if isinstance(learner.local_step, TorchStep):
                learner.local_step.require_ready(self.scaling)
            gradients.settle_unit(samples, learner.runner.agree)
            given = learner.ledger.since_step
            self._loop_checks.before_step(samples, given, distributed=learner.distributed)
            used = gradients.gather(samples)
        except UserError as error:
            self.module.clear_gradients()
            if isinstance(error, SharedError):
                raise
            learner.fail(str(error))
        synchronous = self._algorithm.synchronizes_every_step
        if self.scaling and synchronous:
            gradients.overflow = learner.runner.agree(int(gradients.overflow)) > 0
        if not gradients.overflow and (samples or synchronous):
            gradients.begin(used)
        learner.consistency.note = gradients.flags(used)
        skip = gradients.overflow and (synchronous or not learner.distributed)
        try:
            total = take(samples, skip=skip)
        except BaseException:
            gradients.reset()
            if self.scaling is not None:
                self.scaling.reset()
            raise
        finally:
            learner.consistency.note = 0
        try:
            self._loop_checks.after_step(samples, learner.ledger.taken)
        except UserError as error:
            learner.fail(str(error))
        if not total or learner.skipped.is_latest(learner.samples):
            gradients.skip(used)
        used.agreed = learner.consistency.notes % LATE > 0
        self._local_samples = samples or self._local_samples
        if self.scaling and total:
            self.scaling.update(overflow=gradients.overflow)
        return total

    def gradient_mark(self) -> int:
        if self.overlap is None:
            return mark_of(self.learner.gradient.flat)
        first = self.overlap.first
        return 0 if first is None else mark_of(as_array(first).reshape(-1))

    def _expected_weight(self, backwards: int) -> float | None:
        """Estimate the weight of the gradients of `backwards` backwards in the next step."""
        learner = self.learner
        if not learner.distributed or not self.gradients.unit:
            return None
        if not self._mean:
            return 1.0
        announced = learner.ledger.next_local_samples(backwards)
        accumulated = backwards > 1 and self._local_samples  # of one minibatch or several: unknown
        if announced is None or accumulated:
            announced = self._local_samples
        return announced / self.gradients.unit if announced else None

    def discard_minibatch(self) -> None:
        self._clear_gradients()
        # The forward pass has changed buffers, and drawn random numbers.
        self.learner.recovery.restore_part("model")

    def state_replaced(self, event: StateReplaced) -> None:
        if event.cause is not Cause.RECOVERED:
            return
        self.gradients.reset()
        self._clear_gradients()
        if self.scaling is not None:
            self.scaling.reset()
        self._local_samples = None

    def _clear_gradients(self) -> None:
        self.module.clear_gradients()
        if self.overlap is not None:
            self.overlap.reset()

    # The model of all ranks.

    def synchronize_buffers(self) -> None:
        """Make buffers equal on the ranks that train, as the option `buffers` says. Collective."""
        self.model_state.synchronize_buffers(self._buffers, self.learner.comm)

    def finish(self) -> None:
        self.synchronize_buffers()

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.model_state}

    def arrays(self) -> dict[str, Any]:
        return {name: host_array(tensor) for name, tensor in tensors_of(self.model).items()}


class SavedBuffers:
    """Save buffers such as BatchNorm's statistics, and restore them if a minibatch is skipped.

    Args:
        model: the module of the buffers.

    Local. Memory: a copy of the buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[str, torch.Tensor] = {}

    def take(self) -> None:
        before = self._copies
        self._copies = {}
        for name, buffer in buffers_of(self._model):
            copy = before.get(name)
            if copy is None or copy.shape != buffer.shape:
                copy = torch.empty_like(buffer)
            self._copies[name] = copy.copy_(buffer)

    def restore(self) -> None:
        for name, buffer in buffers_of(self._model):
            copy = self._copies.get(name)
            if copy is not None and copy.shape == buffer.shape:
                buffer.copy_(copy)
