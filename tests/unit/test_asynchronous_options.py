"""Options of asynchronous SGD: what is refused by name, and what follows from them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from parallel_sgd import DataParallelASGD, UserError
from parallel_sgd.algorithms import Period
from parallel_sgd.embedding import Embedding


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": -1}, "servers=-1 must be a whole number, at least 0"),
        ({"servers": 1.0}, "servers=1.0 must be a whole number, at least 0"),
        ({"servers": True}, "servers=True must be a whole number, at least 0"),
        ({"mode": "ssp"}, "mode='ssp' must be one of 'async', 'bounded', 'sync', 'geo'"),
        ({"currency": "models"}, "currency='models' must be 'gradients' or 'deltas'"),
        ({"merge": "max"}, "merge='max' must be 'sum' or 'mean'"),
        ({"role": "boss"}, "role='boss' must be one of 'auto', 'worker', 'server'"),
        ({"placement": "random"}, "placement='random' must be 'round-robin' or 'hash'"),
        ({"placement": None}, "placement=None must be 'round-robin' or 'hash'"),
        ({"staleness": -1}, "staleness=-1 must be a whole number, at least 0"),
        ({"sync_period": 0}, "sync_period=0 must be a whole number, at least 1"),
        ({"sync_steps": 0}, "sync_steps=0 must be a whole number, at least 1"),
        ({"sync_steps": -1}, "sync_steps=-1 must be a whole number, at least 1"),
        (
            {"sync_period": 9, "sync_steps": 2},
            "sync_period=9 and sync_steps=2: at most one of sync_period, sync_steps may be given",
        ),
        ({"pipeline": 1}, "pipeline=1 must be False or True"),
        ({"slice_parameters": 0}, "slice_parameters=0 must be True or False"),
        ({"min_block": 0}, "min_block=0 must be a whole number, at least 1"),
        ({"ramp": "steep"}, "ramp='steep' must be 'staircase' or 'linear'"),
        ({"ramp_coefficient": 0}, "ramp_coefficient=0 must be more than 0"),
        ({"ramp_coefficient": 1.5}, "ramp_coefficient=1.5 must be more than 0 and at most 1"),
        ({"staleness": 2}, "staleness=2 has no effect without mode='bounded'"),
        ({"ramp": "linear"}, "ramp='linear' has no effect without ramp_minibatches"),
        ({"ramp_coefficient": 0.5}, "ramp_coefficient=0.5 has no effect without ramp_minibatches"),
        (
            {"min_block": 3, "slice_parameters": False},
            "min_block=3 has no effect without slice_parameters=True",
        ),
        ({"block_size": 64}, "block_size=64 has no effect without gradient_bits of 1 to 8"),
        ({"block_size": 64, "gradient_bits": 16}, "block_size=64 has no effect without gradient_b"),
        ({"threshold": "mean"}, "threshold='mean' has no effect without gradient_bits=1"),
        ({"merge": ""}, "merge='' must be 'sum' or 'mean'"),
        ({"currency": ""}, "currency='' must be 'gradients' or 'deltas'"),
        ({"record": ""}, "record='' must be the path of a folder"),
        ({"replay": 12}, "replay=12 must be the path of a folder"),
        ({"ramp_minibatches": -1}, "ramp_minibatches=-1 must be a whole number, at least 0"),
        ({"delay_compensation": -0.1}, "delay_compensation=-0.1 must be a finite number, at least"),
        ({"delay_compensation": np.nan}, "delay_compensation=nan must be a finite number, at leas"),
        (
            {"delay_compensation": 0.5, "mode": "sync"},
            "delay_compensation=0.5 needs pushed gradients that are stale; here mode='sync' and",
        ),
        (
            {"delay_compensation": 0.5, "currency": "deltas"},
            "delay_compensation=0.5 needs pushed gradients that are stale; here mode='async' and",
        ),
        (
            {"mode": "geo", "currency": "gradients"},
            "currency='gradients' must be 'deltas' with mode='geo'",
        ),
        ({"gradient_bits": {0: 32, 9: 1}}, "gradient_bits={0: 32, 9: 1} must be one of 1, 2"),
        ({"gradient_bits": 3}, "gradient_bits=3 must be one of 1, 2, 4, 8, 16, 32"),
        ({"record": "a", "replay": "b"}, "record='a' and replay='b': at most one of record, r"),
        ({"tables": "rows"}, "tables='rows' must be a sequence of Embedding"),
        (
            {"tables": (Embedding(name="ids", width=2), Embedding(name="ids", width=3))},
            "tables: two of them have the name 'ids'",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else ", ".join(value),
)
def test_options_that_are_not_possible(options, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        DataParallelASGD(**options)


def test_what_follows_where_nothing_is_said():
    plain = DataParallelASGD()
    assert (plain.currency, plain.merge, plain.sync_period) == ("gradients", "sum", 256)
    assert DataParallelASGD(mode="sync").merge == "mean"
    geo = DataParallelASGD(mode="geo")
    assert (geo.currency, geo.merge) == ("deltas", "mean")
    assert DataParallelASGD(mode="geo", merge="sum").merge == "sum"
    assert DataParallelASGD(sync_steps=np.int64(3)).sync_period is None
    assert repr(DataParallelASGD(sync_steps=np.int64(3))) == repr(DataParallelASGD(sync_steps=3))


def test_roles_do_not_tell_algorithms_apart():
    """Every rank says its own."""
    worker, server = DataParallelASGD(role="worker"), DataParallelASGD(role="server")
    assert worker == server
    assert repr(worker) == repr(server)


def test_when_a_period_ends():
    by_steps, by_samples = Period(sync_steps=3), Period(sync_period=10)
    assert [by_steps.ends(n, 10**6, 4) for n in (1, 2, 3, 4)] == [False, False, True, True]
    assert [by_samples.ends(99, n, 4) for n in (10, 39, 40, 41)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1]),
        ({"ramp_minibatches": 2, "ramp_coefficient": 0.4}, [0.4, 0.4, 0.8, 0.8, 1, 1, 1]),
        ({"ramp_minibatches": 1, "ramp_coefficient": 0.3}, [0.3, 0.6, 0.9, 1, 1, 1, 1]),
        ({"ramp_minibatches": 3, "ramp_coefficient": 1}, [1, 1, 1, 1, 1, 1, 1]),
        (
            {"ramp_minibatches": 4, "ramp_coefficient": 0.2, "ramp": "linear"},
            [0.2, 0.4, 0.6, 0.8, 1, 1, 1],
        ),
    ],
    ids=["none", "steps of 2", "steps of 1", "whole", "linear"],
)
def test_the_ramp(options, factors):
    """min(1, a (⌊s/m⌋ + 1)), or min(1, a + (1 - a) s/m)."""
    ramp = DataParallelASGD(**options).ramp_up
    np.testing.assert_allclose([ramp.factor(s) for s in range(7)], factors, rtol=1e-12)
