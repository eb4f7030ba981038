"""The models: gradients against finite differences, sums, and what is refused."""

from __future__ import annotations

import sys
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest

from parallel_sgd.data import Source, digits
from parallel_sgd.errors import UserError
from parallel_sgd.models import MLP, SoftmaxRegression

MODELS = {
    "softmax": lambda **options: SoftmaxRegression(5, 4, **options),
    "one hidden": lambda **options: MLP([5, 7, 4], **options),
    "two hidden": lambda **options: MLP([5, 6, 3, 4], **options),
}


@pytest.fixture(params=MODELS)
def make(request):
    return MODELS[request.param]


def samples(count, inputs=5, classes=4, seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal((count, inputs)), random.integers(classes, size=count)


def gradient(model, x, y):
    """Summed gradient, on top of values that must all be overwritten, and summed loss."""
    out = model.parameters.like()
    out.flat[...] = np.nan
    return out.flat, model.gradient(x, y, out)


def test_gradient_is_the_slope_of_the_summed_loss(make):
    model = make(seed=1, dtype="float64")
    x, y = samples(6)
    found, _ = gradient(model, x, y)
    flat = model.parameters.flat
    flat += 0.1 * np.random.default_rng(2).standard_normal(flat.size)  # biases too
    found, _ = gradient(model, x, y)
    expected = np.empty_like(flat)
    for i, value in enumerate(flat.copy()):
        flat[i] = value + 1e-6
        above = gradient(model, x, y)[1]
        flat[i] = value - 1e-6
        expected[i] = (above - gradient(model, x, y)[1]) / 2e-6
        flat[i] = value
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert np.abs(found).max() > 0.1


def test_loss_is_cross_entropy_in_nats():
    model = SoftmaxRegression(2, 3, dtype="float64")
    model.parameters["W1"][...] = [[1, 0, 2], [0, 0, 0]]
    model.parameters["b1"][...] = [0, 3, 0]
    x, y = np.array([[1.0, 5.0]]), np.array([2])
    assert gradient(model, x, y)[1] == pytest.approx(np.log(np.exp([1, 3, 2]).sum()) - 2)


def test_large_logits_do_not_overflow(make):
    model = make()
    x, y = samples(6)
    found, loss = gradient(model, 1e6 * x, y)
    assert np.isfinite(found).all() and np.isfinite(loss) and loss > 1e4


def test_a_model_that_has_diverged_says_so_by_its_loss(make):
    model = make()
    model.parameters.flat[...] = np.inf
    found, loss = gradient(model, *samples(6))
    assert not np.isfinite(loss) and not np.isfinite(found).all()


def test_initial_values():
    wide = MLP([400, 300, 10]).parameters
    assert wide["W1"].std() == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    assert wide["W2"].std() == pytest.approx((1 / 300) ** 0.5, rel=0.05)


def test_evaluate_is_the_mean_over_all_samples(make):
    model = make(dtype="float64")
    x, y = samples(23)
    loss, accuracy = model.evaluate(x, y)
    assert loss == pytest.approx(gradient(model, x, y)[1] / 23)
    single = [model.evaluate(x[i : i + 1], y[i : i + 1])[1] for i in range(23)]
    assert accuracy == pytest.approx(np.mean(single)) and set(single) == {0.0, 1.0}
    for batch in (1, 5, 23):
        assert model.evaluate(x, y, batch=batch) == pytest.approx((loss, accuracy))


def test_a_step_allocates_little():
    model = MLP([784, 512, 10])
    x, y = samples(64, 784, 10)
    x = x.astype(np.float32)
    out = model.parameters.like()
    model.gradient(x, y, out)
    tracemalloc.start()
    try:
        model.gradient(x, y, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < out.flat.nbytes / 20


def test_bad_minibatches_are_refused():
    model = MLP([5, 7, 4])
    x, y = samples(6)
    out = model.parameters.like()
    high, low = y.copy(), y.copy()
    high[4], low[2] = 4, -1
    for message, arguments in [
        (r"y\[4\] = 4 is out of range: labels must be from 0 to 3", (x, high, out)),
        (r"y\[2\] = -1 is out of range: labels must be from 0 to 3", (x, low, out)),
        (r"x must have shape \[m, 5\]: it has \[m, 4\]$", (x[:, :4], y, out)),
        (r"x must have shape \[m, 5\]: it has \[m, 5, 1\]$", (x[:, :, None], y, out)),
        (r"x must have shape \[m, 5\]: it has \[m\]$", (x[:, 0], y, out)),
        (r"y must have shape \[m\], a label for each x: it has \[m, 1\]$", (x, y[:, None], out)),
        (r"y must have shape \[m\], a label for each x: it has \[\]$", (x, y[0], out)),
        (r"x and y must have one length: 6 and 5", (x, y[:5], out)),
        ("y must hold integer labels: it has dtype float64", (x, y + 0.5, out)),
        (r"x must be an array of numbers: it is \[\]", (3, y, out)),
        ("x must be an array of numbers: it is a list", ([[1], [1, 2]], y[:2], out)),
        ("x must be an array of numbers: it is an array of <U1", (x.astype("U1"), y, out)),
        ("y must be an array of numbers: it is an array of object", (x, y.astype(object), out)),
        ("out must be Parameters like the model's: it is a numpy.ndarray", (x, y, out.flat)),
        ("out must have the model's 74 values: 64", (x, y, MLP([5, 6, 4]).parameters.like())),
    ]:
        with pytest.raises(UserError, match=message):
            model.gradient(*arguments)
    for message, arguments in [
        (r"y\[4\] = 4 is out of range: labels must be from 0 to 3", (x, high, 2)),
        ("evaluate needs at least one sample", (x[:0], y[:0])),
        ("x and y must have one length: 6 and 5", (x, y[:5])),
        ("batch=0 must be a whole number, at least 1", (x, y, 0)),
        ("batch='all' must be a whole number", (x, y, "all")),
        (r"y must have shape \[m\], a label for each x: it has \[\]$", (x, 3)),
    ]:
        with pytest.raises(UserError, match=message):
            model.evaluate(*arguments)


def test_bad_arguments_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for message, sizes, options in [
        (r"sizes must be at least two integers of at least 1: \[5\]", [5], {}),
        (r"sizes must be at least two integers of at least 1: \[5, 0\]", [5, 0], {}),
        (r"sizes must be at least two integers of at least 1: 5", 5, {}),
        ("seed=-1 must be a whole number, at least 0", [5, 4], {"seed": -1}),
        (r"sizes=\[5, 10000000000000, 4\]: the model needs .* bytes, but", [5, 10**13, 4], {}),
        (r"sizes=\[5, 9223372036854775808\]: the model needs .* bytes, but", [5, 2**63], {}),
        ("dtype must be float32 or float64: 'int8'", [5, 4], {"dtype": "int8"}),
        ("dtype must be float32 or float64: 'no'", [5, 4], {"dtype": "no"}),
        ("device must be 'cpu' or 'cuda': 'tpu'", [5, 4], {"device": "tpu"}),
        ("device 'cuda' needs CuPy, which cannot be imported", [5, 4], {"device": "cuda"}),
    ]:
        with pytest.raises(UserError, match=message):
            MLP(sizes, **options)


class Serial:
    """A learner of one rank: plain SGD."""

    class comm:
        rank, size = 0, 1
        require_agreement = raise_together = staticmethod(lambda what: None)
        allgather_object = staticmethod(lambda item: [item])

    distributed, samples = True, 0

    def announce(self, samples, total):
        pass

    def feed(self):
        return nullcontext(self)


def test_an_mlp_learns_the_digits():
    pytest.importorskip("sklearn")
    train, test = digits(seed=0)
    model = MLP([64, 128, 10], seed=0)
    out = model.parameters.like()
    before = model.evaluate(test.x, test.y)
    for x, y in Source(train, minibatch_size=32, epochs=20).minibatches(Serial()):
        model.gradient(x, y, out)
        model.parameters.flat -= np.float32(0.3 / len(x)) * out.flat
    loss, accuracy = model.evaluate(test.x, test.y)
    assert before[0] > 2 and loss < 0.15 and accuracy > 0.97
