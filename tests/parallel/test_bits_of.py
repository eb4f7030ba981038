"""Bits of their own for some parameters: each part of a gradient travels as if it were alone."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from cases import BLOCK_SIZE, GATHERS, gradient_of, shared, zeros
from invariants import keeps_residuals_when_bits_change, same_bits, same_on_all_ranks

from parallel_sgd import (
    Checkpoints,
    Communicator,
    DataParallelSGD,
    Learner,
    ModelAveragingSGD,
    Parameters,
    UserError,
    load_checkpoint,
)

#: Of at least a block where levels are shared, so that none shares them with neighbours.
SIZES = {"a": 1200, "a.bias": 31, "E": 700, "d": 129, "d.bias": 3, "e": 64}
STEPS = 5

every_transport = pytest.mark.parametrize("transport", ["collective", "pipelined"])


def learner_of(comm: Communicator, names: list[str], **options: Any) -> Learner:
    parameters = Parameters({name: np.zeros(SIZES[name], np.float32) for name in names})
    algorithm = DataParallelSGD(block_size=BLOCK_SIZE, bucket_values=300, **options)
    return Learner(parameters, GATHERS, algorithm, comm)


def train(learner: Learner, step: int, *, tell: bool = False) -> None:
    whole = gradient_of(learner.comm.rank, step, sum(SIZES.values()))
    places = dict(zip(SIZES, np.split(whole, np.cumsum([*SIZES.values()])), strict=False))
    for name in reversed(learner.gradient.names):
        learner.gradient[name] = places[name]
        if tell:
            learner.ready(name)
    learner.step(samples=1 + learner.comm.rank)


@every_transport
@pytest.mark.parametrize("of_biases", [32, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_each_part_has_the_bits_of_its_own_exchange(comm, transport, of_biases, overlap):
    """Also residuals, which show in the sums of later steps; and as many bytes are sent."""
    way = {"transport": transport}
    bits_of = {"*.bias": of_biases, "E": 8}
    of_others = {"gradient_bits": 1, "code": "sign"}
    mixed = learner_of(comm, [*SIZES], **way, **of_others, bits_of=bits_of, overlap=overlap)
    alone = {
        bits: learner_of(comm, names, **way, **({"gradient_bits": bits} if bits > 1 else of_others))
        for bits, names in ((of_biases, ["a.bias", "d.bias"]), (8, ["E"]), (1, ["a", "d", "e"]))
    }
    for step in range(STEPS):
        train(mixed, step, tell=overlap)
        same_on_all_ranks(comm, mixed.parameters.flat)
        for learner in alone.values():
            train(learner, step)
            for name, values in learner.parameters.items():
                assert same_bits(values, mixed.parameters[name]), name
    payload = 0
    for bits, learner in alone.items():
        codec = learner.algorithm.exchange.codec(bits)
        payload += codec.blocks(learner.parameters).bytes.stop
    payload += 4 if of_biases == 16 else 0  # 31 and 3 values of 2 bytes begin and end with 4
    sent = sum(comm.allgather_object(mixed.bytes_sent))
    assert sent == 2 * (comm.size - 1) * payload * STEPS


@every_transport
def test_nothing_is_lost_where_the_other_bits_change(on_ranks, transport):
    """Blocks and stripes stay as they are, also where all have the same bits in the end."""
    schedule = {0: 4, 10: 1, 20: 8, 30: 32}
    options = {"bits_of": {"b": 32}, "block_size": 1000, "transport": transport}

    def body(comm: Communicator) -> None:
        by_samples = {samples * comm.size: bits for samples, bits in schedule.items()}
        keeps_residuals_when_bits_change(comm, by_samples, **options)

    on_ranks(body)


def test_local_updates_have_them_too(comm):
    """Where models are averaged, a bias is averaged in full precision."""
    algorithm = ModelAveragingSGD(
        sync_steps=1, gradient_bits=2, bits_of={"b": 32}, block_size=BLOCK_SIZE
    )
    exact = ModelAveragingSGD(sync_steps=1)
    few, full = (Learner(zeros("matrix and bias"), GATHERS, a, comm) for a in (algorithm, exact))
    for step in range(3):
        for learner in (few, full):
            learner.gradient.flat[:] = gradient_of(comm.rank, step, learner.gradient.flat.size)
            learner.step(samples=2)
    np.testing.assert_array_equal(few.parameters["b"], full.parameters["b"])
    assert not np.array_equal(few.parameters["W"], full.parameters["W"])


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({"bits_of": {"x*": 8}}, np.float32, "bits_of: 'x*' matches no parameter of W (1200 va"),
        ({"bits_of": {"*": 8, "b": 4}}, np.float32, "bits_of: 'b' has no effect: patterns before"),
        (
            {"bits_of": {"b": 8}},
            np.float64,
            "bits_of['b']=8 needs float32 parameters, but these are float64; use 32 (full",
        ),
        ({"bits_of": {"b": 32}, "gradient_bits": 4}, np.float64, "gradient_bits=4 needs float32"),
    ],
)
def test_what_does_not_go_with_the_parameters(comm, options, dtype, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        Learner(zeros("matrix and bias", dtype), GATHERS, DataParallelSGD(**options), comm)


def test_float64_travels_whole(comm):
    """Also where "auto" would choose bits, if it could."""
    learners = [
        Learner(zeros("matrix and bias", np.float64), GATHERS, DataParallelSGD(**options), comm)
        for options in ({}, {"bits_of": {"b": 32}}, {"gradient_bits": "auto", "bits_of": {"b": 32}})
    ]
    for learner in learners:
        n = learner.gradient.flat.size
        learner.gradient.flat[:] = gradient_of(comm.rank, 0, n, np.float64)
        learner.step(samples=1)
        np.testing.assert_array_equal(learner.parameters.flat, learners[0].parameters.flat)


def test_too_large_for_the_fewest_bits(comm):
    learner = learner_of(comm, [*SIZES], bits_of={"E": 4})
    learner.gradient.flat[:] = 1e31
    with pytest.raises(UserError, match=r"^the gradient is too large.* with gradient_bits=4"):
        learner.step(samples=1)


def test_a_checkpoint_of_other_bits_is_refused(comm, tmp_path):
    folder = shared(comm, tmp_path)
    learner = learner_of(comm, ["a", "E"], gradient_bits=1)
    Checkpoints(folder).save(learner, background=False)
    other = learner_of(comm, ["a", "E"], gradient_bits=1, bits_of={"E": 32})
    with pytest.raises(UserError, match=r"it was bits_of=\{\}, and is \{'E': 32\} \(on rank"):
        load_checkpoint(other, folder)
