"""The model on rows of a table: what is pulled and pushed; see `test_models` too."""

from __future__ import annotations

import numpy as np
import pytest
from memory_rows import MemoryRows

from parallel_sgd.errors import UserError
from parallel_sgd.models import MLP, EmbeddedMLP

FIELDS, WIDTH, CLASSES = 3, 2, 4


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
    ids = np.array([0, 7, -(2**63), 10**11, 2**63 - 1])
    return random.choice(ids, (count, FIELDS)), random.integers(CLASSES, size=count)


def gradient(model, x, y, **options):
    """Summed gradient, on top of values that must all be overwritten, and summed loss."""
    out = model.parameters.like()
    out.flat[...] = np.nan
    return out, model.gradient(x, y, out, **options)


def test_what_is_pushed_is_the_slope_of_the_summed_loss(make):
    rows = MemoryRows(WIDTH, dtype=np.float64)  # else differences would drown in rounding
    model = make(rows, seed=1, dtype="float64")
    x, y = samples(5)
    model.parameters.flat += 0.1  # biases too
    rows.stored = {i: rows.row(i) for i in np.unique(x).tolist()}
    pushed = {}
    rows.push = lambda ids, change, samples: pushed.update(rows.summed(ids, change))
    gradient(model, x, y)
    summed = dict(pushed)
    assert summed.keys() == rows.stored.keys()
    for i, row in rows.stored.items():
        for j, value in enumerate(row.copy()):
            row[j] = value + 1e-6
            above = gradient(model, x, y)[1]
            row[j] = value - 1e-6
            slope = (above - gradient(model, x, y)[1]) / 2e-6
            row[j] = value
            assert summed[i][j] == pytest.approx(slope, rel=1e-5, abs=1e-6)  # travels as float32
        assert np.abs(summed[i]).max() > 1e-3


def test_logits_are_those_of_an_mlp_on_the_rows(make, combine):
    model = make(seed=3, dtype="float64")
    mlp = MLP(model.sizes, dtype="float64")
    mlp.parameters.flat = model.parameters.flat
    x, y = samples(7)
    rows = model.rows.rows(x).astype(float)
    inputs = rows.sum(axis=1) if combine == "sum" else rows.reshape(7, -1)
    expected, loss = gradient(mlp, inputs, y)
    assert model.evaluate(x, y) == pytest.approx(mlp.evaluate(inputs, y))
    g, model_loss = gradient(model, x, y)
    assert model_loss == pytest.approx(loss)
    np.testing.assert_allclose(g.flat, expected.flat, atol=1e-12)


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
    g, loss = gradient(model, np.empty(shape, np.int64), np.empty(0, np.int64), coming=coming)
    assert loss == 0.0 and not g.flat.any()
    assert model.rows.asked == model.rows.pushes == []
    assert [ids.tolist() for ids in model.rows.prefetched] == [coming.tolist()]


def test_shapes(combine):
    model = EmbeddedMLP(3, 8, [16], 2, combine=combine)
    inputs = 24 if combine == "concatenate" else 8
    assert model.parameters.shapes["W1"] == (inputs, 16) and model.inputs == 3
    assert repr(model) == (
        f"EmbeddedMLP(fields=3, width=8, hidden=[16], classes=2, combine='{combine}', float32)"
    )


def test_ids_that_are_not_possible_are_refused():
    model = EmbeddedMLP(FIELDS, WIDTH, [4], CLASSES)
    model.rows = MemoryRows(WIDTH)
    x, y = samples(6)
    out = model.parameters.like()
    for message, bad in [
        (
            r" must hold ids of int64: it has dtype float32 \(with dtype=None a source .*\)",
            x.astype("f4"),
        ),
        (" must hold ids of int64: it has dtype uint64", x.astype("u8")),
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
    assert model.rows.pushes == model.rows.prefetched == []


def test_rows_that_are_missing_or_do_not_fit_are_refused():
    model = EmbeddedMLP(FIELDS, WIDTH, [4], CLASSES)
    x, y = samples(6)
    with pytest.raises(UserError, match=r"^the model has no rows yet: set model\.rows = "):
        model.evaluate(x, y)
    with pytest.raises(UserError, match=r"^the table's rows have width=3"):
        model.rows = MemoryRows(3)
