"""Local update rules on one flat vector: the last step of training on a gradient.

An optimizer is a frozen set of options; `Optimizer.bind` adds parameters and state. Every rule gets
the gradient *summed* over its samples, and their number. Thus a mean is one factor inside the fused
kernel, and not another pass over memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import UserError
from .kernels import body, empty_like
from .options import Choice, Options, Real, option, options
from .parameters import Parameters
from .schedules import Rate, Schedule
from .second_moment import LARGEST_MOVE, Quantized, is_projected, learn, require_correction
from .state import Component, across, workspace
from .validation import LARGEST, number, set_validated, shown

Array = Any  #: a NumPy or CuPy array

SMALLEST_EPSILON = 1e-30
"""Smallest value to be added to a root of possibly 0. In float32, and times Adam's bias correction,
a smaller value could vanish, and 0 be divided by 0."""


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


class LocalStep:
    """An optimizer bound to one model: the `local_step` called by algorithms.

    Attributes:
        prepare: called with every gradient, and its number of samples, before the step; may change
            the gradient in place (to clip it, say), and returns False to omit the step.
    """

    optimizer: Any  #: an `UpdateRule`
    prepare: Callable[[Array, int], bool] | None = None

    def __init__(self, optimizer: Optimizer, parameters: Parameters) -> None:
        self.optimizer, self.parameters = optimizer, parameters
        self.state = optimizer.init(parameters)

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
        if type(self.optimizer) not in OPTIMIZERS.values():
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

    def momentum_for(self, samples: int) -> float:
        """Return the momentum for a minibatch of `samples` samples."""
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
