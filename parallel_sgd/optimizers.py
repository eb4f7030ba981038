"""Local update rules on one flat vector: the last step of training on a gradient.

An optimizer is a frozen set of options; `Optimizer.bind` adds parameters and state. Every rule gets
the gradient *summed* over its samples, and their number. Thus a mean is one factor inside the fused
kernel, and not another pass over memory.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .errors import UserError
from .kernels import body, empty_like
from .local_step import LocalStep, OptimizerState, UpdateRule
from .options import Choice, Real, option, options
from .parameters import Parameters
from .schedules import Rate, Schedule
from .second_moment import LARGEST_MOVE, learn
from .validation import LARGEST, number, set_validated, shown

Array = Any  #: a NumPy or CuPy array

SMALLEST_EPSILON = 1e-30
"""Smallest value to be added to a root of possibly 0. In float32, and times Adam's bias correction,
a smaller value could vanish, and 0 be divided by 0."""


@options
class Optimizer(UpdateRule):
    """A local update rule. Give one of the two learning rates."""

    lr: float | Schedule | None = option(
        None, Rate(), "learning rate for the mean gradient of a minibatch, whatever its size"
    )
    lr_per_sample: float | Schedule | None = option(
        None,
        Rate(),
        "learning rate for the summed gradient: a minibatch twice as large takes a step twice "
        "as long (CNTK's per-sample rates)",
    )

    def __post_init__(self) -> None:
        if (self.lr is None) == (self.lr_per_sample is None):
            raise UserError(
                f"{type(self).__name__}: lr={shown(self.lr)} and "
                f"lr_per_sample={shown(self.lr_per_sample)}: exactly one of them must be given"
            )
        super().__post_init__()

    @property
    def rate_is_per_sample(self) -> bool:
        return self.lr_per_sample is not None

    @property
    def is_built_in(self) -> bool:
        """True for the optimizers of this package, which have kernels. Local."""
        return type(self) in OPTIMIZERS.values()

    @property
    def initial_values(self) -> Mapping[str, float]:
        """Initial values of the state's vectors, by name."""
        return {}

    def init(self, parameters: Parameters) -> OptimizerState:
        """Return the state before the first step. Local."""
        state = OptimizerState({name: parameters.like().flat for name in self.initial_values})
        self.reset(state)
        return state

    def reset(self, state: OptimizerState) -> None:
        state.steps = 0
        state.correction.clear()
        for name, vector in state.buffers.items():
            vector.fill(self.initial_values.get(name, 0.0))

    def reset_part(self, state: OptimizerState, values: slice) -> None:
        for name, vector in state.buffers.items():
            vector[values] = self.initial_values.get(name, 0.0)

    @abstractmethod
    def step(
        self,
        state: OptimizerState,
        x: Array,
        gradient: Array,
        samples: int,
        out: Array | None = None,
    ) -> None:
        """Take one step.

        Args:
            state: changed, except for its counters.
            x: float32 or float64 [n], the parameters, changed unless `out` is given.
            gradient: [n], summed over `samples` samples; unchanged.
            samples: at least 1.
            out: [n], separate memory for the new x. None: in place.

        Local. One pass over memory, no temporary arrays.
        """

    def bind(self, parameters: Parameters) -> LocalStep:
        return LocalStep(self, parameters)

    def rate_after(self, samples: int) -> float:
        given = self.lr if self.lr_per_sample is None else self.lr_per_sample
        if isinstance(given, float):  # already checked
            return given
        assert given is not None
        value = given(samples)
        if type(value) is float and 0 <= value <= LARGEST:
            return value
        try:
            name = "lr" if self.lr_per_sample is None else "lr_per_sample"
            return number(name, value, 0, may_vanish=True)
        except UserError as error:
            raise UserError(f"{error} (the schedule's value after {samples} samples)") from None

    def mean_lr(self, state: OptimizerState, samples: float) -> float:
        # This order gives the same bits as a schedule with its values multiplied by the factor.
        rate = self.rate_after(state.samples) * state.lr_factor
        return rate * samples if self.lr is None else rate


@options
class SGD(Optimizer):
    """x -= lr * mean gradient"""

    def step(
        self,
        state: OptimizerState,
        x: Array,
        gradient: Array,
        samples: int,
        out: Array | None = None,
    ) -> None:
        body(x).sgd_step(x, gradient, self.mean_lr(state, samples) / samples, out)


@options
class MomentumSGD(Optimizer):
    """m = momentum * m + gain * mean gradient;  x -= lr * m

    gain = 1 in the plain form, and 1 - momentum with `unit_gain`.
    """

    momentum: float | None = option(
        None,
        Real(below=1),
        "in [0, 1), per minibatch; 0.9 if no time constant is given",
    )
    momentum_time_constant: float | None = option(
        None,
        Real(),
        "instead of momentum: samples after which a gradient's weight has fallen to 1/e; "
        "momentum = exp(-samples / time constant)",
    )
    unit_gain: bool = option(
        False,
        Choice(False, True),
        "gain = 1 - momentum (CNTK's default form): the total step of a constant gradient does "
        "not depend on the momentum",
    )

    def __post_init__(self) -> None:
        self.require_at_most_one("momentum", "momentum_time_constant")
        super().__post_init__()
        if self.momentum is None and self.momentum_time_constant is None:
            set_validated(self, momentum=0.9)

    @property
    def initial_values(self) -> Mapping[str, float]:
        return {"m": 0.0}

    def step(
        self,
        state: OptimizerState,
        x: Array,
        gradient: Array,
        samples: int,
        out: Array | None = None,
    ) -> None:
        momentum = self.momentum_for(samples)
        gain = (1 - momentum if self.unit_gain else 1.0) / samples
        lr = self.mean_lr(state, samples)
        m, nesterov = state.buffers["m"], self._nesterov
        body(x).momentum_step(x, m, gradient, lr, momentum, gain, nesterov, out)

    def momentum_for(self, samples: float) -> float:
        tau = self.momentum_time_constant
        if tau is None:
            assert self.momentum is not None  # set in __post_init__
            return self.momentum
        return math.exp(-samples / tau) if tau > 0 else 0.0

    @property
    def _nesterov(self) -> bool:
        return False


@options
class NesterovSGD(MomentumSGD):
    """m = momentum * m + gain * mean gradient;  x -= lr * (momentum * m + gain * mean gradient)

    Source: Sutskever et al., ICML 2013, in the form of x at the look-ahead point, as in PyTorch.
    """

    @property
    def _nesterov(self) -> bool:
        return True


@options
class Adam(Optimizer):
    """Adam with bias correction, and AdamW's decay (not part of the gradient).

    For a gradient quantized by an entropy code, v is far too large for values that are small
    relative to their step, and Adam would move these too slowly. The root is then taken of

        slope * v + shift

    with the slope and shift of the value's group of 64. So the mean over the group is the mean
    square before quantization, measured by the ranks (`second_moment`); but no value moves by more
    than 8 learning rates. Nothing else changes.

    Source: Kingma & Ba, ICLR 2015, algorithm 1; Loshchilov & Hutter, ICLR 2019, algorithm 2. The
    correction is ours: docs/algorithms.md.
    """

    beta1: float = option(0.9, Real(below=1), "weight of the old average gradient, in [0, 1)")
    beta2: float = option(
        0.999, Real(below=1), "weight of the old average squared gradient, in [0, 1)"
    )
    epsilon: float = option(
        1e-8, Real(SMALLEST_EPSILON), "added to the root of the average square; at least 1e-30"
    )
    weight_decay: float = option(0.0, Real(), "x -= lr * weight_decay * x in every step")

    @property
    def initial_values(self) -> Mapping[str, float]:
        return {"m": 0.0, "v": 0.0}

    def step(
        self,
        state: OptimizerState,
        x: Array,
        gradient: Array,
        samples: int,
        out: Array | None = None,
    ) -> None:
        t = state.steps + 1
        lr = self.mean_lr(state, samples)
        bias1, bias2 = 1 - self.beta1**t, math.sqrt(1 - self.beta2**t)
        m, v = state.buffers["m"], state.buffers["v"]
        numbers = (
            1 / samples,
            lr * bias2 / bias1,
            self.beta1,
            self.beta2,
            self.epsilon * bias2,
            lr * self.weight_decay,
        )
        quantized, correction = state.quantized, state.correction
        kernels, least = body(x), bias2 / bias1 / LARGEST_MOVE
        places = quantized.places if quantized and correction else ()
        for place, is_quantized in _parts(x.size, places):
            values = x[place], m[place], v[place], gradient[place]
            new_x = None if out is None else out[place]
            if is_quantized:
                groups = correction["slopes"], correction["shifts"], place.start
                kernels.adam_step_of_quantized(*values, *numbers, *groups, least, new_x)
            else:
                kernels.adam_step(*values, *numbers, new_x)
        if quantized is not None and quantized.projections is not None:
            sums = empty_like(v, len(quantized.projections))
            sums.fill(0)
            kernels.add_to_groups(v, 0, 0, sums)
            mean = quantized.projections / samples
            learn(correction, mean, sums, x.size, t, self.beta2)

    @property
    def has_second_moment(self) -> bool:
        return True


def _parts(size: int, places: Sequence[slice]) -> Iterator[tuple[slice, bool]]:
    """Yield `places` and the gaps between them, in order, each with True for a place and False for
    a gap."""
    begin = 0
    for place in places:
        if begin < place.start:
            yield slice(begin, place.start), False
        yield place, True
        begin = place.stop
    if begin < size or size == 0:
        yield slice(begin, size), False


@options
class Adagrad(Optimizer):
    """g = mean gradient;  s += g * g;  x -= lr * g / (sqrt(s) + epsilon)

    Source: Duchi et al., JMLR 2011, with a diagonal matrix.
    """

    epsilon: float = option(
        1e-10, Real(SMALLEST_EPSILON), "added to the root of the sum of squares; at least 1e-30"
    )
    initial_accumulator: float = option(0.0, Real(), "initial sum of squares")

    @property
    def initial_values(self) -> Mapping[str, float]:
        return {"s": self.initial_accumulator}

    def step(
        self,
        state: OptimizerState,
        x: Array,
        gradient: Array,
        samples: int,
        out: Array | None = None,
    ) -> None:
        lr = self.mean_lr(state, samples)
        s = state.buffers["s"]
        body(x).adagrad_step(x, s, gradient, 1 / samples, lr, self.epsilon, out)


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "momentum": MomentumSGD,
    "nesterov": NesterovSGD,
    "adam": Adam,
    "adagrad": Adagrad,
}
"""Optimizers by their command-line names."""
