"""The saved state of DDP's hook: residuals and steps, on as many ranks or on others."""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import pytest
import torch
from hook_buckets import SIZES, TWO, WHOLE, Model, left, same_state, summed
from torch.nn import Linear, Sequential

from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.errors import SharedError
from parallel_sgd.torch import hook_state

pytestmark = [pytest.mark.threads(1, 3), pytest.mark.ranks(2)]


def test_residuals_go_on_from_a_saved_state(comm):
    """With the same buckets bit for bit, with others nothing is lost."""
    model, before, layout = Model(comm.rank), 3, TWO
    options = {"gradient_bits": 1, "block_size": 64}
    with (
        hook_state(comm, **options) as straight,
        hook_state(comm, **options) as resumed,
        hook_state(comm, **options) as reconfigured,
    ):
        for step in range(before):
            model.means(straight, layout, model.gradients(step))
        written = io.BytesIO()
        torch.save(straight.state_dict(), written)
        written.seek(0)
        saved = torch.load(written, weights_only=True)
        resumed.load_state_dict(saved)
        assert resumed.steps == before
        reconfigured.load_state_dict(saved)
        begun = left(comm, reconfigured)
        assert np.abs(begun).max() > 0
        for step in range(before, before + 2):
            gradients = model.gradients(step)
            expected = model.means(straight, layout, gradients)
            means = model.means(resumed, layout, gradients)
            assert all(map(np.array_equal, means, expected))
        # The names go by the order of the buckets, so the order of the parameters has to stay.
        means = model.means(reconfigured, ((4, 3, 2), (1, 0)), model.gradients(before))
        order = [4, 3, 2, 1, 0]
        got = comm.size * np.concatenate([means[i] for i in order]).astype(float)
        given = summed(comm, [model.gradients(before)[i] for i in order])
        assert np.abs(got + left(comm, reconfigured) - given - begun).max() < 1e-4 * comm.size


def test_loading_into_buckets_that_are_there(comm):
    model = Model(comm.rank)
    with hook_state(comm, gradient_bits=1) as state:
        model.means(state, WHOLE, model.gradients(0))
        saved = state.state_dict()
        first = model.means(state, WHOLE, model.gradients(1))
        state.load_state_dict(saved)
        again = model.means(state, WHOLE, model.gradients(1))
        assert all(map(np.array_equal, first, again))


def test_what_cannot_be_loaded(comm):
    model = Model(comm.rank)
    with hook_state(comm, gradient_bits=1) as state:
        model.means(state, WHOLE, model.gradients(0))
        saved = state.state_dict()
        with pytest.raises(UserError, match="give the rank its own saved state, or"):
            state.load_state_dict(saved | {"ranks": comm.size + 1})
        with pytest.raises(UserError, match="must be what state_dict"):
            state.load_state_dict({"residuals": {}})
        with pytest.raises(UserError, match="state=3 must be what state_dict"):
            state.load_state_dict(3)
        for wrong in ({"owner_begin": 2999}, {"worker_error": torch.zeros(3000).double()}):
            damaged = {"0": saved["residuals"]["0"] | {"owner_error": torch.zeros(2)} | wrong}
            with pytest.raises(UserError, match="must be what state_dict"):
                state.load_state_dict(saved | {"residuals": damaged})
        other = {"0": saved["residuals"]["1"]}
        with pytest.raises(UserError, match="'0' has 700 values, and the parameter has 3000"):
            state.load_state_dict(saved | {"residuals": other})
        with pytest.raises(UserError, match="no name is the same, so it is of another model"):
            state.load_state_dict(saved | {"residuals": {"weight": saved["residuals"]["1"]}})
    with hook_state(comm, gradient_bits=1) as state:
        state.load_state_dict(saved | {"residuals": other})
        with pytest.raises(SharedError, match="it is of another model"):
            model.means(state, WHOLE, model.gradients(0))


def test_every_rank_must_load_the_same_steps(comm):
    model, first = Model(comm.rank), comm.rank == 0
    with hook_state(comm, gradient_bits=1) as state:
        model.means(state, WHOLE, model.gradients(0))
        saved = state.state_dict()
        with pytest.raises(SharedError, match=r"must be what state_dict.*\(on rank 0\)"):
            state.load_state_dict({} if first else saved)
        if comm.size > 1:
            with pytest.raises(SharedError, match=r"steps that load_state_dict .*: rank 0: 1; "):
                state.load_state_dict(saved | {"steps": 1 + comm.rank})
            with pytest.raises(SharedError, match=r"scale that load_state_dict .*rank 0: 1\.0"):
                state.load_state_dict(saved | {"scale": 2.0**comm.rank})
        kept = state.state_dict()
        assert kept["steps"] == 1 and same_state(kept["residuals"], saved["residuals"])
    if comm.size > 1:
        state = hook_state(comm, gradient_bits=1)
        call = state.load_state_dict if first else partial(model.means, state, WHOLE)
        given = saved if first else model.gradients(1)
        with pytest.raises(SharedError, match="load_state_dict restores must be the same on all"):
            call(given)
        state.close()


def test_a_state_of_another_module(comm):
    saved = {"rank": comm.rank, "ranks": comm.size, "steps": 1, "scale": 1.0}
    zeros = {"worker_error": torch.zeros(3), "owner_error": torch.zeros(0), "owner_begin": 0}
    with hook_state(comm, gradient_bits=1, module=Sequential(Linear(4, 3))) as state:
        for name, error in (("0.weight", "'0.weight' has 3 .*has 12"), ("weight", "no name is")):
            with pytest.raises(SharedError, match=error):
                state.load_state_dict(saved | {"residuals": {name: zeros}})
        state.load_state_dict(saved | {"residuals": {"0.bias": zeros, "frozen since": zeros}})


BITS = {"gradient_bits": 1, "block_size": 64}
IN_ORDER = ((0, 1), (2, 3, 4))  #: other buckets, in which the parameters have the same numbers


def states_after(ranks, steps=3):
    """The saved state of each of some ranks, and their residuals in all."""

    def body(comm):
        model = Model(comm.rank)
        with hook_state(comm, **BITS) as state:
            for step in range(steps):
                model.means(state, WHOLE, model.gradients(step))
            return state.state_dict(), left(comm, state)

    states, totals = zip(*simulate(ranks, body), strict=True)
    assert np.abs(totals[0]).max() > 1
    return states, totals[0]


def owner_values(states):
    return sum(one["owner_error"].numel() for s in states for one in s["residuals"].values())


@pytest.mark.parametrize("new", [1, 2, 3, 5])
@pytest.mark.parametrize("old", [1, 2, 4])
def test_residuals_on_another_number_of_ranks(old, new):
    """Their sum over all ranks stays, and training gives it back."""
    states, before = states_after(old)
    assert owner_values(states) == sum(SIZES)

    def body(comm):
        model = Model(comm.rank + 10)
        with hook_state(comm, **BITS) as state:
            state.load_state_dict(s for s in reversed(states))
            assert state.steps == 3
            loaded = left(comm, state)
            if new == old:
                assert same_state(state.state_dict()["residuals"], states[comm.rank]["residuals"])
            gradients = model.gradients(0)
            means = model.means(state, IN_ORDER, gradients)
            got = np.concatenate(means).astype(float) * comm.size
            given = summed(comm, gradients)
            assert np.abs(got + left(comm, state) - given - loaded).max() < 1e-4 * comm.size
            return loaded

    for loaded in simulate(new, body):
        assert np.abs(loaded - before).max() < (1e-6 if new < old else 1e-12)


def test_states_that_are_not_of_all_ranks():
    states, _ = states_after(2)
    later, _ = states_after(2, steps=4)
    with hook_state(Communicator.single(), **BITS) as state:
        for given, error in (
            (states[:1], "state lacks the saved state of rank 1: it must have those of all 2"),
            ([], "state is an empty list"),
            ([states[0], states[0]], "state 1 is of rank 0, as an earlier state is"),
            ([states[0], later[1]], "state 1 is of step 4 .* must be saved at the same step"),
            ([states[0], 3], "state=3 must be what"),
            (iter([states[1]]), "lacks the saved state of rank 0"),
        ):
            with pytest.raises(UserError, match=error):
                state.load_state_dict(given)
        assert state.steps == 0 and not state.state_dict()["residuals"]


def test_all_states_in_one_file(comm):
    model, written = Model(comm.rank), io.BytesIO()
    with hook_state(comm, **BITS) as state, hook_state(comm, **BITS) as resumed:
        assert [s["residuals"] for s in state.gathered_state_dicts()] == (
            [{}] * comm.size if comm.rank == 0 else []
        )
        for step in range(2):
            model.means(state, TWO, model.gradients(step))
        torch.save(state.gathered_state_dicts(), written)
        own, (file, *_) = state.state_dict(), comm.allgather_object(written.getvalue())
        loaded = torch.load(io.BytesIO(file), weights_only=True)
        assert [s["rank"] for s in loaded] == [*range(comm.size)]
        assert same_state(loaded[comm.rank]["residuals"], own["residuals"])
        resumed.load_state_dict(loaded)
        assert resumed.steps == 2
        expected = model.means(state, TWO, model.gradients(2))
        assert all(map(np.array_equal, model.means(resumed, TWO, model.gradients(2)), expected))
