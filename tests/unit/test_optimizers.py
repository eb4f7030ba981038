"""The local update rules against their textbook formulas, written out in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from parallel_sgd import SGD, Adagrad, Adam, MomentumSGD, NesterovSGD, Parameters, UserError
from parallel_sgd.optimizers import OPTIMIZERS
from parallel_sgd.schedules import Cosine, Linear, Schedule, Steps
from parallel_sgd.second_moment import Quantized, learn, require_correction

N = 37
MINIBATCHES = (8, 8, 3, 16, 1, 8, 5)


def gradients():
    """(sum over its samples, samples) of each minibatch: their sizes differ."""
    random = np.random.default_rng(4)
    return [(samples * random.standard_normal(N), samples) for samples in MINIBATCHES]


def trained(optimizer, dtype=np.float64):
    parameters = Parameters({"W": np.linspace(-1, 1, N).astype(dtype)})
    step = optimizer.bind(parameters)
    for gradient, samples in gradients():
        given = gradient.astype(dtype)
        step(given, samples)
        assert np.array_equal(given, gradient.astype(dtype)), "the gradient was changed"
    return parameters.flat, step.state


def compare(optimizer, textbook):
    """`textbook(x, mean gradient, samples, samples before)` returns the next x."""
    x, seen = np.linspace(-1, 1, N), 0
    for gradient, samples in gradients():
        x = textbook(x, gradient / samples, samples, seen)
        seen += samples
    trained_x, state = trained(optimizer)
    np.testing.assert_allclose(trained_x, x, rtol=1e-12, atol=1e-14)
    assert (state.steps, state.samples) == (len(MINIBATCHES), sum(MINIBATCHES))
    single, _ = trained(optimizer, np.float32)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "rate",
    [
        0.01,
        Steps({0: 0.3, 16: 0.1, 20: 0.0}),
        Linear({0: 0.0, 30: 0.4}),
        Cosine(start=0.5, samples=40),
    ],
)
@pytest.mark.parametrize("name", ["lr", "lr_per_sample"])
def test_sgd_by_the_rate_after_the_samples_before_a_minibatch(rate, name):
    def textbook(x, g, samples, seen):
        now = rate(seen) if isinstance(rate, Schedule) else rate
        return x - now * (samples if name == "lr_per_sample" else 1) * g

    compare(SGD(**{name: rate}), textbook)


@pytest.mark.parametrize("unit_gain", [False, True])
@pytest.mark.parametrize("time_constant", [None, 25.0, 0.0])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("rate", ["lr", "lr_per_sample"])
def test_momentum(unit_gain, time_constant, nesterov, rate):
    m = np.zeros(N)

    def textbook(x, g, samples, seen):
        nonlocal m
        lr = 0.02 * (samples if rate == "lr_per_sample" else 1)
        if time_constant is None:
            mu = 0.8
        else:
            mu = math.exp(-samples / time_constant) if time_constant else 0.0
        push = (1 - mu) * g if unit_gain else g
        m = mu * m + push
        return x - lr * (mu * m + push if nesterov else m)

    options = {"momentum": 0.8} if time_constant is None else {}
    kind = NesterovSGD if nesterov else MomentumSGD
    compare(
        kind(**{rate: 0.02}, unit_gain=unit_gain, momentum_time_constant=time_constant, **options),
        textbook,
    )


def test_the_default_momentum():
    assert MomentumSGD(lr=1).momentum_for(10) == 0.9
    assert MomentumSGD(lr=1, momentum=0.0).momentum_for(10) == 0.0
    assert MomentumSGD(lr=1) == MomentumSGD(lr=1, momentum=0.9)
    assert "momentum=0.9," in repr(MomentumSGD(lr=1))
    assert "momentum=None," in repr(MomentumSGD(lr=1, momentum_time_constant=10))
    assert MomentumSGD(lr=1, momentum_time_constant=10).momentum_for(20) == pytest.approx(
        math.exp(-2)
    )


@pytest.mark.parametrize("beta1", [0.9, 0.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("epsilon", [1e-8, 0.1])
def test_adam(beta1, decay, epsilon):
    """Algorithm 1 of Kingma & Ba, line by line; AdamW's decay is beside it, times the rate."""
    m, v, t = np.zeros(N), np.zeros(N), 0
    beta2 = 0.99
    lr = Linear({0: 0.1, 40: 0.01})

    def textbook(x, g, samples, seen):
        nonlocal m, v, t
        t += 1
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        return x - lr(seen) * m_hat / (np.sqrt(v_hat) + epsilon) - lr(seen) * decay * x

    compare(Adam(lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=decay), textbook)


@pytest.mark.parametrize("rate", ["lr", "lr_per_sample"])
@pytest.mark.parametrize("epsilon", [1e-10, 0.1])
@pytest.mark.parametrize("initial", [0.0, 0.1])
def test_adagrad(rate, epsilon, initial):
    s = np.full(N, initial)
    lr = Linear({0: 0.1, 40: 0.01})

    def textbook(x, g, samples, seen):
        nonlocal s
        s = s + g**2
        factor = lr(seen) * (samples if rate == "lr_per_sample" else 1)
        return x - factor * g / (np.sqrt(s) + epsilon)

    compare(Adagrad(**{rate: lr}, epsilon=epsilon, initial_accumulator=initial), textbook)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_the_parameters_may_go_on_in_another_vector(kind, dtype):
    """With the bits of a step in place; the vector before, and views into it, keep their values."""
    here, moved = (
        Parameters({"a": np.linspace(-1, 0, 5, dtype=dtype), "b": np.ones((4, 8), dtype)})
        for _ in range(2)
    )
    in_place, elsewhere = kind(lr=0.1).bind(here), kind(lr=0.1).bind(moved)
    for gradient, samples in gradients():
        given, out = gradient.astype(dtype), np.full(N, np.nan, dtype)
        before, view, values = moved.flat, moved["b"], moved.flat.copy()
        in_place(given, samples)
        elsewhere(given, samples, out=out)
        assert moved.flat is out
        assert moved.flat.tobytes() == here.flat.tobytes()
        assert np.array_equal(moved["b"], here["b"]) and np.shares_memory(moved["b"], out)
        assert before.tobytes() == values.tobytes()
        assert np.shares_memory(view, before)
        assert given.tobytes() == gradient.astype(dtype).tobytes()
    buffers = elsewhere.state.buffers
    for name, buffer in in_place.state.buffers.items():
        assert buffer.tobytes() == buffers[name].tobytes()
    assert elsewhere.state.steps == in_place.state.steps == len(MINIBATCHES)


def test_without_samples_nothing_moves():
    parameters, out = Parameters({"x": np.ones(3)}), np.zeros(3)
    before = parameters.flat
    step = SGD(lr=0.1).bind(parameters)
    step(np.ones(3), 0, 5, out=out)
    assert parameters.flat is before
    assert not out.any()
    assert (step.state.steps, step.samples) == (0, 5)


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
@pytest.mark.parametrize("rate", ["lr", "lr_per_sample"])
def test_a_factor_on_the_learning_rate(kind, rate):
    """It counts for the steps before which it is set, as the same factor on the rate would."""
    parameters, expected = (Parameters({"W": np.linspace(-1, 1, N)}) for _ in range(2))
    full, half = (kind(**{rate: value}).bind(expected) for value in (0.1, 0.05))
    ramped = kind(**{rate: 0.1}).bind(parameters)
    half.state = full.state  # one state, two rates
    for i, (gradient, samples) in enumerate(gradients()):
        ramped.state.lr_factor = 0.5 if i < 3 else 1.0
        ramped(gradient, samples)
        (half if i < 3 else full)(gradient, samples)
    np.testing.assert_allclose(parameters.flat, expected.flat, rtol=1e-13)
    assert ramped.lr == 0.1


def test_the_factor_on_the_learning_rate_is_no_training_state():
    state = Adam(lr=1).init(Parameters({"x": np.zeros(2)}))
    assert state.lr_factor == 1 and "lr_factor" not in repr(state)
    assert [field.name for field in fields(state) if field.metadata.get("workspace")] == [
        "lr_factor",
        "quantized",
    ]


def test_what_clips_a_gradient_clips_its_projections():
    step = Adam(lr=0.0).bind(Parameters({"x": np.zeros(64)}))

    def halve(gradient, samples):
        gradient /= 2
        return True

    step.prepare = halve
    step.state.quantized = Quantized((slice(0, 64),), np.array([8.0]))
    step(np.ones(64), 1)
    np.testing.assert_allclose(step.state.correction["squares"], 0.001 * 16)


@pytest.mark.parametrize(
    ("correction", "said"),
    [
        ({"squares": np.zeros(2), "slopes": np.zeros(2), "shifts": np.zeros(2)}, r"\[2\]"),
        ({"squares": np.zeros(1), "slopes": np.zeros(1)}, "shifts"),
        (dict.fromkeys(("squares", "slopes", "shifts"), np.zeros(1, np.float32)), "float32"),
        (dict.fromkeys(("squares", "slopes", "shifts"), np.array([np.nan])), "not finite"),
        (dict.fromkeys(("squares", "slopes", "shifts"), np.array([-1.0])), "below 0"),
    ],
)
def test_corrections_that_no_run_has_left(correction, said):
    state = Adam(lr=1.0).init(Parameters({"x": np.zeros(64)}))
    saved = {"buffers": state.buffers, "steps": 1, "samples": 1}
    state.check({**saved, "correction": {}}, 1)
    with pytest.raises(UserError, match=said):
        state.check({**saved, "correction": correction}, 1)


def test_the_bound_step_tells_its_rate():
    step = SGD(lr=Steps({0: 0.5, 10: 0.25})).bind(Parameters({"x": np.zeros(2)}))
    assert step.lr == 0.5
    step(np.zeros(2), 10)
    assert step.lr == 0.25
    assert SGD(lr_per_sample=0.125).bind(Parameters({"x": np.zeros(2)})).lr == 0.125


def test_every_optimizer_has_a_name():
    assert set(OPTIMIZERS.values()) == {SGD, MomentumSGD, NesterovSGD, Adam, Adagrad}


@pytest.mark.parametrize("name", ["lr", "lr_per_sample"])
@pytest.mark.parametrize(
    ("value", "as_shown"),
    [
        (math.nan, "nan"),
        (np.float64("nan"), "nan"),
        (-1, "-1"),
        (1e40, "1e+40"),
        (10**400, None),
        ("0.1", "'0.1'"),
        (True, "True"),
        (np.True_, None),
        ([0.1], "[0.1]"),
        (np.array([0.1, 0.2]), "array([0.1, 0.2])"),
        ({0: 0.1}, "{0: 0.1}"),
        (lambda samples: 0.1, None),
        (Steps, None),
        (Decimal("NaN"), "Decimal('NaN')"),
        (1j, "1j"),
    ],
    ids=str,
)
def test_rates_that_are_not_possible(name, value, as_shown):
    with pytest.raises(UserError) as caught:
        SGD(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert as_shown is None or message.startswith(f"{name}={as_shown} must be a finite number")
    assert message.endswith(", or a Schedule")
    assert "\n" not in message and len(message) < 200


@pytest.mark.parametrize("value", [np.float64(0.5), np.float32(0.5), Fraction(1, 2), 0.5])
def test_options_are_plain_values(value):
    assert repr(SGD(lr=value)) == "SGD(lr=0.5, lr_per_sample=None)"
    assert repr(Adam(lr=1, beta1=value, epsilon=value)) == (
        "Adam(lr=1.0, lr_per_sample=None, beta1=0.5, beta2=0.999, epsilon=0.5, weight_decay=0.0)"
    )
    assert repr(MomentumSGD(lr=-0.0, momentum=value, unit_gain=np.True_)) == (
        "MomentumSGD(lr=0.0, lr_per_sample=None, momentum=0.5, momentum_time_constant=None, "
        "unit_gain=True)"
    )
    assert (
        len({SGD(lr=value), SGD(lr=0.5), SGD(lr=Steps({0: value})), SGD(lr=Steps({0: 0.5}))}) == 2
    )


@dataclass(frozen=True)
class Until(Schedule):
    """0.5, and something else after `samples`."""

    samples: int
    after: float

    def __call__(self, samples):
        return 0.5 if samples < self.samples else self.after


class Undescribed(Schedule):
    def __call__(self, samples):
        return 0.5


@dataclass(frozen=True)
class Wrapped(Schedule):
    function: object

    def __call__(self, samples):
        return self.function(samples)


@pytest.mark.parametrize("schedule", [Undescribed(), Wrapped(lambda samples: 0.5)])
def test_a_schedule_of_ones_own_tells_its_options(schedule):
    """Ranks compare it by its repr."""
    with pytest.raises(
        UserError, match=rf"^lr={type(schedule).__name__}\(...\) must be a dataclass"
    ):
        SGD(lr=schedule)


@pytest.mark.parametrize("name", ["lr", "lr_per_sample"])
@pytest.mark.parametrize("kind", OPTIMIZERS.values())
@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -0.1, 1e40, None, "0.1", np.float32("nan"), 1j]
)
def test_a_schedule_that_goes_wrong_is_noticed_before_the_step(kind, name, bad):
    parameters = Parameters({"x": np.ones(3)})
    step = kind(**{name: Until(samples=10, after=bad)}).bind(parameters)
    step(np.ones(3), 10)
    before = [parameters.flat.copy(), *(b.copy() for b in step.state.buffers.values())]
    message = rf"^{name}=.* must be a finite number, at least 0.* \(.* after 10 samples\)$"
    for call in (lambda: step(np.ones(3), 5), lambda: step.lr):
        with pytest.raises(UserError, match=message):
            call()
    after = [parameters.flat, *step.state.buffers.values()]
    assert all(map(np.array_equal, before, after))
    assert (step.state.steps, step.state.samples) == (1, 10)


@pytest.mark.parametrize("value", [np.float32(0.25), np.float64(1e-50), 0])
def test_a_schedule_of_ones_own_may_yield_any_real_number(value):
    """Also one that float32 does not have."""
    step = SGD(lr=Until(samples=0, after=value)).bind(Parameters({"x": np.ones(3)}))
    assert type(step.lr) is float and step.lr == value


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1, epsilon=1e-30), Adagrad(lr=0.1, epsilon=1e-30)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_parameter_without_a_gradient_stays(optimizer, dtype):
    """Nothing is divided by nothing, however small epsilon may be."""
    parameters = Parameters({"w": np.ones(100, dtype)})
    local_step, gradient = optimizer.bind(parameters), np.zeros(100, dtype)
    for _ in range(3):
        local_step(gradient, 1)
    assert (parameters.flat == 1).all()


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), Adagrad(lr=0.1, initial_accumulator=0.5)])
def test_a_state_that_is_reset_is_the_first_one_at_a_later_time(optimizer):
    parameters = Parameters({"w": np.ones(9, np.float32)})
    local_step, first = optimizer.bind(parameters), optimizer.init(parameters)
    local_step(np.ones(9, np.float32), 3)
    vectors = list(local_step.state.buffers.values())
    optimizer.reset(local_step.state)
    assert (local_step.state.steps, local_step.state.samples) == (0, 3)
    for vector, again, before in zip(
        vectors, local_step.state.buffers.values(), first.buffers.values(), strict=True
    ):
        assert vector is again and np.array_equal(again, before)


@pytest.mark.parametrize("scale", [1.0, 2.0**-120])
def test_a_correction_is_the_ratio_of_squares(scale):
    """However small these are; at most a million."""
    correction: dict = {}
    projections = np.float32(scale**0.5) * np.array([2**13, 2**20], np.float32)
    learn(correction, projections, np.full(2, scale, np.float32), 128, 1, 0.999)
    np.testing.assert_allclose(correction["slopes"], [0.001 * 2**26, 1e6], rtol=1e-5)


def test_a_correction_stays_finite_where_squares_do_not():
    correction: dict = {}
    sums = np.array([np.inf, 0.0, 1e-45, 3e38], np.float32)
    projections = np.array([np.nan, 1e30, 1e-30, 0.0], np.float32)
    for step in (1, 40, 64):
        learn(correction, projections, sums, 256, step, 0.999)
        require_correction(correction, np.zeros(256, np.float32))
