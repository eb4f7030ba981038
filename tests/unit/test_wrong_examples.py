"""The examples of algorithms as their authors might get them wrong: the suite must say so."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from parallel_sgd.testing import check_algorithm

EXAMPLES = Path(__file__).parents[2] / "examples"

KEEP = "        residual += gradient\n"
SUM = "        state.exchange.sum(votes)\n"
STEP = "work.optimizer(gradient, minibatch.total)"
SWAP = "        if size > 1:\n"
VOTE = "work.optimizer(votes, 1, minibatch.total)"
MUTANTS = {
    # example, what is written, what should not have been, the checks that say so
    "the residual is dropped": ("top_k", KEEP, "        residual[...] = gradient\n", "owed later"),
    "the residual has the wrong sign": (
        *("top_k", KEEP, "        np.subtract(gradient, residual, out=residual)\n"),
        "owed",
    ),
    "the residual leaks": ("top_k", KEEP, f"        residual *= 0.98\n{KEEP}", "owed"),
    "what was sent is kept": ("top_k", "        residual[places] = 0\n", "", "owed"),
    "the smallest are sent": ("top_k", "-kept)[-kept:]", "kept)[:kept]", "owed"),
    "half the residual is kept": (
        *("top_k", "residual[places] = 0", "residual[places] /= 2"),
        "serial",
    ),
    "the residual is no state": ("top_k", 'across("sum")', "workspace()", "owed resume"),
    "the residual is taken for the same": (
        *("top_k", 'across("sum")', 'across("same")'),
        "owed same_state",
    ),
    "the residual is taken for a mean": (
        *("top_k", 'across("sum")', 'across("mean")'),
        "owed later_resharded",
    ),
    "top-k, up the hill": ("top_k", STEP, "work.optimizer(-gradient, minibatch.total)", "learns"),
    "the mean counts ranks": (
        *("top_k", STEP, "work.optimizer(gradient / comm.size, 1, minibatch.total)"),
        "serial",
    ),
    "the clock counts this rank only": (
        *("top_k", STEP, "work.optimizer(gradient, minibatch.total, minibatch.samples)"),
        "agreement",
    ),
    "the first rank counts alone": (
        *("top_k", "every_place, every_value)", "every_place[:kept], every_value[:kept])"),
        "communication",
    ),
    "bytes are not counted": ("top_k", "state.bytes_sent += ", "_ = ", "bytes_sent"),
    "a field without a meaning": ("top_k", 'Any = across("sum")', "Any = None", "state"),
    "an option that train.py has": ("top_k", "fraction", "epochs", "options"),
    "an option that optimizers have": ("top_k", "fraction", "momentum", "options"),
    "ranks without samples vote": (
        *("majority_vote", SUM, f"        votes[votes == 0] = 1\n{SUM}"),
        "dry_ranks_count_nothing",
    ),
    "votes, up the hill": (
        *("majority_vote", VOTE, "work.optimizer(-votes, 1, minibatch.total)"),
        "learns",
    ),
    "a constant direction": (
        *("majority_vote", VOTE, f"votes.fill(1)\n        {VOTE}"),
        "learns",
    ),
    "noise": (
        *("majority_vote", VOTE),
        "votes[...] = np.random.default_rng(work.samples).standard_normal(votes.size)\n"
        f"        {VOTE}",
        "learns",
    ),
    "nobody counts the votes": ("majority_vote", SUM, "", "agreement"),
    "the clock stands still": ("majority_vote", VOTE, "work.optimizer(votes, 1, 0)", "agreement"),
    "the center does not move": (
        *("easgd", "        state.center += self.beta / ranks * apart\n", ""),
        "learns communication",
    ),
    "finish leaves every rank its own": (
        *("easgd", "        work.parameters.flat[...] = state.center\n", ""),
        "agreement",
    ),
    "steps are no state": (
        *("easgd", 'across("same", least=0, default=0)', "workspace(default=0)"),
        "resume",
    ),
    "neighbours do not communicate": ("gossip", SWAP, "        if size < 0:\n", "approach"),
    "always the same neighbour": (
        *("gossip", "receiver=(rank + apart) % size, sender=(rank - apart) % size"),
        *("receiver=rank ^ 1, sender=rank ^ 1", "approach"),
    ),
    "some models count more": (
        *("gossip", "            x /= 2\n", "            x *= (rank + 1) / (rank + 2)\n"),
        "approach",
    ),
    "models are added": ("gossip", "            x /= 2\n", "", "approach learns"),
    "nobody asks whether the others can": (
        *("easgd", '        work.comm.agree(problem_with(x, name="model"))\n', ""),
        "errors",
    ),
}


CLASSES = {
    "easgd": "EASGD",
    "gossip": "Gossip",
    "majority_vote": "MajorityVote",
    "top_k": "TopK",
}


def example(name: str, old: str, new: str) -> types.ModuleType:
    """An example, changed."""
    text = (EXAMPLES / f"{name}.py").read_text()
    assert old in text, old
    module = types.ModuleType("mutant")
    sys.modules["mutant"] = module  # where dataclasses look types up
    exec(text.replace(old, new), vars(module))
    return module


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_wrong_is_found(monkeypatch, mutant):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(sys.modules, "mutant", None)
    name, old, new, checks = MUTANTS[mutant]
    module = example(name, old, new)
    promises = {"algorithm": getattr(module, CLASSES[name])(), **module.PROMISES}
    ranks = 4 if "approach" in checks else 2
    with pytest.raises(AssertionError) as caught:
        check_algorithm(**promises, ranks=(ranks,), only=checks.split(), timeout_s=5)
    failed = re.findall(r"^(\w+)(?:, on| passes)", str(caught.value), re.MULTILINE)
    for others in re.findall(r"^([\w, ]+): as \w+$", str(caught.value), re.MULTILINE):
        failed += others.split(", ")
    assert set(checks.split()) <= set(failed), caught.value


def test_residuals_that_decay_are_dropped_or_not(monkeypatch):
    """With `owed` among the exceptions, `later` still asks for the rest of the residuals."""
    monkeypatch.syspath_prepend(EXAMPLES)
    decaying = example("top_k", KEEP, f"        residual *= 0.95\n{KEEP}")
    check_algorithm(**decaying.PROMISES, ranks=(2,), only=["later", "later_resharded"])
    dropping = example("top_k", KEEP, f"        residual *= 0.0\n{KEEP}")
    with pytest.raises(AssertionError, match=r"^later, on 2 ranks: "):
        check_algorithm(**dropping.PROMISES, ranks=(2,), only=["later", "later_resharded"])
