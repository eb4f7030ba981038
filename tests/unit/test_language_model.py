"""The model of text: look-up of embeddings, and what is no byte; see `test_models` too."""

from __future__ import annotations

import numpy as np
import pytest

from parallel_sgd.errors import UserError
from parallel_sgd.models import MLP, ByteLanguageModel
from parallel_sgd.models.language import add_rows, multiply_rows

CONTEXT, WIDTH = 3, 2


@pytest.fixture(params=[(), (5,), (4, 3)], ids=["affine", "one hidden", "two hidden"])
def make(request):
    return lambda **options: ByteLanguageModel(CONTEXT, WIDTH, request.param, **options)


def samples(count, seed=0, letters=6):
    """Few different bytes, so that each occurs several times, also within one window."""
    random = np.random.default_rng(seed)
    alphabet = np.concatenate([[0, 255], random.integers(1, 255, letters - 2)])
    return random.choice(alphabet, (count, CONTEXT)), random.choice(alphabet, count)


def gradient(model, x, y):
    """Summed gradient, on top of values that must all be overwritten, and summed loss."""
    out = model.parameters.like()
    out.flat[...] = np.nan
    return out, model.gradient(x, y, out)


def test_logits_are_those_of_an_mlp_on_the_embeddings_side_by_side(make):
    model = make(seed=3, dtype="float64")
    sizes = [CONTEXT * WIDTH, *model.sizes[1:-1], 256]
    mlp = MLP(sizes, dtype="float64")
    mlp.parameters.flat = model.parameters.flat[256 * WIDTH :]
    x, y = samples(7)
    embedded = np.array([np.concatenate([model.parameters["E"][b] for b in row]) for row in x])
    expected, loss = gradient(mlp, embedded, y)
    g, model_loss = gradient(model, x, y)
    assert model_loss == pytest.approx(loss)
    for name in mlp.parameters:
        np.testing.assert_allclose(g[name], expected[name], atol=1e-12)
    assert model.evaluate(x, y) == pytest.approx(mlp.evaluate(embedded, y))


def test_bytes_may_come_in_any_type(make):
    model = make()
    x, y = samples(9)
    expected, loss = gradient(model, x, y)
    for dtype in ("uint8", "int64", "uint64", "float16", "float32", "float64", ">f4"):
        given = x.astype(dtype)
        g, typed_loss = gradient(model, given, y.astype("uint8"))
        assert (g.flat == expected.flat).all() and typed_loss == loss
        assert (given == x).all()
    assert gradient(model, x.tolist(), y)[1] == loss


def test_initial_values():
    usual = ByteLanguageModel()
    assert usual.parameters.names == ("E", "W1", "b1", "W2", "b2")
    assert usual.parameters["E"].std() == pytest.approx(1, rel=0.05)
    assert usual.parameters["W1"].std() == pytest.approx((2 / 128) ** 0.5, rel=0.05)
    assert repr(usual) == "ByteLanguageModel(context=8, width=16, hidden=[128], float32)"


def test_rows_of_one_byte_are_summed_on_cpu_and_gpu_alike():
    random = np.random.default_rng(0)
    x = random.choice([0, 7, 255], 50)
    rows = random.standard_normal((50, 4))
    expected = np.zeros((256, 4))
    for byte, row in zip(x, rows, strict=True):
        expected[byte] += row
    places = x[:, None] * 4 + np.arange(4)
    for function, where in ((add_rows, places), (multiply_rows, x)):
        out = np.full((256, 4), np.nan)
        function(rows, where, out)
        np.testing.assert_allclose(out, expected, atol=1e-13)


def test_values_that_are_no_bytes_are_refused(make):
    model = make()
    good, y = samples(6)
    out = model.parameters.like()
    for value, shown in [
        (256, "256"),
        (-1, "-1"),
        (65.5, "65.5"),
        (np.nan, "nan"),
        (np.inf, "inf"),
        (1e30, "1e+30"),
        (2**40 + 65, "1099511627841"),
        (65.00000001, "65.00000001"),
    ]:
        x = good.astype(np.int64 if isinstance(value, int) else np.float64)
        x[4, 1] = value
        with pytest.raises(UserError) as caught:
            model.gradient(x, y, out)
        assert str(caught.value).startswith(f"x[4][1] = {shown}")
        assert str(caught.value).endswith(" must be a byte: a whole number from 0 to 255")
        with pytest.raises(UserError, match=r"^x\[4\]\[1\] = "):
            model.evaluate(x, y, batch=3)
