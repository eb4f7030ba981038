"""An update rule bound to one model: its state, its interface, and the step of all algorithms."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .errors import UserError
from .options import Options
from .parameters import Parameters
from .second_moment import Quantized, is_projected, require_correction
from .state import Component, across, workspace

Array = Any  #: a NumPy or CuPy array


@dataclass
class OptimizerState(Component):
    """The state of an update rule: besides the parameters, a checkpoint needs nothing else.

    Attributes:
        buffers: vectors of the parameters' layout, by name ("m", "v").
        steps: updates so far.
        samples: seen by all ranks so far: the clock of schedules, blocks and sources.
        lr_factor: multiplies every learning rate, set with the next gradient: no training state.
        correction: of Adam's v for quantized gradients, by name: see `second_moment.learn`.
        quantized: facts about the next gradient, if an entropy code has quantized it.
    """

    buffers: dict[str, Array] = across("mean", default_factory=dict)
    steps: int = across("most", least=0, default=0)
    samples: int = across("same", least=0, default=0)
    lr_factor: float = workspace(default=1.0)
    correction: dict[str, Array] = across("same", open=True, default_factory=dict)
    quantized: Quantized | None = workspace(default=None)

    def copied(self, room: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of all state except the clock, for `restore`.

        Args:
            room: the result of an earlier call, whose vectors are reused; or empty.

        Local. Cost: one pass over the vectors.
        """
        earlier, copies = room.get("buffers", {}), dict[str, Array]()
        for name, vector in self.buffers.items():
            if name not in earlier:
                copies[name] = vector.copy()
            else:
                copies[name] = earlier[name]
                copies[name][...] = vector
        correction = {name: vector.copy() for name, vector in self.correction.items()}
        return {"buffers": copies, "steps": self.steps, "correction": correction}

    def align(self, comm: Any) -> None:
        """Give all ranks the same vectors in the same order: a rank without a vector gets zeros.
        The optimizers of this package have all vectors from the beginning. Collective."""

    def restore(self, copied: Mapping[str, Any]) -> None:
        """Restore all state except the clock, in place. Local."""
        self.steps = copied["steps"]
        self.correction.clear()
        self.correction.update(copied["correction"])
        for name, vector in self.buffers.items():
            vector[...] = copied["buffers"][name]

    def check(self, saved: Mapping[str, Any], ranks: int) -> None:
        if saved["buffers"].keys() != self.buffers.keys():
            names = (saved["buffers"], self.buffers)
            had, has = (", ".join(sorted(those)) or "none" for those in names)
            raise UserError(f"has optimizer.buffers {had}, but this optimizer has {has}")
        require_correction(saved["correction"], next(iter(self.buffers.values()), None))


class UpdateRule(Options, ABC):
    """The interface of an optimizer for algorithms and learners, independent of the
    implementation."""

    @abstractmethod
    def bind(self, parameters: Parameters) -> LocalStep:
        """Return the rule bound to these parameters. Local."""

    @abstractmethod
    def reset(self, state: OptimizerState) -> None:
        """Reset the state in place, except for the clock, to its values before the first step.
        Local."""

    def reset_part(self, state: OptimizerState, values: slice) -> None:
        """Reset the vectors of some parameters, but not the count of steps. Local.

        Args:
            values: the slice of the flat vector.
        """
        for vector in state.buffers.values():
            vector[values] = 0

    @abstractmethod
    def rate_after(self, samples: int) -> float | None:
        """Return the learning rate after `samples` samples, for a mean gradient or per sample as
        configured; None for a rule without a learning rate.

        Raises:
            UserError: the schedule's value is not finite (in float32), or below 0.
        """

    @abstractmethod
    def mean_lr(self, state: OptimizerState, samples: float) -> float | None:
        """Return the present learning rate for the mean gradient of `samples` samples, times
        `lr_factor`; None for a rule without a learning rate.

        Raises:
            UserError: as `rate_after`, before any change.
        """

    def momentum_for(self, samples: float) -> float:
        """Return the momentum of a step on `samples` samples; 0 for a rule without momentum, or
        with a correction for a momentum that begins with zeros. Local."""
        return 0.0

    @property
    def rate_is_per_sample(self) -> bool:
        """True if, at one rate, a minibatch twice as large takes a step twice as long. Local."""
        return False

    @property
    def has_second_moment(self) -> bool:
        """True if the rule divides by a mean square of gradients, and so needs the mean square
        before quantization. Local."""
        return False

    def projected_step(self, state: OptimizerState) -> int:
        """Return the number of the next step if that needs projections of its gradient; otherwise
        0. Local."""
        step = state.steps + 1
        return step if is_projected(step) or not state.correction else 0

    @property
    def lacks_rate(self) -> str | None:
        """The reason in a few words, if a factor on the learning rate does not reach all
        parameters; otherwise None. Local."""
        return None


class LocalStep:
    """An optimizer bound to one model: the `local_step` called by algorithms.

    Attributes:
        prepare: called with every gradient, and its number of samples, before the step; may change
            the gradient in place (to clip it, say), and returns False to omit the step.
    """

    optimizer: Any  #: an `UpdateRule`, in this class an `Optimizer`
    prepare: Callable[[Array, int], bool] | None = None

    def __init__(self, optimizer: Any, parameters: Parameters) -> None:
        self.optimizer, self.parameters = optimizer, parameters
        self.state: OptimizerState = optimizer.init(parameters)

    def __call__(
        self,
        gradient: Array,
        samples: int,
        total: int | None = None,
        *,
        out: Array | None = None,
    ) -> None:
        """Update the parameters with a gradient, and advance the clock.

        Args:
            gradient: [n], summed over `samples` samples.
            samples: in the gradient; with 0 only the clock advances.
            total: samples of all ranks in this minibatch, if not all are in this gradient.
            out: [n], separate memory for the new parameters; the old vector stays unchanged. None:
                in place. Without samples the parameters stay in the old vector.

        Local.
        """
        if samples and self._prepared(gradient, samples):
            self.update(gradient, samples, out)
            self.state.steps += 1
        self.state.samples += samples if total is None else total

    def _prepared(self, gradient: Array, samples: int) -> bool:
        """Call `prepare`. If this clips the gradient, clip its projections by the same factor."""
        if self.prepare is None:
            return True
        quantized = self.state.quantized
        projections = None if quantized is None else quantized.projections
        before = 0.0 if projections is None else float(gradient @ gradient)
        applies = self.prepare(gradient, samples)
        if applies and projections is not None and before > 0:
            projections *= math.sqrt(float(gradient @ gradient) / before)
        return applies

    def update(self, gradient: Array, samples: int, out: Array | None) -> None:
        """Take one step with a gradient; arguments as in a call of this object. Local."""
        self.optimizer.step(self.state, self.parameters.flat, gradient, samples, out)
        if out is not None:
            self.parameters.rebind(out)

    def compile(self) -> None:
        """Compile the kernel, in place and not, before the first step. Local."""
        few = Parameters({"few": self.parameters.flat[:0].copy()})
        for out in (None, few.flat.copy()):
            LocalStep(self.optimizer, few)(few.flat, 1, out=out)

    def first_calls(self, *, quantized: bool) -> list[Callable[[], object]]:
        """Return steps without values, in place, for `kernels.prepare`; none for a user's own
        optimizer. Local.

        Args:
            quantized: steps may get gradients quantized by an entropy code.
        """
        if not self.optimizer.is_built_in:
            return []
        few = Parameters({"few": self.parameters.flat[:0].copy()})
        step = LocalStep(replace(self.optimizer, lr=1.0, lr_per_sample=None), few)

        def after_quantization() -> None:
            step.state.quantized = Quantized((slice(0, 0),), few.flat)
            for _ in range(2):  # one learns a correction, one applies it
                step(few.flat, 1)

        corrected = quantized and self.optimizer.has_second_moment
        return [lambda: step(few.flat, 1), *([after_quantization] if corrected else [])]

    @property
    def samples(self) -> int:
        """Samples seen by all ranks so far: the one clock of training."""
        return self.state.samples

    @property
    def lr(self) -> float | None:
        """The optimizer's learning rate at the next step, for a mean gradient or per sample as
        configured, without `lr_factor`; None for a rule without a learning rate."""
        rate: float | None = self.optimizer.rate_after(self.state.samples)
        return rate

    def mean_lr(self, samples: float) -> float | None:
        """Return the learning rate of the next step: see `UpdateRule.mean_lr`."""
        rate: float | None = self.optimizer.mean_lr(self.state, samples)
        return rate
