"""What holds for every model: gradients against finite differences, sums, and what is refused."""

from __future__ import annotations

import sys
import tracemalloc
from functools import partial

import numpy as np
import pytest
from memory_rows import MemoryRows

from parallel_sgd.errors import UserError
from parallel_sgd.models import MLP, ByteLanguageModel, EmbeddedMLP, SoftmaxRegression

HIDDEN: tuple[tuple[int, ...], ...] = ((), (5,), (4, 3))
LETTERS = np.array([0, 9, 65, 101, 200, 255])
IDS = np.array([0, 7, 2**62 + 3, 10**11, 2**63 - 1])


def embedded(hidden, combine):
    def made(**options):
        model = EmbeddedMLP(3, 2, hidden, 4, combine=combine, **options)
        model.rows = MemoryRows(2, lr=0)
        return model

    return made


#: With samples of few different values, so that each occurs several times, also within one sample.
MODELS = {
    "softmax": (partial(SoftmaxRegression, 3, 4), None),
    "one hidden": (partial(MLP, [3, 7, 4]), None),
    "two hidden": (partial(MLP, [3, 6, 3, 4]), None),
    **{
        f"bytes, {hidden}": (partial(ByteLanguageModel, 3, 2, hidden), LETTERS) for hidden in HIDDEN
    },
    **{
        f"rows, {hidden}, {combine}": (embedded(hidden, combine), IDS)
        for hidden in HIDDEN
        for combine in ("concatenate", "sum")
    },
}


@pytest.fixture(params=MODELS)
def make(request):
    return MODELS[request.param][0]


@pytest.fixture
def samples(request):
    values = MODELS[request.node.callspec.params["make"]][1]

    def drawn(count, seed=0):
        random = np.random.default_rng(seed)
        shape = count, 3
        x = random.standard_normal(shape) if values is None else random.choice(values, shape)
        return x, random.integers(4, size=count)

    return drawn


def gradient(model, x, y):
    """Summed gradient, on top of values that must all be overwritten, and summed loss."""
    out = model.parameters.like()
    out.flat[...] = np.nan
    return out.flat, model.gradient(x, y, out)


def gradient_and_slope(model, x, y):
    """The gradient somewhere near, and the slope of the summed loss there."""
    flat = model.parameters.flat
    flat += 0.1 * np.random.default_rng(2).standard_normal(flat.size)  # biases too
    g, _ = gradient(model, x, y)
    slope = np.empty_like(flat)
    for i, value in enumerate(flat.copy()):
        flat[i] = value + 1e-6
        above = gradient(model, x, y)[1]
        flat[i] = value - 1e-6
        slope[i] = (above - gradient(model, x, y)[1]) / 2e-6
        flat[i] = value
    return g, slope


def test_gradient_is_the_slope_of_the_summed_loss(make, samples):
    g, slope = gradient_and_slope(make(seed=1, dtype="float64"), *samples(6))
    np.testing.assert_allclose(g, slope, rtol=1e-6, atol=1e-7)
    assert np.abs(g).max() > 0.1


def test_loss_is_cross_entropy_in_nats():
    model = SoftmaxRegression(2, 3, dtype="float64")
    model.parameters["W1"][...] = [[1, 0, 2], [0, 0, 0]]
    model.parameters["b1"][...] = [0, 3, 0]
    x, y = np.array([[1.0, 5.0]]), np.array([2])
    assert gradient(model, x, y)[1] == pytest.approx(np.log(np.exp([1, 3, 2]).sum()) - 2)


def test_loss_and_gradient_are_sums_over_the_minibatch(make, samples):
    model = make(dtype="float64")
    x, y = samples(9)
    whole, loss = gradient(model, x, y)
    parts = [gradient(model, x[part], y[part]) for part in (slice(0, 2), slice(2, 3), slice(3, 9))]
    np.testing.assert_allclose(sum(part[0] for part in parts), whole, atol=1e-12)
    assert sum(part[1] for part in parts) == pytest.approx(loss)


def test_large_logits_do_not_overflow(make, samples):
    model = make()
    model.parameters.flat *= 1e6
    g, loss = gradient(model, *samples(6))
    assert np.isfinite(g).all() and np.isfinite(loss) and loss > 1e4


def test_a_model_that_has_diverged_says_so_by_its_loss(make, samples):
    model = make()
    model.parameters.flat[...] = np.inf
    g, loss = gradient(model, *samples(6))
    assert not np.isfinite(loss) and not np.isfinite(g).all()


@pytest.mark.parametrize("shape", [(0, 3), (0,)])
def test_an_empty_minibatch_gives_zeros(make, samples, shape):
    x, _ = samples(1)
    g, loss = gradient(make(), np.empty(shape, x.dtype), np.empty(0, np.int64))
    assert loss == 0.0 and isinstance(loss, float) and not g.any()


def test_a_minibatch_of_another_size_reuses_memory_and_not_values(make, samples):
    model = make(dtype="float64")
    for count in (8, 3, 1, 12, 5):
        x, y = samples(count, seed=count)
        g, loss = gradient(model, x, y)
        fresh, fresh_loss = gradient(make(dtype="float64"), x, y)
        assert (g == fresh).all() and loss == fresh_loss


@pytest.mark.parametrize(
    ("model", "inputs", "classes"),
    [(MLP([784, 512, 10]), 784, 10), (ByteLanguageModel(hidden=[1024]), 8, 256)],
)
def test_a_step_allocates_little(model, inputs, classes):
    random = np.random.default_rng(0)
    x = random.integers(classes, size=(64, inputs)).astype(np.float32)
    y, out = random.integers(classes, size=64), model.parameters.like()
    model.gradient(x, y, out)
    tracemalloc.start()
    try:
        model.gradient(x, y, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < out.flat.nbytes / 20


def test_float32_follows_float64(make, samples):
    x, y = samples(20)
    single, single_loss = gradient(make(), x, y)
    double, double_loss = gradient(make(dtype="float64"), x, y)
    assert single.dtype == np.float32 and double.dtype == np.float64
    np.testing.assert_allclose(single, double, rtol=1e-4, atol=1e-4)
    assert single_loss == pytest.approx(double_loss, rel=1e-5)


def test_initial_values_come_from_the_seed(make):
    first = make().parameters.flat
    assert (make(seed=0).parameters.flat == first).all()
    assert (make(seed=1).parameters.flat != first).any()
    assert (make(dtype="float64").parameters.flat.astype(np.float32) == first).all()


def test_initial_values_have_the_variance_of_their_layer():
    wide = MLP([400, 300, 10]).parameters
    assert wide["W1"].std() == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    assert wide["W2"].std() == pytest.approx((1 / 300) ** 0.5, rel=0.05)


def test_evaluate_is_the_mean_over_all_samples(make, samples):
    model = make(dtype="float64")
    model.parameters.flat[-model.classes :][:4] += 5  # so that some labels are guessed
    x, y = samples(23)
    loss, accuracy = model.evaluate(x, y)
    assert loss == pytest.approx(gradient(model, x, y)[1] / 23)
    single = [model.evaluate(x[i : i + 1], y[i : i + 1])[1] for i in range(23)]
    assert accuracy == pytest.approx(np.mean(single)) and set(single) == {0.0, 1.0}
    for batch in (1, 5, 23):
        assert model.evaluate(x, y, batch=batch) == pytest.approx((loss, accuracy))


def test_bad_minibatches_are_refused(make, samples):
    model = make()
    x, y = samples(6)
    out, other = model.parameters.like(), MLP([5, 6, 4]).parameters.like()
    high, low, last = y.copy(), y.copy(), model.classes - 1
    high[4], low[2] = last + 1, -1
    for message, arguments in [
        (rf"y\[4\] = {last + 1} is out of range: labels must be from 0 to {last}", (x, high, out)),
        (rf"y\[2\] = -1 is out of range: labels must be from 0 to {last}", (x, low, out)),
        (r"x must have shape \[m, 3\]: it has \[m, 2\]$", (x[:, :2], y, out)),
        (r"x must have shape \[m, 3\]: it has \[m, 3, 1\]$", (x[:, :, None], y, out)),
        (r"x must have shape \[m, 3\]: it has \[m\]$", (x[:, 0], y, out)),
        (r"y must have shape \[m\], a label for each x: it has \[m, 1\]$", (x, y[:, None], out)),
        (r"y must have shape \[m\], a label for each x: it has \[\]$", (x, y[0], out)),
        (r"x and y must have equal lengths: 6 and 5", (x, y[:5], out)),
        ("y must hold integer labels: it has dtype float64", (x, y + 0.5, out)),
        (r"x must be an array of numbers: it is \[\]", (3, y, out)),
        ("x must be an array of numbers: it is a list", ([[1], [1, 2]], y[:2], out)),
        ("x must be an array of numbers: it is an array of <U1", (x.astype("U1"), y, out)),
        ("y must be an array of numbers: it is an array of object", (x, y.astype(object), out)),
        ("out must be Parameters like the model's: it is a numpy.ndarray", (x, y, out.flat)),
        (f"out must have the model's {out.flat.size} values: 64", (x, y, other)),
    ]:
        with pytest.raises(UserError, match=f"^{message}"):
            model.gradient(*arguments)
    for message, arguments in [
        (rf"y\[4\] = {last + 1} is out of range: labels must be from 0 to {last}", (x, high, 2)),
        ("evaluate needs at least one sample", (x[:0], y[:0])),
        ("x and y must have equal lengths: 6 and 5", (x, y[:5])),
        ("batch=0 must be a whole number, at least 1", (x, y, 0)),
        ("batch='all' must be a whole number", (x, y, "all")),
        (r"y must have shape \[m\], a label for each x: it has \[\]$", (x, 3)),
    ]:
        with pytest.raises(UserError, match=f"^{message}"):
            model.evaluate(*arguments)


@pytest.mark.parametrize(
    ("message", "kind", "arguments"),
    [
        (r"sizes must be at least two integers of at least 1: \[5\]", MLP, [[5]]),
        (r"sizes must be at least two integers of at least 1: \[5, 0\]", MLP, [[5, 0]]),
        (r"sizes must be at least two integers of at least 1: 5", MLP, [5]),
        (r"sizes=\[5, 10{13}, 4\]: the model needs .* bytes, but", MLP, [[5, 10**13, 4]]),
        (r"sizes=\[5, 9223372036854775808\]: the model needs .* b", MLP, [[5, 2**63]]),
        ("fields=0 must be a whole number, at least 1", EmbeddedMLP, [0, 2]),
        ("width=1.5 must be a whole number, at least 1", EmbeddedMLP, [3, 1.5]),
        (r"hidden\[1\]=0 must be a whole number, at least 1", EmbeddedMLP, [3, 2, [3, 0]]),
        ("hidden=5 must be a sequence of whole numbers", EmbeddedMLP, [3, 2, 5]),
        ("classes=0 must be a whole number, at least 1", EmbeddedMLP, [3, 2, [4], 0]),
        ("combine='mean' must be", partial(EmbeddedMLP, combine="mean"), [3, 2]),
        ("context=0 must be a whole number, at least 1", ByteLanguageModel, [0]),
        ("width=1.5 must be a whole number, at least 1", ByteLanguageModel, [8, 1.5]),
        (r"hidden\[1\]=0 must be a whole number, at least 1", ByteLanguageModel, [8, 2, [3, 0]]),
        ("hidden=5 must be a sequence of whole numbers", ByteLanguageModel, [8, 2, 5]),
    ],
)
def test_bad_sizes_are_refused(message, kind, arguments):
    with pytest.raises(UserError, match=f"^{message}"):
        kind(*arguments)


def test_bad_options_are_refused(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for message, options in [
        ("seed=-1 must be a whole number, at least 0", {"seed": -1}),
        ("dtype must be float32 or float64: 'int8'", {"dtype": "int8"}),
        ("dtype must be float32 or float64: 'no'", {"dtype": "no"}),
        ("device='tpu' must be 'cpu' or 'cuda'", {"device": "tpu"}),
        ("device 'cuda' needs CuPy, which cannot be imported", {"device": "cuda"}),
    ]:
        with pytest.raises(UserError, match=f"^{message}"):
            make(**options)


def test_cupy_gives_what_numpy_gives(make, samples):
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError:
        pytest.skip("no GPU")
    x, y = samples(9)
    host, device = make(dtype="float64"), make(dtype="float64", device="cuda")
    travels = 1e-12
    if hasattr(host, "rows"):
        host.rows.lr = device.rows.lr = 0.1  # so that what is pushed shows in what is pulled
        travels = 1e-6  # as float32
    assert isinstance(device.parameters.flat, cupy.ndarray)
    assert (device.parameters.flat.get() == host.parameters.flat).all()
    for given in ((x, y), (cupy.asarray(x), cupy.asarray(y))):
        expected, loss = gradient(host, x, y)
        g, device_loss = gradient(device, *given)
        np.testing.assert_allclose(g.get(), expected, atol=travels)
        assert device_loss == pytest.approx(loss, rel=1e-6)
    assert device.evaluate(x, y) == pytest.approx(host.evaluate(x, y), rel=1e-6)
    with pytest.raises(UserError, match=r"y\[0\] = 256 is out of range"):
        device.evaluate(cupy.asarray(x), cupy.full(9, 256))
    if isinstance(host, ByteLanguageModel):
        with pytest.raises(UserError, match=r"x\[0\]\[0\] = 256.0 must be a byte"):
            device.evaluate(cupy.full((9, 3), 256.0), cupy.asarray(y))
