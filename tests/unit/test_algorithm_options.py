"""Options of algorithms and optimizers: what is refused, by name, and what follows from them."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd import BlockMomentumSGD, CNTKBlockMomentumSGD, DataParallelASGD, UserError
from parallel_sgd.algorithms import Block, Period
from parallel_sgd.embedding import Embedding
from parallel_sgd.optimizers import OPTIMIZERS

ROWS = [Embedding(name="ids", width=width) for width in (2, 3)]

#: A message begins with the option that it is about; behind the arrow are others that are given.
REFUSED = {
    "DataParallelSGD": """
        gradient_bits=9 must be a number from 0.05 to 8, 16 or 32
        gradient_bits=0 must be a number from 0.05 to 8, 16 or 32
        gradient_bits=0.04 must be a number from 0.05 to 8, 16 or 32
        gradient_bits=8.5 must be a number from 0.05 to 8, 16 or 32
        gradient_bits=None must be a number from 0.05 to 8, 16 or 32
        gradient_bits=[1] must be a number from 0.05 to 8, 16 or 32
        gradient_bits[10]=0 must be a number from 0.05 to 8 <- gradient_bits={0: 32, 10: 0}
        gradient_bits[0]=True must be a number from 0.05 to 8 <- gradient_bits={0: True}
        gradient_bits={10: 1} must begin at 0 samples
        gradient_bits={} must begin at 0 samples
        gradient_bits: samples=-1 must be a whole number <- gradient_bits={0: 1, -1: 2}
        threshold='max' must be 'zero' or 'mean' <- gradient_bits=1, code='sign'
        code='signs' must be one of 'auto', 'entropy', 'levels', 'sign', 'top-k' <- gradient_bits=1
        code='levels' has no effect without gradient_bits=4 or gradient_bits=8 <- gradient_bits=2
        code='entropy' has no effect without gradient_bits=0.05 to 8 <- gradient_bits=16
        bits_of='b:8' must be a mapping from patterns to values
        bits_of: pattern 8 must be a text: it is an int <- bits_of={8: 1}
        bits_of['*.b']=12 must be a number from <- bits_of={'*.b': 12}
        bits_of['b']='auto' must be a number from <- bits_of={'b': 'auto'}
        bits_of['b']=True must be a number from <- bits_of={'b': True}
        threshold='mean' has no effect without gradient_bits=1 <- bits_of={'b': 8}
        error_feedback=False has no effect without <- bits_of={'b': 32}
        residual_decay=1.5 must be a finite number, at least 0 and at most 1
        residual_decay=-0.1 must be a finite number, at least 0 and at most 1
        residual_decay=0.9 has no effect without <- gradient_bits=1, error_feedback=False
        block_size=0 must be a whole number from 1 to 1048576 <- gradient_bits=2
        half_format='f8' must be 'float16' or 'bfloat16' <- gradient_bits=16
        distributed_after=-1 must be a whole number, at least 0
        distributed_after=1.5 must be a whole number, at least 0
        distributed_after=nan must be a whole number, at least 0
        distributed_after=inf must be a whole number, at least 0
        distributed_after=True must be a whole number, at least 0
        distributed_after='5' must be a whole number, at least 0
        distributed_after=None must be a whole number, at least 0
        distributed_after=5.0 must be a whole number, at least 0 <- distributed_after=np.float64(5)
        overlap=True and double_buffering=True: at most one <- overlap=True, double_buffering=True
    """,
    "PowerSGD": """
        rank=0 must be a whole number, at least 1
        rank=2.0 must be a whole number, at least 1
        rank=None must be a whole number, at least 1
        transport='pigeon' must be one of 'auto', 'collective', 'pipelined', 'nccl'
        distributed_after=-1 must be a whole number, at least 0
    """,
    "ModelAveragingSGD": """
        block_samples=0 must be a whole number, at least 1
        sync_period=1.5 must be a whole number
        sync_steps=-1 must be a whole number, at least 1
        overlap_samples=-1 must be a whole number
        merge_weight=1.5 must be a finite number, at least 0 and at most 1
        merge_weight=0.5 has no effect without overlap_samples
        inner_state='reset' must be one of
        gradient_bits=9 must be a number from 0.05 to 8, 16 or 32
    """,
    "BlockMomentumSGD": """
        sync_period=5 and block_samples=10: at most one of <- sync_period=5, block_samples=10
        block_momentum=1 must be a finite number, at least 0 and less than 1
        block_momentum=-0.1 must be a finite number, at least 0
        block_momentum=0.9 and block_momentum_as_time_constant=1000: at most one \
<- block_momentum=0.9, block_momentum_as_time_constant=1000
        block_learning_rate=-1 must be a finite number
        use_nesterov_momentum=1 must be True or False
        reset_sgd_momentum='no' must be True or False
    """,
    "CNTKBlockMomentumSGD": "block_momentum_as_time_constant=-1 must be a finite number",
    "SlowMo": """
        slow_momentum=1.0 must be a finite number, at least 0 and less than 1
        slow_learning_rate=inf must be a finite number
    """,
    "DiLoCo": """
        outer_momentum=2 must be a finite number
        outer_learning_rate='fast' must be a finite number
        fragments=0 must be a whole number, at least 1
        fragments=2.5 must be a whole number, at least 1
    """,
    "DataParallelASGD": """
        servers=-1 must be a whole number, at least 0
        mode='ssp' must be one of 'async', 'bounded', 'sync', 'geo'
        currency='models' must be 'gradients' or 'deltas'
        currency='gradients' must be 'deltas' with mode='geo' <- mode='geo'
        merge='max' must be 'sum' or 'mean'
        role='boss' must be one of 'auto', 'worker', 'server'
        placement='random' must be 'round-robin' or 'hash'
        staleness=-1 must be a whole number, at least 0
        staleness=2 has no effect without mode='bounded'
        sync_period=0 must be a whole number, at least 1
        sync_steps=0 must be a whole number, at least 1
        sync_period=9 and sync_steps=2: at most one of <- sync_period=9, sync_steps=2
        pipeline=1 must be False or True
        slice_parameters=0 must be True or False
        min_block=0 must be a whole number, at least 1
        min_block=3 has no effect without slice_parameters=True <- slice_parameters=False
        ramp='steep' must be 'staircase' or 'linear'
        ramp='linear' has no effect without ramp_minibatches
        ramp_coefficient=0 must be more than 0
        ramp_coefficient=1.5 must be more than 0 and at most 1
        ramp_coefficient=0.5 has no effect without ramp_minibatches
        ramp_minibatches=-1 must be a whole number, at least 0
        block_size=64 has no effect without gradient_bits of 8 or less
        block_size=64 has no effect without gradient_bits of 8 or less <- gradient_bits=16
        gradient_bits=9 must be a number from 0.05 to 8, 16 or 32
        record='' must be the path of a folder
        replay=12 must be the path of a folder
        record='a' and replay='b': at most one of record, replay <- record='a', replay='b'
        delay_compensation=-0.1 must be a finite number, at least 0
        delay_compensation=0.5 needs pushed gradients that are stale; here mode <- mode='sync'
        delay_compensation=0.5 needs pushed gradients that are stale <- currency='deltas'
        tables='rows' must be a sequence of Embedding or ArrayTable
        tables: two of them have the name 'ids' <- tables=ROWS
        distributed_after=-1 must be a whole number, at least 0
        distributed_after=9 must be 0 with tables <- distributed_after=9, tables=ROWS[:1]
    """,
    "SGD": """
        SGD: lr=None and lr_per_sample=None: exactly one of them must be given
        lr=1e-50 must be a finite number, at least 0, also in float32
        lr_per_sample=inf must be a finite number
    """,
    "MomentumSGD": """
        momentum=1.0 must be a finite number, at least 0 and less than 1
        momentum=0.999999999 must be a finite number, at least 0 and less than 1, also in float32
        unit_gain='yes' must be False or True
        momentum_time_constant=-1 must be a finite number, at least 0
    """,
    "NesterovSGD": """
        momentum=0.9 and momentum_time_constant=5: at most one \
<- momentum=0.9, momentum_time_constant=5
    """,
    "Adam": """
        Adam: lr=1 and lr_per_sample=1: exactly one of them must be <- lr=1, lr_per_sample=1
        beta1=1.0 must be a finite number, at least 0 and less than 1
        beta1=0.999999999 must be a finite number, at least 0 and less than 1, also in float32
        beta2=-0.1 must be a finite number, at least 0 and less than 1
        epsilon=-1e-08 must be a finite number, at least 1e-30
        weight_decay=inf must be a finite number
    """,
    "Adagrad": """
        epsilon=1e-50 must be a finite number, at least 1e-30
        initial_accumulator=1e-50 must be a finite number, at least 0, also in float32
    """,
}


OPTIMIZED = {kind.__name__ for kind in OPTIMIZERS.values()}


@pytest.mark.parametrize(
    ("kind", "line"),
    [(kind, line.strip()) for kind, text in REFUSED.items() for line in text.strip().split("\n")],
)
def test_what_is_refused(kind, line):
    message, _, more = line.partition(" <- ")
    name, own = message.partition("=")[0], re.match(r"(\w+=.*?) (?:must|has|needs) ", message)
    given = more if own is None or f"{name}=" in more else ", ".join(filter(None, [own[1], more]))
    if kind in OPTIMIZED and "lr" not in message:
        given = f"lr=1, {given}"
    names = {"nan": math.nan, "inf": math.inf, "ROWS": ROWS, "np": np}
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        getattr(psgd, kind)(**eval(f"dict({given})", names))


ONE, CODE = "gradient_bits=1 and code='sign'", "gradient_bits=1"
LEVELS, ENTROPY = "gradient_bits=4 or gradient_bits=8", "gradient_bits=0.05 to 8"
HALF, FEW = "gradient_bits=16", "gradient_bits of less than 32"


@pytest.mark.parametrize("kind", [psgd.DataParallelSGD, DataParallelASGD, psgd.ModelAveragingSGD])
@pytest.mark.parametrize(
    ("name", "value", "bits", "needs"),
    [
        ("threshold", "mean", (32, 2, 16), ONE),
        ("half_format", "bfloat16", (32, 1, 8), HALF),
        ("code", "sign", (32, 0.5, 2), CODE),
        ("code", "levels", (32, 16, 1, 3.7), LEVELS),
        ("code", "entropy", (32, 16), ENTROPY),
        ("error_feedback", False, (32,), FEW),
    ],
)
def test_options_of_codecs_that_are_not_used(kind, name, value, bits, needs):
    line = re.escape(f"{name}={value!r} has no effect without {needs}")
    for unused in bits:
        with pytest.raises(UserError, match=f"^{line}$"):
            kind(gradient_bits=unused, **{name: value})
    used = {ONE: 1, HALF: 16, FEW: 4, CODE: 1, LEVELS: 8, ENTROPY: 4}[needs]
    code = {"code": "sign"} if needs == ONE else {}
    assert getattr(kind(gradient_bits=used, **{name: value}, **code), name) == value


@pytest.mark.parametrize("kind", [psgd.DataParallelSGD, psgd.DiLoCo, DataParallelASGD])
def test_bits_that_may_come_count(kind):
    """Also those that a measurement would have to choose."""
    for bits in ("auto", {0: 32, 9: 16, 99: 1}):
        kind(gradient_bits=bits, half_format="bfloat16", error_feedback=False)
    with pytest.raises(UserError, match=r"^half_format='bfloat16' has no effect without"):
        kind(gradient_bits={0: 32, 9: 1}, half_format="bfloat16")
    with pytest.raises(UserError, match=r"^error_feedback=False has no effect without"):
        kind(gradient_bits={0: 32, 9: 32}, error_feedback=False)
    for name, value in (("code", "sign"), ("threshold", "mean")):  # never "auto"
        with pytest.raises(UserError, match=rf"^{name}='{value}' has no effect without"):
            kind(gradient_bits="auto", **{name: value})


def test_blocks_cut_buckets_but_not_pushes():
    assert psgd.DataParallelSGD(block_size=64).block_size == 64
    for bits in (8, 0.25):
        assert DataParallelASGD(block_size=64, gradient_bits=bits).block_size == 64


def test_bits_that_change_are_a_copy_and_go_by_samples():
    bits = {0: 32, 100: 0.5, 1000: 1}
    algorithm = psgd.DataParallelSGD(gradient_bits=bits)
    bits[0] = 7
    expected = {0: 32, 99: 32, 100: 0.5, 999: 0.5, 1000: 1, 10**9: 1}
    assert {samples: algorithm.exchange.bits_after(samples) for samples in expected} == expected
    assert psgd.DataParallelSGD(gradient_bits=8).exchange.bits_after(10**9) == 8
    assert repr(psgd.DataParallelSGD(gradient_bits=8 / 8).gradient_bits) == "1"
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm


@pytest.mark.parametrize("kind", [psgd.DataParallelSGD, psgd.DiLoCo])
def test_bits_by_pattern_are_a_copy_in_the_order_given(kind):
    bits = {"*.bias": np.int64(32), "E": 8}
    signs = {"gradient_bits": 1, "code": "sign", "threshold": "mean"}
    algorithm = kind(bits_of=bits, error_feedback=False, **signs)
    bits["*"] = 7
    assert repr(algorithm.bits_of) == "{'*.bias': 32, 'E': 8}"
    assert eval(repr(algorithm), {kind.__name__: kind}) == algorithm
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    other = replace(algorithm, bits_of={"E": 8, "*.bias": 32})
    assert other != algorithm
    assert kind(bits_of={"b": 1}, error_feedback=False).gradient_bits == 32


@pytest.mark.parametrize("kind", [BlockMomentumSGD, CNTKBlockMomentumSGD, psgd.SlowMo, psgd.DiLoCo])
def test_options_have_one_repr_from_which_they_can_be_made(kind):
    algorithm = kind(sync_period=np.int64(40), gradient_bits={0: 32, 10: 1})
    assert eval(repr(algorithm), {kind.__name__: kind}) == algorithm
    assert hash(algorithm) == hash(kind(sync_period=40, gradient_bits={10: 1, 0: 32}))


@pytest.mark.parametrize(
    ("algorithm", "ranks", "samples"),
    [
        (psgd.ModelAveragingSGD(), 3, 120_000),
        (BlockMomentumSGD(), 4, 480_000),
        (CNTKBlockMomentumSGD(block_samples=7), 4, 7),
        (psgd.ModelAveragingSGD(sync_period=9), 2, 18),
        (psgd.DiLoCo(), 4, None),
        (psgd.SlowMo(sync_steps=3), 4, None),
    ],
)
def test_the_samples_of_a_block(algorithm, ranks, samples):
    assert algorithm.period.samples_on(ranks) == samples


def test_default_periods_in_minibatches():
    assert (psgd.DiLoCo().sync_steps, psgd.SlowMo().sync_steps) == (500, 48)


def test_block_momentum_by_default_and_as_a_time_constant():
    """A time constant τ and the momentum are the same thing: τ = -block / ln η, where the block is
    of each rank or of all, as its length is given."""

    def momentum(algorithm, samples=10, ranks=4):
        length = algorithm.period.length(samples, ranks)
        return algorithm.outer.momentum_after(Block(samples, length, lr=0.1, ranks=ranks))

    assert momentum(BlockMomentumSGD()) == 0.75
    assert momentum(BlockMomentumSGD(), ranks=1) == 0
    assert momentum(BlockMomentumSGD(block_momentum=0.4)) == 0.4
    tau = -1000 / math.log(0.6)
    for period in ({"block_samples": 1000}, {"sync_steps": 5}):
        timed = BlockMomentumSGD(**period, block_momentum_as_time_constant=tau)
        assert momentum(timed, 1000) == pytest.approx(0.6, abs=1e-15)
        assert momentum(timed, 2000) == pytest.approx(0.36, abs=1e-15)
    cntk = -120_000 / math.log(0.75)
    for kind, ranks in product((BlockMomentumSGD, CNTKBlockMomentumSGD), (1, 2, 3, 64)):
        timed = kind(block_momentum_as_time_constant=cntk)
        block = timed.period.samples_on(ranks)
        assert momentum(timed, block, ranks) == pytest.approx(0.75, abs=1e-15)
    assert momentum(BlockMomentumSGD(block_momentum_as_time_constant=0)) == 0


def test_what_follows_where_nothing_is_said_of_pushes():
    plain = DataParallelASGD()
    assert (plain.currency, plain.merge, plain.sync_period) == ("gradients", "sum", 256)
    assert DataParallelASGD(mode="sync").merge == "mean"
    geo = DataParallelASGD(mode="geo")
    assert (geo.currency, geo.merge) == ("deltas", "mean")
    assert DataParallelASGD(mode="geo", merge="sum").merge == "sum"
    assert DataParallelASGD(sync_steps=np.int64(3)).sync_period is None


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
