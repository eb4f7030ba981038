"""Losses: their gradients by finite differences, scores beside scikit-learn's, what is refused."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import numpy as np
import pytest
from test_models import gradient, gradient_and_slope

import parallel_sgd as psgd
from parallel_sgd.errors import UserError
from parallel_sgd.models import LOSSES, MLP, TASK_LOSSES, Loss

SIZES = ([3, 1], [3, 2], [3, 5, 1], [3, 4, 4, 3])


def samples(name, outputs, count, seed=0):
    """x, and y that differ in every column."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((count, 3))
    if name == "cross-entropy":
        return x, random.integers(outputs, size=count)
    if name == "squared":
        return x, random.standard_normal((count, outputs)) + np.arange(outputs)
    return x, (random.random((count, outputs)) < (1 + np.arange(outputs)) / (outputs + 1)) * 1


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_the_slope_of_the_summed_loss(name, sizes):
    model = MLP(sizes, loss=name, seed=1, dtype="float64")
    g, slope = gradient_and_slope(model, *samples(name, sizes[-1], 7))
    np.testing.assert_allclose(g, slope, rtol=1e-6, atol=1e-6)
    assert np.abs(g).max() > 0.1 or (name == "cross-entropy" and sizes[-1] == 1)


def outputs_of(model, x):
    return model._forward(np.asarray(x, model.parameters.dtype)).copy()


@pytest.mark.parametrize("outputs", [1, 3])
def test_squared_errors_and_their_score(outputs):
    from sklearn.metrics import r2_score

    model = MLP([3, outputs], loss="squared", dtype="float64")
    x, y = samples("squared", outputs, 23)
    y *= 1 + np.arange(outputs)  # a score that forgets a column's own spread differs
    said = outputs_of(model, x)
    loss, score = model.evaluate(x, y, batch=5)
    assert loss == pytest.approx(((said - y) ** 2).sum() / 23)
    assert score == pytest.approx(r2_score(y, said))
    if outputs == 1:
        assert model.evaluate(x, y[:, 0]) == pytest.approx((loss, score))


def test_r2_where_all_y_are_alike_is_1_or_0():
    model = MLP([3, 1], loss="squared")
    model.parameters.flat[...] = 0
    x = np.ones((9, 3))
    assert model.evaluate(x, np.zeros(9)) == (0.0, 1.0)
    assert model.evaluate(x, np.full(9, 0.1))[1] == 0.0  # though Σ y² - (Σ y)² / n may not vanish
    model.parameters["b1"][...] = 1e4
    far = 1e4 + np.arange(9.0)  # and where the mean is far larger than the spread, it still counts
    assert model.evaluate(x, far)[1] == pytest.approx(1 - (far - 1e4).__pow__(2).sum() / 60)


@pytest.mark.parametrize("outputs", [1, 4])
def test_logistic_loss_and_its_score(outputs):
    from sklearn.metrics import f1_score

    model = MLP([3, outputs], loss="logistic", dtype="float64")
    x, y = samples("logistic", outputs, 29)
    said = outputs_of(model, x)
    probability = 1 / (1 + np.exp(-said))
    loss, score = model.evaluate(x, y, batch=7)
    expected = -np.where(y == 1, np.log(probability), np.log(1 - probability)).sum() / 29
    assert loss == pytest.approx(expected)
    assert score == pytest.approx(f1_score(y.reshape(-1), (said > 0).reshape(-1)))
    assert model.evaluate(x, y.astype(bool)) == model.evaluate(x, y.astype(float))
    assert model.evaluate(x, y)[1] < 1
    model.parameters.flat[...] = 0
    assert model.evaluate(x, 0 * y)[1] == 0.0


@pytest.mark.parametrize("name", LOSSES)
def test_the_sums_of_parts_are_those_of_the_whole(name):
    model = MLP([3, 4, 3], loss=name, dtype="float64")
    x, y = samples(name, 3, 20)
    parts = [slice(0, 1), slice(1, 12), slice(12, 20)]
    sums = sum(model.evaluate_sums(x[part], y[part], batch=4) for part in parts)
    assert model.scores(sums, 20) == pytest.approx(model.evaluate(x, y))
    assert model.evaluate(x, y)[0] == pytest.approx(gradient(model, x, y)[1] / 20)


@pytest.mark.parametrize("name", LOSSES)
def test_large_outputs_do_not_overflow_and_infinite_ones_show(name):
    x, y = samples(name, 2, 6)
    model = MLP([3, 2], loss=name)
    model.parameters.flat *= 1e6
    g, loss = gradient(model, x, y)
    assert np.isfinite(g).all() and np.isfinite(loss) and loss > 1e4
    model.parameters.flat[...] = np.inf
    g, loss = gradient(model, x, y)
    assert not np.isfinite(loss) and not np.isfinite(g).all()


def test_what_a_loss_cannot_learn_from_is_refused():
    x, y = samples("squared", 2, 6)
    zeros, two = np.zeros((6, 2), int), np.zeros((6, 2), int)
    two[4, 1] = 2
    for name, outputs, given, message in [
        ("squared", 2, y[:, 0], r"y must have shape [m, 2], a number for each output: it has [m]"),
        ("squared", 2, y[:, :1], r"y must have shape [m, 2], a number for each output: it has [m"),
        ("squared", 1, y, r"y must have shape [m] or [m, 1], a number for each output: it has [m,"),
        ("squared", 1, y[0, 0], r"y must have shape [m] or [m, 1], a number for each output: it "),
        ("squared", 2, y[:5], "x and y must have equal lengths: 6 and 5"),
        ("squared", 2, y.astype(object), "y must be an array of numbers"),
        ("logistic", 2, two, "y[4][1] = 2 must be 0 or 1"),
        ("logistic", 2, zeros - 0.5, "y[0][0] = -0.5 must be 0 or 1"),
        ("logistic", 2, zeros + np.nan, "y[0][0] = nan must be 0 or 1"),
        ("logistic", 2, zeros[:, 0], "y must have shape [m, 2], 0 or 1 for each output: it has [m"),
    ]:
        model = MLP([3, outputs], loss=name)
        for asked in (lambda m, y: gradient(m, x, y), lambda m, y: m.evaluate(x, y)):
            with pytest.raises(UserError, match=f"^{re.escape(message)}"):
                asked(model, given)
    names = "must be one of 'cross-entropy', 'squared', 'logistic', or a Loss"
    for loss, shown in [("l2", "'l2'"), (3, "an int"), (type(LOSSES["squared"]), "the class")]:
        with pytest.raises(UserError, match=f"^loss={shown}.* {names}$"):
            MLP([3, 1], loss=loss)


def test_an_own_loss_is_taken():
    class Absolute(Loss):
        metric = "mean absolute error"

        def checked(self, y, outputs, first=0):
            return y.reshape(-1, outputs)

        def loss_and_delta(self, outputs, y):
            outputs -= y
            return float(np.abs(outputs).sum()), np.sign(outputs)

        def sums(self, outputs, y):
            return np.array([np.abs(outputs - y).sum()])

        def score(self, sums, samples):
            return sums[0] / samples

    model = MLP([3, 1], loss=Absolute(), dtype="float64")
    x, y = samples("squared", 1, 9)
    assert model.evaluate(x, y) == pytest.approx((np.abs(outputs_of(model, x) - y).mean(),) * 2)
    assert model.classes is None and repr(model) == "MLP([3, 1], Absolute(), float64)"


def trained(model, x, y, epochs=40, lr=0.02):
    comm = psgd.Communicator.single()
    learner = psgd.Learner(model.parameters, psgd.SGD(lr=lr), psgd.DataParallelSGD(), comm)
    for x_i, y_i in psgd.data.Source(x, y, 16, epochs=epochs).minibatches(learner):
        model.gradient(x_i, y_i, out=learner.gradient, ready=learner.ready)
        learner.step(samples=len(x_i))
    learner.finish()
    return model


def test_numbers_and_several_labels_are_learned():
    random = np.random.default_rng(0)
    x = random.standard_normal((400, 4)).astype(np.float32)
    truth = x @ random.standard_normal((4, 3)) + [1, -2, 0]
    linear = trained(MLP([4, 3], loss=TASK_LOSSES["regression"]), x, truth)
    assert linear.evaluate(x, truth)[1] > 0.9999
    bent = trained(MLP([4, 32, 1], loss="squared"), x, np.abs(x[:, 0]), lr=0.1)
    assert bent.evaluate(x, np.abs(x[:, 0]))[1] > 0.9
    labels = truth > 0
    tagged = trained(MLP([4, 3], loss=TASK_LOSSES["multi-label"]), x, labels, lr=1.0)
    assert tagged.evaluate(x, labels)[1] > 0.95
    assert TASK_LOSSES.keys() == set(psgd.data.TASKS)


class Device(np.ndarray):
    """An array that, as CuPy's, becomes none of NumPy's unless it is asked to."""

    def get(self):
        return np.array(self.view(np.ndarray))

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        mixed = [a for a in (*inputs, *out) if type(a) is np.ndarray and a.ndim]
        assert not mixed, f"{ufunc} mixes CuPy's arrays with NumPy's"
        plain = [a.view(np.ndarray) if isinstance(a, Device) else a for a in inputs]
        if out:
            options["out"] = tuple(a.view(np.ndarray) for a in out)
        result = getattr(ufunc, method)(*plain, **options)
        return out[0] if out else np.asarray(result).view(Device)


@pytest.fixture
def cupy(monkeypatch):
    module = ModuleType("cupy")
    module.ndarray = Device
    for name in ("exp", "log", "log1p", "abs", "maximum", "greater", "matmul", "sum", "where"):
        setattr(module, name, getattr(np, name))
    for name in ("arange", "empty", "asarray"):
        made = getattr(np, name)
        setattr(module, name, lambda *a, made=made, **k: made(*a, **k).view(Device))
    module.where = lambda c, a, b: np.where(c.get(), a, b.get()).view(Device)
    module.cuda = ModuleType("cuda")
    module.cuda.runtime = ModuleType("runtime")
    module.cuda.runtime.getDevice = lambda: 0
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize("name", LOSSES)
def test_arrays_on_a_device_stay_there(cupy, name):
    host, device = (MLP([3, 4, 2], loss=name, device=where) for where in ("cpu", "cuda"))
    assert isinstance(device.parameters.flat, Device) and not isinstance(
        host.parameters.flat, Device
    )
    x, y = samples(name, 2, 9)
    expected, loss = gradient(host, x, y)
    for given in ((x, y), (cupy.asarray(x), cupy.asarray(y))):
        g, device_loss = gradient(device, *given)
        assert isinstance(g, Device) and (g.get() == expected).all() and device_loss == loss
        assert device.evaluate(*given) == host.evaluate(x, y)
