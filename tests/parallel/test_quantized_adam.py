"""Adam on gradients that an entropy code has quantized: the correction, and where there is none."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from cases import gradient_of, shared
from invariants import same_on_all_ranks

from parallel_sgd import Adam, Checkpoints, DataParallelSGD, Learner, Parameters, load_checkpoint
from parallel_sgd import torch as psgd_torch
from parallel_sgd.compression import step_search
from parallel_sgd.optimizers import LARGEST_MOVE, NOISE

SHAPES = {"W": (90, 100), "b": (100,), "V": (60, 50)}
N = sum(int(np.prod(shape)) for shape in SHAPES.values())
RATE = 0.01


def learner_of(comm, adam=None, **options):
    parameters = Parameters({name: np.zeros(s, np.float32) for name, s in SHAPES.items()})
    adam = adam or Adam(lr=RATE, weight_decay=0.1)
    return Learner(parameters, adam, DataParallelSGD(block_size=64, **options), comm)


def train(learner, steps, first=0):
    sizes = np.repeat([1, 1e-2], [9000, N - 9000]).astype(np.float32)
    for step in range(first, first + steps):
        learner.gradient.flat[:] = sizes * gradient_of(learner.comm.rank, step, N)
        learner.step(2)


@pytest.mark.parametrize("transport", ["collective", "pipelined"])
@pytest.mark.parametrize("double_buffering", [False, True])
def test_the_equations(comm, transport, double_buffering):
    """Each step is that of the docstring, from the gradient and the steps of its messages."""
    way = {"transport": transport, "double_buffering": double_buffering}
    learner = learner_of(comm, gradient_bits=0.5, **way)
    optimizer, seen = learner.local_step, []
    original = type(optimizer).update
    expected, m, v, noise = np.zeros(N), np.zeros(N), np.zeros(N), 0.0

    def update(gradient, samples, out):
        nonlocal noise
        square, places = optimizer.state.quantization
        assert places == (slice(0, N),)
        seen.append(square)
        g, t = gradient / samples, len(seen)
        m[:] += 0.1 * (g - m)
        v[:] += 0.001 * (g * g - v)
        noise += 0.001 * (square / samples**2 - noise)
        m_hat, v_hat, d = m / (1 - 0.9**t), v / (1 - 0.999**t), noise / (1 - 0.999**t)
        y = v_hat / d
        root = np.maximum(np.sqrt(v_hat * y / (y + NOISE)), np.abs(m_hat) / LARGEST_MOVE)
        root = np.minimum(root, np.sqrt(v_hat))
        expected[:] -= RATE * (m_hat / (root + 1e-8) + 0.1 * expected)
        original(optimizer, gradient, samples, out)

    optimizer.update = update
    train(learner, 12)
    learner.finish()
    assert len(seen) == 12 and min(seen) > 0
    assert len(set(comm.allgather_object(tuple(seen)))) == 1
    same_on_all_ranks(comm, learner.parameters.flat)
    np.testing.assert_allclose(learner.parameters.flat, expected, rtol=1e-3, atol=1e-5)


def test_the_steps_are_those_of_the_messages(comm):
    """The mean square, over all values, of what multiples the sum is made of."""
    learner = learner_of(comm, gradient_bits=1)
    train(learner, 1)
    square, _ = learner.state.exchange.quantization()
    vector = np.zeros(N, np.float32)
    vector[:] = gradient_of(comm.rank, 0, N)
    learner.state.exchange.sum(vector)
    changed, _ = learner.state.exchange.quantization()
    assert changed != square
    smallest = np.abs(vector[vector != 0]).min()
    assert smallest**2 / 4 < changed <= np.abs(vector).max() ** 2


@pytest.mark.parametrize("bits", [4, 16, 32])
def test_nothing_changes_where_nothing_is_quantized_in_steps(comm, bits):
    learner = learner_of(comm, gradient_bits=bits)
    train(learner, 3)
    assert learner.local_step.state.noise == 0
    assert learner.state.exchange.quantization() is None


def test_values_with_32_bits_of_their_own_have_plain_adam(comm):
    learner = learner_of(comm, gradient_bits=1, bits_of={"b": 32})
    plain = learner_of(comm)
    for one in (learner, plain):
        train(one, 5)
    assert np.array_equal(learner.parameters["b"], plain.parameters["b"])
    assert not np.array_equal(learner.parameters["W"], plain.parameters["W"])
    assert learner.local_step.state.noise > 0


def test_small_values_move_further(comm):
    """Values of a fraction of a step, which plain Adam moves by a tenth of what 32 bits do."""
    moved = {}
    for name, bits in (("32 bits", 32), ("corrected", 0.5), ("plain", 0.5)):
        learner = learner_of(comm, Adam(lr=RATE), gradient_bits=bits)
        if name == "plain":
            learner.state.exchange.quantization = lambda: None
        sizes = np.repeat([1, 0.1], [9000, N - 9000]).astype(np.float32)
        drift = np.sign(gradient_of(9, 0, N))
        for step in range(200):
            learner.gradient.flat[:] = sizes * (gradient_of(comm.rank, step, N) + drift)
            learner.step(1)
        moved[name] = np.abs(learner.parameters.flat[9100:]).mean()
    assert moved["corrected"] > 2.5 * moved["plain"]
    assert moved["plain"] < 0.3 * moved["32 bits"]
    assert moved["corrected"] < 3 * moved["32 bits"]


def test_a_checkpoint_has_the_noise(comm, tmp_path):
    folder = shared(comm, tmp_path)
    whole, first = (learner_of(comm, gradient_bits=0.5) for _ in range(2))
    train(whole, 8)
    train(first, 4)
    Checkpoints(folder).save(first)
    second = learner_of(comm, gradient_bits=0.5)
    load_checkpoint(second, folder)
    assert second.local_step.state.noise == first.local_step.state.noise > 0
    train(second, 4, first=4)
    assert np.array_equal(second.parameters.flat, whole.parameters.flat)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_pytorchs_adam_is_corrected_likewise(comm, monkeypatch, kind):
    # Gradients of other units have other bits, by which a sample, or one of two steps, is chosen.
    monkeypatch.setattr(step_search, "_any_number", lambda pairs: 0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(60, 80), torch.nn.Tanh(), torch.nn.Linear(80, 9))
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
            learner.state.exchange.quantization = lambda: None
        for x, y in batches:
            torch.nn.functional.cross_entropy(own(x), torch.from_numpy(y)).backward()
            learner.step(len(x))
        trained[name] = learner.parameters.flat.copy()
        same_on_all_ranks(comm, trained[name])
        learner.close()
    apart = np.abs(trained["uncorrected"] - trained["ours"]).mean()
    assert np.abs(trained["pytorch"] - trained["ours"]).mean() < 0.2 * apart
