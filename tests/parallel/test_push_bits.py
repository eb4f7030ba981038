"""Bits of pushes that change by samples, differ by parameter, or are measured; nothing is lost."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from cases import GATHERS, gradient_of, shared
from invariants import ROUNDING, same_bits, same_on_all_ranks
from test_choices import FREE, SLOW, measure_speeds, speeds

from parallel_sgd import (
    Checkpoints,
    Communicator,
    DataParallelASGD,
    Learner,
    Parameters,
    UserError,
    load_checkpoint,
)
from parallel_sgd.compression import auto_bits
from parallel_sgd.costs import Link, Measured, best_push_bits
from parallel_sgd.parameter_server import Rules, place

LAYOUT = {"W": (40, 30), "W.bias": (30,), "E[0]": (700,), "s": (3,)}
N = sum(int(np.prod(shape)) for shape in LAYOUT.values())
STEPS, SAMPLES = 10, 5
SWITCHES = {0: 32, 10: 4, 20: 1, 30: 8, 40: 32}  #: in samples of each worker

pytestmark = pytest.mark.filterwarnings("ignore:servers=0")


def learner_on(
    comm: Communicator, servers: int = 0, dtype: Any = np.float32, **options: Any
) -> Learner:
    parameters = Parameters({name: np.zeros(shape, dtype) for name, shape in LAYOUT.items()})
    if options.get("slice_parameters", True):
        options["min_block"] = 16
    options = {"sync_steps": 1, **options}
    return Learner(parameters, GATHERS, DataParallelASGD(servers=servers, **options), comm)


def train(learner: Learner, first: int, last: int) -> None:
    for step in range(first, last):
        learner.gradient.flat[:] = gradient_of(learner.comm.rank, step, N)
        learner.step(samples=SAMPLES)


def by_samples(workers: int) -> dict[int, float]:
    return {samples * workers: bits for samples, bits in SWITCHES.items()}


def pulled(learner: Learner) -> np.ndarray:
    """The model on the servers, while nobody pushes."""
    learner.meet()
    client, model = learner.state.client, np.empty(N, np.float32)
    client.in_order(lambda: client.pull(model))
    learner.meet()
    return model


@pytest.mark.threads(3)
@pytest.mark.parametrize(
    ("options", "bits_of"),
    [
        ({}, {"*.bias": 32, "<100": 16}),
        ({"mode": "sync"}, {}),
        ({"pipeline": True}, {"E[0]": 8, "W": 2}),
        ({"sync_steps": 2}, {}),
    ],
)
def test_nothing_is_lost_where_the_bits_change(comm, options, bits_of):
    """What was applied and what is still owed are all gradients, after every push; and what few
    bits have lost is given back by 32 at last."""
    for servers in (0, min(1, comm.size - 1)):
        workers = comm.size - servers
        bits = {"gradient_bits": by_samples(workers), "bits_of": bits_of, "block_size": 64}
        learner = learner_on(comm, servers, **bits, **options)
        lost, inputs, period = [], np.zeros(N), learner.algorithm.sync_steps
        for step in range(0 if learner.serves else STEPS):
            assert learner.comm.size == workers
            train(learner, step, step + 1)
            inputs += sum(gradient_of(k, step, N).astype(float) for k in range(workers))
            if step % period == period - 1:
                model = pulled(learner)
                residuals = learner.comm.allgather_object(learner.state.residual)
                owed = np.sum(residuals, axis=0, dtype=float)
                bound = 8 * ROUNDING * STEPS * workers * max(1, np.abs(inputs).max())
                assert np.abs(owed - model - inputs).max() <= bound, step
                lost.append(bool(owed.any()))
        if not learner.serves:
            few = any(its < 32 for its in bits_of.values())
            assert lost[0] == lost[-1] == few
            assert any(lost)
        learner.finish()
        same_on_all_ranks(comm, learner.parameters.flat)


def test_a_schedule_goes_by_the_clock_before_the_step(comm):
    """As that of an exchange does."""
    learner = learner_on(comm, mode="sync", gradient_bits=by_samples(comm.size))
    sent = [0]
    for step in range(STEPS):
        train(learner, step, step + 1)
        sent.append(learner.state.client.statistics.bytes_sent)
    of_steps = np.diff(sent).tolist()
    if comm.size > 1:
        assert of_steps[0] == of_steps[1] == of_steps[8] == of_steps[9] > of_steps[6]
        assert of_steps[6] == of_steps[7] > of_steps[2] == of_steps[3] > of_steps[4] > 0
    learner.finish()


@pytest.mark.parametrize("places", [{}, {"placement": "hash"}, {"slice_parameters": False}])
def test_each_parameter_goes_on_as_if_all_had_its_bits(comm, places):
    """However it is cut. (Those of less than a block share levels with neighbours, but at 32.)"""

    def trained(**options: Any) -> Parameters:
        learner = learner_on(comm, mode="sync", **places, **options)
        train(learner, 0, 3)
        learner.finish()
        return learner.parameters

    mixed = trained(gradient_bits=4, bits_of={"*.bias": 32, "E[0]": 8}, block_size=64)
    assert same_bits(mixed["W"], trained(gradient_bits=4, block_size=64)["W"])
    assert same_bits(mixed["E[0]"], trained(gradient_bits=8, block_size=64)["E[0]"])
    assert same_bits(mixed["W.bias"], trained()["W.bias"])


def test_a_run_goes_on_bit_for_bit_over_a_switch(comm, tmp_path):
    folder, schedule = shared(comm, tmp_path), by_samples(comm.size)
    learners = [learner_on(comm, mode="sync", gradient_bits=schedule) for _ in range(2)]
    train(learners[0], 0, 3)
    Checkpoints(folder).save(learners[0], background=False)
    train(learners[0], 3, 7)
    load_checkpoint(learners[1], folder)
    train(learners[1], 3, 7)
    assert learners[1].state.residual.any()
    assert same_bits(learners[0].state.residual, learners[1].state.residual)
    for learner in learners:
        learner.finish()
    assert same_bits(learners[0].parameters.flat, learners[1].parameters.flat)


def test_the_last_push_goes_by_the_clock_at_the_end(comm):
    """Of a period that `finish` ends."""
    learner = learner_on(comm, sync_steps=2, gradient_bits={0: 32, SAMPLES * comm.size: 4})
    train(learner, 0, 1)
    learner.finish()
    assert learner.state.residual.any()


@pytest.mark.parametrize(
    ("bits", "bits_of", "fewest"), [(32, {"E[0]": 4}, 4), (8, {"*.bias": 32}, 8)]
)
def test_too_large_for_the_fewest_bits(comm, bits, bits_of, fewest):
    learner = learner_on(comm, mode="sync", gradient_bits=bits, bits_of=bits_of)
    learner.gradient.flat[:] = 1e31
    with pytest.raises(UserError, match=f"gradient is too large.* with gradient_bits={fewest}"):
        learner.step(samples=1)


def test_auto_takes_what_is_measured(comm, measurements, tmp_path):
    """Few bits on a slow link, and all where it is no limit. What is pulled goes over it, too."""
    measurements(measure_kernel_speeds=measure_speeds)
    comm.barrier()
    for link, expected in ((SLOW, 1), (FREE, 32)):
        measurements(measure_link=lambda comm, hosts, link=link: link)
        comm.barrier()
        options = {"mode": "sync", "gradient_bits": "auto", "bits_of": {"E[0]": 16}}
        learner = learner_on(comm, **options)
        bits = expected if comm.size > 1 else 32
        assert comm.allgather_object(learner.state.bits) == [bits] * comm.size
        assert learner.report()["gradient_bits"] == bits
        assert ("link" in learner.report()) == (comm.size > 1)
        alike = learner_on(comm, mode="sync", gradient_bits=bits, bits_of={"E[0]": 16})
        folder = shared(comm, tmp_path / str(expected))
        for one in (learner, alike):
            train(one, 0, 2)
        Checkpoints(folder).save(learner, background=False)
        load_checkpoint(learner, folder)
        for one in (learner, alike):
            train(one, 2, 3)
            one.finish()
        assert same_bits(learner.parameters.flat, alike.parameters.flat)
        comm.barrier()
    whole = learner_on(comm, dtype=np.float64, gradient_bits="auto")
    assert whole.state.bits == 32
    whole.finish()


def test_a_slice_has_the_bits_of_its_parameter():
    """By its parameter's name and size, whatever other names its own would match as a pattern."""
    rules = Rules(gradient_bits=4, bits_of={"E[0]": 8, "<500": 32})
    shapes = {"E[0]": (700,), "E03": (9,), "W": (600,), "b": (499,)}
    sizes = {name: shape[0] for name, shape in shapes.items()}
    of_parameters = {"E[0]": 8, "E03": 32, "W": 4, "b": 32}
    for slices in place(shapes, 2, min_block=16).servers:
        codec = rules.codec_of_part(4, slices, sizes)
        bits = {s.label: codec.codec_of(s.label, s.values).bits for s in slices}
        assert bits == {s.label: of_parameters[s.name] for s in slices}
    alone = rules.codec_of_part(2, place({"W": (600,)}, 1).servers[0], {"W": 600})
    assert alone.bits == 2


def test_a_short_push_has_all_bits():
    """Where latencies are all that it takes."""
    for values, bits in ((1000, 32), (10**6, 1)):
        late = Measured(8, 1, Link(1e-2, 1e8), speeds())
        assert best_push_bits(values, 4, late, auto_bits()) == bits


def test_more_workers_at_a_server_make_fewer_bits_worth_it():
    """Theirs go over its one link, while each encodes for itself."""
    chosen = [
        best_push_bits(10**6, workers, Measured(8, 1, SLOW, speeds(3e5)), auto_bits())
        for workers in (1, 1000)
    ]
    assert chosen[0] > chosen[1]


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({"bits_of": {"x*": 8}}, np.float32, "bits_of: 'x*' matches no parameter of W (1200 va"),
        ({"bits_of": {"s": 8}}, np.float64, "bits_of['s']=8 needs float32 parameters, but these"),
        ({"gradient_bits": {0: 32, 9: 4}}, np.float64, "gradient_bits=4 needs float32"),
    ],
)
def test_what_does_not_go_with_the_parameters(comm, options, dtype, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        learner_on(comm, dtype=dtype, **options)
