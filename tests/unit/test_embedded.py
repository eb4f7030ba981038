"""The model on rows of a table: gradients against finite differences, what is pulled and pushed."""

from __future__ import annotations

import numpy as np
import pytest
from memory_rows import MemoryRows

from parallel_sgd.errors import UserError
from parallel_sgd.models import MLP, EmbeddedMLP

FIELDS, WIDTH, CLASSES = 3, 2, 4
LARGE = 10**11


@pytest.fixture(params=["concatenate", "sum"])
def combine(request):
    return request.param


@pytest.fixture(params=[(), (5,), (4, 3)], ids=["affine", "one hidden", "two hidden"])
def make(request, combine):
    def made(rows=None, **options):
        model = EmbeddedMLP(FIELDS, WIDTH, request.param, CLASSES, combine=combine, **options)
        model.rows = rows or MemoryRows(WIDTH)
        return model

    return made


def samples(count, seed=0):
    """Few different ids, so that each occurs several times, also within one sample."""
    random = np.random.default_rng(seed)
    ids = np.array([0, 7, 2**62 + 3, LARGE, 2**63 - 1])
    return random.choice(ids, (count, FIELDS)), random.integers(CLASSES, size=count)


def gradient(model, x, y, **options):
    """Summed gradient, on top of values that must all be overwritten, and summed loss."""
    out = model.parameters.like()
    out.flat[...] = np.nan
    return out, model.gradient(x, y, out, **options)


def test_gradient_is_the_slope_of_the_summed_loss(make):
    rows = MemoryRows(WIDTH, dtype=np.float64)  # else differences would drown in rounding
    model = make(rows, seed=1, dtype="float64")
    x, y = samples(5)
    flat = model.parameters.flat
    flat += 0.1 * np.random.default_rng(2).standard_normal(flat.size)  # biases too
    rows.stored = {i: rows.row(i) for i in np.unique(x).tolist()}
    pushed = {}
    rows.push = lambda ids, change, samples: pushed.update(rows.summed(ids, change))
    found = gradient(model, x, y)[0].flat
    of_rows, expected = dict(pushed), {}

    def slope(values, i):
        value = values[i]
        values[i] = value + 1e-6
        above = gradient(model, x, y)[1]
        values[i] = value - 1e-6
        below = gradient(model, x, y)[1]
        values[i] = value
        return (above - below) / 2e-6

    slopes = [slope(flat, i) for i in range(flat.size)]
    np.testing.assert_allclose(found, slopes, rtol=1e-6, atol=1e-7)
    expected = {i: [slope(row, j) for j in range(WIDTH)] for i, row in rows.stored.items()}
    assert of_rows.keys() == expected.keys()
    for i, row in expected.items():
        np.testing.assert_allclose(of_rows[i], row, rtol=1e-5, atol=1e-6)  # travels as float32
        assert np.abs(row).max() > 1e-3


def test_logits_are_those_of_an_mlp_on_the_rows(make, combine):
    model = make(seed=3, dtype="float64")
    mlp = MLP(model.sizes, dtype="float64")
    mlp.parameters.flat = model.parameters.flat
    x, y = samples(7)
    rows = model.rows.rows(x).astype(float)
    inputs = rows.sum(axis=1) if combine == "sum" else rows.reshape(7, -1)
    expected, loss = gradient(mlp, inputs, y)
    assert model.evaluate(x, y) == pytest.approx(mlp.evaluate(inputs, y))
    found, found_loss = gradient(model, x, y)
    assert found_loss == pytest.approx(loss)
    np.testing.assert_allclose(found.flat, expected.flat, atol=1e-12)


def test_gradient_pushes_once_and_evaluate_does_not(make):
    model = make()
    x, y = samples(6)
    model.evaluate(x, y, batch=4)
    assert model.rows.pushes == [] and model.rows.stored == {}
    assert [len(ids) for ids in model.rows.asked] == [4, 2]
    gradient(model, x, y)
    assert model.rows.pushes == [6] and sorted(model.rows.stored) == np.unique(x).tolist()


def test_the_next_rows_are_asked_for_between_this_pull_and_this_push(make):
    model, order = make(), []
    for name in ("rows", "prefetch", "push"):
        method = getattr(model.rows, name)

        def noted(ids, *rest, name=name, method=method):
            order.append((name, ids.tolist()))
            return method(ids, *rest)

        setattr(model.rows, name, noted)
    (x, y), (coming, _) = samples(4), samples(3, seed=1)
    gradient(model, x, y, coming=coming)
    assert order == [
        (name, ids.tolist()) for name, ids in [("rows", x), ("prefetch", coming), ("push", x)]
    ]
    gradient(model, coming, y[:3])
    gradient(model, x, y, coming=coming[:0])
    assert len(model.rows.prefetched) == 1


@pytest.mark.parametrize("shape", [(0, FIELDS), (0,)])
def test_an_empty_minibatch_gives_zeros_and_only_prefetches(make, shape):
    model = make()
    coming, _ = samples(2)
    found, loss = gradient(model, np.empty(shape, np.int64), np.empty(0, np.int64), coming=coming)
    assert loss == 0.0 and not found.flat.any()
    assert model.rows.asked == model.rows.pushes == []
    assert [ids.tolist() for ids in model.rows.prefetched] == [coming.tolist()]


def test_shapes_and_initial_values(combine):
    model = EmbeddedMLP(3, 8, [16], 2, combine=combine)
    inputs = 24 if combine == "concatenate" else 8
    assert model.parameters.shapes["W1"] == (inputs, 16) and model.inputs == 3
    assert (
        EmbeddedMLP(3, 8, [16], 2, combine=combine).parameters.flat == model.parameters.flat
    ).all()
    assert repr(model) == (
        f"EmbeddedMLP(fields=3, width=8, hidden=[16], classes=2, combine='{combine}', float32)"
    )


def test_it_learns_what_the_rows_must_hold(combine):
    """Labels that are a function of the ids, which mean nothing by themselves."""
    random = np.random.default_rng(0)
    ids = random.integers(0, 2**63 - 1, 40)
    picked = random.integers(40, size=(4000, 2))
    x, y = ids[picked], ((picked % 2).sum(axis=1) > 0).astype(int)
    model = EmbeddedMLP(2, 4, [16], 2, combine=combine)
    model.rows = MemoryRows(4, lr=1.0, deviation=0.05)
    out = model.parameters.like()
    for begin in range(0, len(x), 20):
        part = slice(begin, begin + 20)
        model.gradient(x[part], y[part], out)
        model.parameters.flat -= np.float32(0.3 / 20) * out.flat
    loss, accuracy = model.evaluate(x, y)
    assert loss < 0.1 and accuracy > 0.97


def test_ids_that_are_not_possible_are_refused():
    model = EmbeddedMLP(FIELDS, WIDTH, [4], CLASSES)
    model.rows = MemoryRows(WIDTH)
    x, y = samples(6)
    out = model.parameters.like()
    negative = x.copy()
    negative[4, 1] = -5
    for message, bad in [
        (r" must hold ids of int64: it has dtype float32 \(a source .*=None\)", x.astype("f4")),
        (" must hold ids of int64: it has dtype uint64", x.astype("u8")),
        (r"\[4\]\[1\] = -5 must be an id, at least 0", negative),
        (r" must have shape \[m, 3\]: it has \[m, 2\]$", x[:, :2]),
        (r" must have shape \[m, 3\]: it has \[m\]$", x[:, 0]),
        (r" must be an array of numbers: it is \[\]$", x[0, 0]),
    ]:
        with pytest.raises(UserError, match="^x" + message):
            model.gradient(bad, y, out)
        with pytest.raises(UserError, match="^coming" + message):
            model.gradient(x, y, out, coming=bad)
        with pytest.raises(UserError, match="^x" + message):
            model.evaluate(bad, y)
    with pytest.raises(UserError, match=r"^x\[4\]\[1\] = -5"):
        model.evaluate(negative, y, batch=3)
    with pytest.raises(UserError, match=r"^x and y must have one length: 6 and 5"):
        model.gradient(x, y[:5], out)
    assert model.rows.pushes == model.rows.prefetched == []


def test_rows_that_are_missing_or_do_not_fit_are_refused():
    model = EmbeddedMLP(FIELDS, WIDTH, [4], CLASSES)
    x, y = samples(6)
    with pytest.raises(UserError, match=r"^the model has no rows yet: model\.rows = "):
        model.evaluate(x, y)
    with pytest.raises(UserError, match=r"^the table's rows have width=3"):
        model.rows = MemoryRows(3)


def test_bad_arguments_are_refused():
    for message, options in [
        ("fields=0 must be a whole number, at least 1", {"fields": 0}),
        ("width=1.5 must be a whole number, at least 1", {"width": 1.5}),
        (r"hidden\[1\]=0 must be a whole number, at least 1", {"hidden": [3, 0]}),
        ("hidden=5 must be a sequence of whole numbers", {"hidden": 5}),
        ("classes=0 must be a whole number, at least 1", {"classes": 0}),
        ("combine='mean' must be 'concatenate' or 'sum'", {"combine": "mean"}),
        ("seed=-1 must be a whole number, at least 0", {"seed": -1}),
        ("dtype must be float32 or float64: 'int8'", {"dtype": "int8"}),
        ("device must be 'cpu' or 'cuda': 'tpu'", {"device": "tpu"}),
    ]:
        with pytest.raises(UserError, match="^" + message):
            EmbeddedMLP(**{"fields": 3, "width": 2, **options})


def test_cupy_gives_what_numpy_gives(make):
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError:
        pytest.skip("no GPU")
    x, y = samples(9)
    host, device = make(dtype="float64"), make(dtype="float64", device="cuda")
    for given in ((x, y), (cupy.asarray(x), cupy.asarray(y))):
        expected, loss = gradient(host, x, y)
        found, found_loss = gradient(device, *given)
        np.testing.assert_allclose(found.flat.get(), expected.flat, atol=1e-6)
        assert found_loss == pytest.approx(loss, rel=1e-6)
    for i, row in host.rows.stored.items():
        np.testing.assert_allclose(device.rows.stored[i], row, atol=1e-6)
