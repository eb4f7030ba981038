"""The example of an algorithm from outside: elastic averaging SGD, in one file."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from parallel_sgd import SGD, Learner, Parameters, UserError
from parallel_sgd.testing import CHECKS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "easgd.py"


@pytest.fixture(scope="module")
def easgd():
    spec = importlib.util.spec_from_file_location("easgd", EXAMPLE)
    module = sys.modules["easgd"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_conforms(on_ranks, easgd):
    for outcomes in on_ranks(easgd.conforms):
        assert list(outcomes) == list(CHECKS)


@pytest.mark.parametrize("alpha", [None, 0.3])
def test_it_is_its_equations(on_ranks, easgd, alpha):
    """In one place, for all ranks, in the paper's form: gradients at the old x_k."""

    def body(comm):
        lr, beta, period, ranks = 0.1, 0.8, 3, comm.size
        parameters = Parameters({"x": np.ones(5)})
        algorithm = easgd.EASGD(alpha=alpha, beta=beta, period=period)
        learner = Learner(parameters, SGD(lr=lr), algorithm, comm)
        goals = np.random.default_rng(3).standard_normal((10, ranks, 5))
        x, center = np.ones((ranks, 5)), np.ones(5)
        a = beta / ranks if alpha is None else alpha
        for t, goal in enumerate(goals):
            step = lr * (x - goal)
            if t and t % period == 0:
                apart = x - center
                center = center + beta * apart.mean(axis=0)
                x = x - a * apart
            x = x - step
            learner.gradient.flat[...] = parameters.flat - goal[comm.rank]
            learner.step(samples=1)
            np.testing.assert_allclose(parameters.flat, x[comm.rank], rtol=1e-12)
            np.testing.assert_allclose(learner.state.center, center, rtol=1e-12)
        learner.finish()
        np.testing.assert_allclose(parameters.flat, center + beta * (x - center).mean(axis=0))

    on_ranks(body)


def test_it_learns_the_digits(on_ranks, easgd):
    pytest.importorskip("sklearn")
    accuracies = on_ranks(lambda comm: easgd.train(comm, easgd.EASGD(), epochs=10))
    assert len(set(accuracies)) == 1
    assert accuracies[0] > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, "alpha=-0.1 must be a finite number, at least 0 and at most 1"),
        ({"alpha": 1.5}, "alpha=1.5 must be a finite number, at least 0 and at most 1"),
        ({"beta": 2}, "beta=2 must be a finite number, at least 0 and at most 1"),
        ({"period": 0}, "period=0 must be a whole number, at least 1"),
    ],
)
def test_options_that_are_not_possible(easgd, options, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        easgd.EASGD(**options)


def test_the_documentation_shows_the_example_as_it_is():
    text = (ROOT / "docs" / "new_algorithm.md").read_text()
    excerpts = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(excerpts) >= 4
    for excerpt in excerpts:
        for part in excerpt.split("...\n"):
            assert part in EXAMPLE.read_text(), part
