"""Algorithms from outside, written from the documentation alone."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from parallel_sgd import SGD, Communicator, Learner, Parameters
from parallel_sgd.testing import CHECKS, check_algorithm

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

easgd, gossip, majority_vote, on_digits, top_k = map(
    importlib.import_module, ("easgd", "gossip", "majority_vote", "on_digits", "top_k")
)
ALGORITHMS = {
    "easgd": (easgd.EASGD(), easgd.PROMISES, 0.3),
    "gossip": (gossip.Gossip(), gossip.PROMISES, 0.3),
    "majority vote": (majority_vote.MajorityVote(), majority_vote.PROMISES, 0.003),
    "top k": (top_k.TopK(fraction=0.05), top_k.PROMISES, 0.3),
}


@pytest.mark.few_ranks
@pytest.mark.threads(3)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_conforms(on_ranks, name):
    algorithm, promises, _ = ALGORITHMS[name]
    for outcomes in on_ranks(
        lambda comm: check_algorithm(
            **{"algorithm": algorithm, **promises, "comm": comm, "schedules": 20}
        )
    ):
        assert list(outcomes) == list(CHECKS)


@pytest.mark.few_ranks
@pytest.mark.threads(1, 3)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_learns_the_digits(on_ranks, name):
    pytest.importorskip("sklearn")
    algorithm, _, lr = ALGORITHMS[name]
    accuracies = on_ranks(lambda comm: on_digits.train(algorithm, SGD(lr=lr), comm, epochs=10))
    assert len(set(accuracies)) == 1
    assert accuracies[0] > 0.9


@pytest.mark.parametrize("alpha", [None, 0.3])
def test_elastic_averaging_is_its_equations(comm, alpha):
    """In one place, for all ranks, in the paper's form: gradients at the old x_k."""
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


def test_most_ranks_decide_and_not_the_largest_gradient(comm):
    parameters = Parameters({"x": np.zeros(2)})
    votes = np.full((comm.size, 2), [-1.0, 2.0])
    votes[0, 0] = 5.0 * comm.size  # outvoted by two
    with Learner(parameters, SGD(lr=1.0), majority_vote.MajorityVote(), comm) as learner:
        learner.gradient.flat[...] = votes[comm.rank]
        learner.step(samples=1)
        learner.finish()
    assert [*parameters.flat] == [np.sign(comm.size - 2), -1.0]


@pytest.mark.threads(3, 4)
def test_gossip_keeps_the_mean_and_soon_has_it_everywhere(comm):
    """Exactly after a step for each distance, if the number of ranks is a power of 2."""
    parameters = Parameters({"x": np.zeros(3)})
    with Learner(parameters, SGD(lr=1.0), gossip.Gossip(), comm) as learner:
        parameters.flat[...] = comm.rank
        for _ in range((comm.size - 1).bit_length()):
            learner.step(samples=1)
        models = comm.allgather_object(parameters.flat)
        mean = np.full(3, (comm.size - 1) / 2)
        np.testing.assert_allclose(np.mean(models, axis=0), mean)
        exact = comm.size & (comm.size - 1) == 0
        np.testing.assert_allclose(models, [mean] * comm.size, atol=0 if exact else 0.5)
        learner.finish()


@pytest.mark.parametrize("module", [easgd, gossip, majority_vote, top_k], ids=lambda m: m.__name__)
def test_the_programs_check_themselves(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", "--check"])
    monkeypatch.setattr(Communicator, "world", Communicator.single)
    runpy.run_path(module.__file__, run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) == len(CHECKS)


def test_the_documentation_shows_the_examples_as_they_are():
    text = (ROOT / "docs" / "new_algorithm.md").read_text()
    examples = "".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
    excerpts = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(excerpts) >= 4
    for excerpt in excerpts:
        for part in excerpt.split("...\n"):
            assert part in examples, part


def test_the_program_of_the_page_on_numpy(on_ranks, capsys):
    text = (ROOT / "docs" / "numpy.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (code,) = (block for block in blocks if "psgd.Communicator.world()" in block)

    def body(comm):
        names = {"world": comm}
        exec(code.replace("psgd.Communicator.world()", "world"), names)
        np.testing.assert_allclose(names["parameters"]["w"], np.arange(10), atol=0.01)

    on_ranks(body)
    assert capsys.readouterr().out in ("", "[0. 1. 2. 3. 4. 5. 6. 7. 8. 9.]\n")
