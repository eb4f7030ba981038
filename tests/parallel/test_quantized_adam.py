"""Adam on gradients that an entropy code has quantized: the correction, and where there is none."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from cases import gradient_of, shared
from invariants import same_on_all_ranks

from parallel_sgd import (
    Adam,
    Checkpoints,
    DataParallelSGD,
    Learner,
    MomentumSGD,
    Parameters,
    load_checkpoint,
    second_moment,
)
from parallel_sgd import torch as psgd_torch
from parallel_sgd.compression import step_search
from parallel_sgd.kernels.reference import group_signs
from parallel_sgd.second_moment import (
    HELD,
    LARGEST_MOVE,
    PROJECTED_EVERY,
    PROJECTED_UNTIL,
    is_projected,
)

SHAPES = {"W": (90, 100), "b": (100,), "V": (60, 50)}
N = sum(int(np.prod(shape)) for shape in SHAPES.values())
RATE = 0.01
GROUP_OF = np.arange(N) // 64
GROUPS = GROUP_OF[-1] + 1


def learner_of(comm, adam=None, **options):
    parameters = Parameters({name: np.zeros(s, np.float32) for name, s in SHAPES.items()})
    adam = adam or Adam(lr=RATE, weight_decay=0.1)
    return Learner(parameters, adam, DataParallelSGD(block_size=64, **options), comm)


def gradient_of_step(rank, step):
    sizes = np.repeat([1, 1e-2], [9000, N - 9000]).astype(np.float32)
    return sizes * gradient_of(rank, step, N)


def train(learner, steps, first=0):
    for step in range(first, first + steps):
        learner.gradient.flat[:] = gradient_of_step(learner.comm.rank, step)
        for name in [*SHAPES][::-1]:
            learner.ready(name)
        learner.step(2)


WAYS = {
    "collective": {"transport": "collective"},
    "pipelined": {"transport": "pipelined"},
    "double buffering": {"double_buffering": True},
    "overlap": {"overlap": True, "bucket_values": 2000},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_equations(comm, way):
    """Each step is that of the docstrings, from the gradients before and after quantization."""
    learner = learner_of(comm, gradient_bits=0.5, **WAYS[way])
    optimizer, told = learner.local_step, []
    original = type(optimizer).update
    expected, m, v = np.zeros(N), np.zeros(N), np.zeros(N)
    squares, slopes, shifts = np.zeros(GROUPS), np.ones(GROUPS), np.zeros(GROUPS)

    def update(gradient, samples, out):
        t = optimizer.state.steps + 1
        places, projections = optimizer.state.quantized
        assert places == (slice(0, N),) and (projections is not None) == is_projected(t)
        g = gradient / samples
        m[:] += 0.1 * (g - m)
        v[:] += 0.001 * (g * g - v)
        m_hat, bias2 = m / (1 - 0.9**t), 1 - 0.999**t
        root = np.sqrt((slopes[GROUP_OF] * v + shifts[GROUP_OF]) / bias2)
        root = np.maximum(root, np.abs(m_hat) / LARGEST_MOVE)
        expected[:] -= RATE * (m_hat / (root + 1e-8) + 0.1 * expected)
        if projections is not None:
            whole = sum(gradient_of_step(rank, t - 1) for rank in range(comm.size))
            exactly = projected(whole, t)
            rounding = 0.01 * np.abs(exactly).max()  # of each rank's, which are sent as bfloat16
            np.testing.assert_allclose(projections, exactly, rtol=0.01, atol=rounding)
            weight = 1 - 0.999 ** (1 if t <= PROJECTED_UNTIL else PROJECTED_EVERY)
            squares[:] += weight * ((projections / samples) ** 2 - squares)
            sums = np.bincount(GROUP_OF, v)
            ratio = np.where(sums > 0, squares / np.maximum(sums, 1e-30), 2)
            share = 1 - np.exp((HELD - t) / HELD) if t > HELD else 0
            ratio = np.where(ratio < 1, ratio**share, ratio)
            slopes[:] = ratio * (1 - share / 2)
            shifts[:] = ratio * sums / np.bincount(GROUP_OF) * share / 2
            told.append(t)
        original(optimizer, gradient, samples, out)

    optimizer.update = update
    steps = 97 if way == "collective" else 40
    train(learner, steps)
    learner.finish()
    assert told == [*range(1, min(steps, 64) + 1), *([96] if steps > 96 else [])]
    same_on_all_ranks(comm, learner.parameters.flat)
    apart = np.abs(learner.parameters.flat - expected)
    assert apart.max() < 0.02 * np.abs(expected).max()


@cache
def signs_of(step):
    signs = [[1 - 2 * (group_signs(step, g) >> i & 1) for i in range(64)] for g in range(GROUPS)]
    return np.ravel(signs)[:N]


def projected(vector, step):
    return np.bincount(GROUP_OF, signs_of(step) * vector)


def test_projections_measure_the_squares_of_the_sum(comm):
    """On average over the signs, of the gradients' sum: not of each gradient."""
    learner = learner_of(comm, Adam(lr=0.0), gradient_bits=0.1)
    for _ in range(64):
        learner.gradient.flat[:] = gradient_of_step(comm.rank, 0)
        learner.step(1)
    squares = learner.local_step.state.correction["squares"] / (1 - 0.999**64)
    whole = sum(gradient_of_step(rank, 0) for rank in range(comm.size)) / comm.size
    ratio = squares / np.bincount(GROUP_OF, whole**2)
    assert abs(ratio.mean() - 1) < 0.1 and 0.05 < ratio.std() < 0.4


@pytest.mark.parametrize("bits", [4, 16, 32])
def test_nothing_changes_where_nothing_is_quantized_in_steps(comm, bits):
    learner = learner_of(comm, gradient_bits=bits)
    train(learner, 3)
    assert not learner.local_step.state.correction and not learner.state.exchange.current.quantized


def test_other_rules_are_not_measured_for(comm):
    sent = {}
    for rule in (MomentumSGD(lr=RATE), Adam(lr=RATE)):
        learner = learner_of(comm, rule, gradient_bits=0.5)
        train(learner, 3)
        sent[type(rule)] = learner.state.exchange.projecting, learner.bytes_sent
    none, less = sent[MomentumSGD]
    projecting, more = sent[Adam]
    assert none is None
    assert (more > less) == (comm.size > 1) and more - less >= projecting.bytes_sent * 0.9


def test_values_with_32_bits_of_their_own_have_plain_adam(comm):
    learner = learner_of(comm, gradient_bits=1, bits_of={"b": 32})
    plain = learner_of(comm)
    for one in (learner, plain):
        train(one, 5)
    assert np.array_equal(learner.parameters["b"], plain.parameters["b"])
    assert not np.array_equal(learner.parameters["W"], plain.parameters["W"])
    assert learner.local_step.state.correction


def test_v_is_believed_until_quantization_begins(comm):
    """After full precision a group's squares are those of v, and go on from there."""
    learner = learner_of(comm, Adam(lr=0.0), gradient_bits={0: 32, 100 * comm.size: 0.1})
    for step in range(130):
        learner.gradient.flat[:] = gradient_of_step(comm.rank, step)
        learner.step(1)
        if step == 99:
            v = learner.local_step.state.buffers["v"].copy()
    squares = learner.local_step.state.correction["squares"]
    ratio = squares / np.bincount(GROUP_OF, v)
    assert 0.9 < np.median(ratio) < 1.5


def test_small_values_move_further(comm):
    """Values of a fraction of a step, which plain Adam moves by a tenth of what 32 bits do."""
    moved = {}
    for name, bits in (("32 bits", 32), ("corrected", 0.5), ("plain", 0.5)):
        learner = learner_of(comm, Adam(lr=RATE), gradient_bits=bits)
        if name == "plain":
            learner.state.exchange.quantized = lambda: None
        sizes = np.repeat([1, 0.1], [9000, N - 9000]).astype(np.float32)
        drift = np.sign(gradient_of(9, 0, N))
        for step in range(200):
            learner.gradient.flat[:] = sizes * (gradient_of(comm.rank, step, N) + drift)
            learner.step(1)
        moved[name] = np.abs(learner.parameters.flat[9100:]).mean()
    assert moved["corrected"] > 2 * moved["plain"]
    assert moved["plain"] < 0.3 * moved["32 bits"]
    assert moved["corrected"] < 3 * moved["32 bits"]


def test_a_checkpoint_has_the_correction(comm, tmp_path):
    folder = shared(comm, tmp_path)
    whole, first = (learner_of(comm, gradient_bits=0.5) for _ in range(2))
    train(whole, 8)
    train(first, 4)
    Checkpoints(folder).save(first)
    second = learner_of(comm, gradient_bits=0.5)
    load_checkpoint(second, folder)
    assert np.array_equal(*(one.local_step.state.correction["squares"] for one in (first, second)))
    train(second, 4, first=4)
    assert np.array_equal(second.parameters.flat, whole.parameters.flat)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_pytorchs_adam_is_corrected_likewise(comm, monkeypatch, kind):
    # Gradients of other units have other bits, by which a sample, or one of two steps, is chosen.
    monkeypatch.setattr(step_search, "_hash_of_values", lambda pairs: 0)
    held = 2
    monkeypatch.setattr(second_moment, "HELD", held)
    model = torch.nn.Sequential(torch.nn.Linear(60, 80), torch.nn.Tanh(), torch.nn.Linear(80, 9))
    random = np.random.default_rng(0)  # PyTorch's own generator is shared by ranks that are threads
    for p in model.parameters():
        p.data = torch.from_numpy(random.uniform(-0.12, 0.12, p.shape).astype(np.float32))
    # 64 samples of all ranks: what is divided by a power of two is quantized alike.
    data, size = np.random.default_rng(comm.rank), 64 // comm.size
    size += (comm.rank == 0) * (64 - size * comm.size)
    batches = [
        (torch.from_numpy(data.standard_normal((size, 60), np.float32)), data.integers(0, 9, size))
        for _ in range(6)
    ]
    trained = {}
    for name in ("pytorch", "ours", "uncorrected"):
        own = copy.deepcopy(model)
        decay = 0.1 if kind is torch.optim.AdamW else 0.0
        optimizer = kind(own.parameters(), lr=RATE, weight_decay=decay)
        if name == "ours":
            optimizer = Adam(lr=RATE, weight_decay=decay)
        algorithm = DataParallelSGD(gradient_bits=0.5)
        learner = psgd_torch.Learner(own, optimizer, algorithm, comm)
        if name == "uncorrected":
            learner.state.exchange.quantized = lambda: None
        for x, y in batches:
            torch.nn.functional.cross_entropy(own(x), torch.from_numpy(y)).backward()
            learner.step(len(x))
        trained[name] = learner.parameters.flat.copy()
        if name == "pytorch":
            state, groups = learner.local_step.state, np.arange(len(trained[name])) // 64
            sums = np.bincount(groups, state.buffers["exp_avg_sq"])
            assert (sums > 0).mean() > 0.5
            share = 1 - np.exp((held - state.steps) / held)
            alike = state.correction["slopes"] * sums / np.bincount(groups)
            alike *= share / 2 / (1 - share / 2)
            np.testing.assert_allclose(state.correction["shifts"], alike, rtol=1e-4)
        same_on_all_ranks(comm, trained[name])
        learner.close()
    apart = np.abs(trained["uncorrected"] - trained["ours"]).mean()
    assert np.abs(trained["pytorch"] - trained["ours"]).mean() < 0.2 * apart
