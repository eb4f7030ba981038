"""What holds for every model: sums over the minibatch, memory used again, both precisions."""

from __future__ import annotations

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


def test_loss_and_gradient_are_sums_over_the_minibatch(make, samples):
    model = make(dtype="float64")
    x, y = samples(9)
    whole, loss = gradient(model, x, y)
    parts = [gradient(model, x[part], y[part]) for part in (slice(0, 2), slice(2, 3), slice(3, 9))]
    np.testing.assert_allclose(sum(part[0] for part in parts), whole, atol=1e-12)
    assert sum(part[1] for part in parts) == pytest.approx(loss)
    twice, double = gradient(model, np.concatenate([x, x]), np.concatenate([y, y]))
    np.testing.assert_allclose(twice, 2 * whole, atol=1e-12)
    assert double == pytest.approx(2 * loss)


@pytest.mark.parametrize("shape", [(0, 3), (0,)])
def test_an_empty_minibatch_gives_zeros(make, samples, shape):
    x, _ = samples(1)
    found, loss = gradient(make(), np.empty(shape, x.dtype), np.empty(0, np.int64))
    assert loss == 0.0 and isinstance(loss, float) and not found.any()


def test_a_minibatch_of_another_size_reuses_memory_and_not_values(make, samples):
    model = make(dtype="float64")
    for count in (8, 3, 1, 12, 5):
        x, y = samples(count, seed=count)
        found, loss = gradient(model, x, y)
        fresh, fresh_loss = gradient(make(dtype="float64"), x, y)
        assert (found == fresh).all() and loss == fresh_loss


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


def test_cupy_gives_what_numpy_gives(make, samples):
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError:
        pytest.skip("no GPU")
    x, y = samples(9)
    host, device = make(dtype="float64"), make(dtype="float64", device="cuda")
    travels = 1e-6 if hasattr(host, "rows") else 1e-12  # rows do so as float32
    assert isinstance(device.parameters.flat, cupy.ndarray)
    assert (device.parameters.flat.get() == host.parameters.flat).all()
    for given in ((x, y), (cupy.asarray(x), cupy.asarray(y))):
        expected, loss = gradient(host, x, y)
        found, found_loss = gradient(device, *given)
        np.testing.assert_allclose(found.get(), expected, atol=travels)
        assert found_loss == pytest.approx(loss, rel=1e-6)
    assert device.evaluate(x, y) == pytest.approx(host.evaluate(x, y), rel=1e-6)
    with pytest.raises(UserError, match=r"y\[0\] = 256 is out of range"):
        device.evaluate(cupy.asarray(x), cupy.full(9, 256))
    if isinstance(host, ByteLanguageModel):
        with pytest.raises(UserError, match=r"x\[0\]\[0\] = 256.0 must be a byte"):
            device.evaluate(cupy.full((9, 3), 256.0), cupy.asarray(y))
