"""Local update rules on one flat vector: what happens to a gradient once it is known.

An optimizer is a frozen set of options; `Optimizer.bind` gives it parameters and state. Every
rule gets the gradient *summed* over its samples and their number, so that a mean is one factor
inside the fused kernel and not another pass over memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from .errors import UserError
from .kernels import body
from .parameters import Parameters
from .schedules import Schedule, value_at

Array = Any  #: a NumPy or CuPy array


@dataclass
class OptimizerState:
    """All that a rule remembers; with the parameters, all that a checkpoint needs of it.

    Attributes:
        buffers: vectors of the parameters' layout, by name ("m", "v").
        steps: updates so far.
        samples: samples in them, of all ranks: the clock of the schedules.
    """

    buffers: dict[str, Array] = field(default_factory=dict)
    steps: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """Options that all rules share.

    Args:
        lr: learning rate for the mean gradient of a minibatch (whatever its size); a number or a
            `Schedule` by samples.
        lr_per_sample: learning rate for the summed gradient, so that a minibatch twice as large
            takes a step twice as long (CNTK's per-sample rates). Give one of the two.
    """

    lr: float | Schedule | None = None
    lr_per_sample: float | Schedule | None = None

    def __post_init__(self) -> None:
        if (self.lr is None) == (self.lr_per_sample is None):
            raise UserError(
                f"{type(self).__name__}: lr={self.lr} and lr_per_sample={self.lr_per_sample}: "
                "exactly one of them must be given"
            )
        for name, value in (("lr", self.lr), ("lr_per_sample", self.lr_per_sample)):
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name}={value} must be a finite number, at least 0")

    @abstractmethod
    def init(self, parameters: Parameters) -> OptimizerState:
        """The state before the first step. Local."""

    @abstractmethod
    def step(self, state: OptimizerState, x: Array, gradient: Array, samples: int) -> None:
        """One update, in place.

        Args:
            state: changed, but for its counters.
            x: float32 or float64 [n], the parameters, changed.
            gradient: [n], summed over `samples` samples; unchanged.
            samples: at least 1.

        Local. One pass over memory, no temporary arrays.
        """

    def bind(self, parameters: Parameters) -> LocalStep:
        return LocalStep(self, parameters)

    def mean_lr(self, state: OptimizerState, samples: int) -> float:
        """The learning rate for the mean gradient of `samples` samples, now."""
        if self.lr is not None:
            return value_at(self.lr, state.samples)
        assert self.lr_per_sample is not None
        return value_at(self.lr_per_sample, state.samples) * samples


class LocalStep:
    """An optimizer at work on one model: the `local_step` that algorithms call."""

    def __init__(self, optimizer: Optimizer, parameters: Parameters) -> None:
        self.optimizer, self.parameters = optimizer, parameters
        self.state = optimizer.init(parameters)

    def __call__(self, gradient: Array, samples: int) -> None:
        """Update the parameters with a gradient summed over `samples` samples. Local."""
        self.optimizer.step(self.state, self.parameters.flat, gradient, samples)
        self.state.steps += 1
        self.state.samples += samples

    @property
    def lr(self) -> float:
        """The learning rate of the next step, for a mean gradient or per sample as given."""
        given = self.optimizer.lr if self.optimizer.lr is not None else self.optimizer.lr_per_sample
        assert given is not None
        return value_at(given, self.state.samples)


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """x -= lr * mean gradient"""

    def init(self, parameters: Parameters) -> OptimizerState:
        return OptimizerState()

    def step(self, state: OptimizerState, x: Array, gradient: Array, samples: int) -> None:
        body(x).sgd_step(x, gradient, self.mean_lr(state, samples) / samples)


@dataclass(frozen=True, kw_only=True)
class MomentumSGD(Optimizer):
    """m = momentum * m + gain * mean gradient;  x -= lr * m

    Args:
        momentum: in [0, 1), per minibatch.
        momentum_time_constant: instead of `momentum`, in samples: after so many samples a
            gradient's weight has fallen to 1/e, momentum = exp(-samples / time constant).
        unit_gain: gain = 1 - momentum (CNTK's default form), so that the momentum does not change
            how far a constant gradient leads; otherwise gain = 1 (the plain form).
    """

    momentum: float | None = None
    momentum_time_constant: float | None = None
    unit_gain: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum is not None and self.momentum_time_constant is not None:
            raise UserError(
                f"momentum={self.momentum} and momentum_time_constant="
                f"{self.momentum_time_constant}: at most one of them may be given"
            )
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise UserError(f"momentum={self.momentum} must be at least 0 and less than 1")
        if self.momentum_time_constant is not None and not self.momentum_time_constant >= 0:
            raise UserError(
                f"momentum_time_constant={self.momentum_time_constant} must be at least 0 samples"
            )

    def init(self, parameters: Parameters) -> OptimizerState:
        return OptimizerState({"m": parameters.like().flat})

    def step(self, state: OptimizerState, x: Array, gradient: Array, samples: int) -> None:
        momentum = self.momentum_for(samples)
        gain = (1 - momentum if self.unit_gain else 1.0) / samples
        lr = self.mean_lr(state, samples)
        body(x).momentum_step(x, state.buffers["m"], gradient, lr, momentum, gain, self._nesterov)

    def momentum_for(self, samples: int) -> float:
        """The momentum of a minibatch of `samples` samples (0.9 where none was given)."""
        if self.momentum_time_constant is None:
            return 0.9 if self.momentum is None else self.momentum
        tau = self.momentum_time_constant
        return math.exp(-samples / tau) if tau > 0 else 0.0

    @property
    def _nesterov(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class NesterovSGD(MomentumSGD):
    """m = momentum * m + gain * mean gradient;  x -= lr * (momentum * m + gain * mean gradient)

    Source: Sutskever et al., ICML 2013, in the form of x at the look-ahead point, as PyTorch's.
    """

    @property
    def _nesterov(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam with bias correction, and AdamW's decay (not part of the gradient).

    Args:
        beta1, beta2: in [0, 1), weights of the old averages of gradient and squared gradient.
        epsilon: added to the root of the average square.
        weight_decay: x -= lr * weight_decay * x in every step.

    Source: Kingma & Ba, ICLR 2015, algorithm 1; Loshchilov & Hutter, ICLR 2019, algorithm 2.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise UserError(f"{name}={beta} must be at least 0 and less than 1")
        for name, value in (("epsilon", self.epsilon), ("weight_decay", self.weight_decay)):
            if not value >= 0:
                raise UserError(f"{name}={value} must be at least 0")

    def init(self, parameters: Parameters) -> OptimizerState:
        return OptimizerState({"m": parameters.like().flat, "v": parameters.like().flat})

    def step(self, state: OptimizerState, x: Array, gradient: Array, samples: int) -> None:
        t = state.steps + 1
        lr = self.mean_lr(state, samples)
        bias1, bias2 = 1 - self.beta1**t, math.sqrt(1 - self.beta2**t)
        body(x).adam_step(
            x,
            state.buffers["m"],
            state.buffers["v"],
            gradient,
            1 / samples,
            lr * bias2 / bias1,
            self.beta1,
            self.beta2,
            self.epsilon * bias2,
            lr * self.weight_decay,
        )


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "momentum": MomentumSGD,
    "nesterov": NesterovSGD,
    "adam": Adam,
}
"""By the names of the command line."""
