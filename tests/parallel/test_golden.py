"""What training gave before: the model's bits after every step, for every algorithm, codec and
transport.

`golden.json` has a digest for each. It is written anew, after a change that is meant to change
results, by ``python tests/parallel/test_golden.py`` (on threads; MPI must give the same).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd.schedules import Linear, Steps

RANKS = 3
STEPS = 9
GOLDEN = Path(__file__).with_name("golden.json")

LAYOUT = {"W": (40, 30), "b": (30,), "e": (700,), "s": (3,)}
LONG = {"w": (600_000,), "b": (700,)}  # several pieces for each owner

MOMENTUM = psgd.MomentumSGD(lr=0.02, momentum=0.9)
NESTEROV = psgd.NesterovSGD(lr=Linear({0: 0.0, 40: 0.03}), momentum=0.8)
SGD = psgd.SGD(lr=Steps({0: 0.1, 60: 0.05}))
ADAM = psgd.Adam(lr=0.01, weight_decay=0.1)
ADAGRAD = psgd.Adagrad(lr=0.05)

Case = tuple[Any, psgd.Optimizer]

CODECS: dict[str, dict[str, Any]] = {
    "32 bits": {},
    "float16": {"gradient_bits": 16},
    "bfloat16": {"gradient_bits": 16, "half_format": "bfloat16"},
    "8 bits": {"gradient_bits": 8},
    "4 bits": {"gradient_bits": 4},
    "half a bit": {"gradient_bits": 0.5},
    "1 bit": {"gradient_bits": 1, "code": "sign"},
    "1 bit, mean": {"gradient_bits": 1, "code": "sign", "threshold": "mean"},
    "1 bit, no feedback": {"gradient_bits": 1, "code": "sign", "error_feedback": False},
    "from 32 to 1": {"gradient_bits": {0: 32, 20: 4, 45: 1}, "code": "sign"},
}
NAMES = {32: "32 bits", 4: "4 bits", 1: "1 bit"}
TRANSPORTS: dict[str, dict[str, Any]] = {
    "collective": {"transport": "collective"},
    "pipelined": {"transport": "pipelined"},
    "hosts": {"transport": "pipelined", "hierarchical": True},
}
OVERLAPS: dict[str, dict[str, Any]] = {
    "": {},
    "overlap": {"overlap": True},
    "double buffering": {"double_buffering": True},
}
CUT: dict[str, Any] = {"block_size": 64, "bucket_values": 500}


def data_parallel() -> Iterator[tuple[str, Case]]:
    optimizers = [SGD, MOMENTUM, NESTEROV, ADAM, ADAGRAD]
    for i, (codec, bits) in enumerate(CODECS.items()):
        for transport, sent in TRANSPORTS.items():
            for overlap, when in OVERLAPS.items():
                if transport == "hosts" and overlap:
                    continue
                algorithm = psgd.DataParallelSGD(**CUT, **bits, **sent, **when)
                optimizer = optimizers[i % len(optimizers)]
                name = ", ".join(filter(None, ["data-parallel", codec, transport, overlap]))
                yield name, (algorithm, optimizer)
    for bits in (32, 1):
        codec = CODECS[NAMES[bits]]
        warm = psgd.DataParallelSGD(**CUT, **codec, distributed_after=25)
        yield f"data-parallel, warm start, {bits} bits", (warm, MOMENTUM)
        for transport in ("collective", "pipelined"):
            long = psgd.DataParallelSGD(**codec, transport=transport)
            yield f"data-parallel, long, {bits} bits, {transport}", (long, MOMENTUM)


OUTER: dict[str, Case] = {
    "averaging": (psgd.ModelAveragingSGD(sync_period=9, **CUT), MOMENTUM),
    "averaging, zeroed": (
        psgd.ModelAveragingSGD(sync_steps=2, inner_state="zero", **CUT),
        ADAM,
    ),
    "averaging, averaged": (
        psgd.ModelAveragingSGD(sync_steps=3, inner_state="average", **CUT),
        NESTEROV,
    ),
    "block momentum": (psgd.BlockMomentumSGD(sync_steps=2, **CUT), MOMENTUM),
    "block momentum, time constant": (
        psgd.BlockMomentumSGD(block_samples=20, block_momentum_as_time_constant=30.0, **CUT),
        SGD,
    ),
    "block momentum, classical": (
        psgd.BlockMomentumSGD(
            sync_period=6,
            block_momentum=0.5,
            block_learning_rate=0.8,
            use_nesterov_momentum=False,
            reset_sgd_momentum=False,
            **CUT,
        ),
        MOMENTUM,
    ),
    "CNTK": (psgd.CNTKBlockMomentumSGD(sync_steps=3, **CUT), MOMENTUM),
    "CNTK, classical": (
        psgd.CNTKBlockMomentumSGD(
            sync_steps=2, use_nesterov_momentum=False, block_momentum=0.4, **CUT
        ),
        SGD,
    ),
    "SlowMo": (psgd.SlowMo(sync_steps=2, inner_state="zero", **CUT), MOMENTUM),
    "DiLoCo": (psgd.DiLoCo(sync_steps=3, **CUT), ADAM),
}


def local_updates() -> Iterator[tuple[str, Case]]:
    for name, (algorithm, optimizer) in OUTER.items():
        for codec in ("32 bits", "4 bits", "1 bit"):
            for transport in ("collective", "pipelined"):
                changed = replace(algorithm, **CODECS[codec], **TRANSPORTS[transport])
                yield f"{name}, {codec}, {transport}", (changed, optimizer)
        late = replace(algorithm, gradient_bits=4, overlap_samples=5)
        yield f"{name}, 4 bits, overlap", (late, optimizer)
    merged = replace(OUTER["DiLoCo"][0], overlap_samples=30, merge_weight=0.25)
    yield "DiLoCo, merged", (merged, ADAM)
    hosts = replace(OUTER["block momentum"][0], **CODECS["1 bit"], **TRANSPORTS["hosts"])
    yield "block momentum, 1 bit, hosts", (hosts, MOMENTUM)
    warm = replace(OUTER["block momentum"][0], distributed_after=25)
    yield "block momentum, warm start", (warm, MOMENTUM)
    bits = replace(OUTER["averaging"][0], **CODECS["from 32 to 1"])
    yield "averaging, from 32 to 1", (bits, MOMENTUM)


PUSHES: dict[str, dict[str, Any]] = {
    "gradients": {"sync_steps": 1},
    "of several steps": {"sync_steps": 2},
    "of a period": {"sync_period": 5},
    "model updates": {"sync_steps": 2, "currency": "deltas"},
    "pipeline": {"sync_steps": 1, "pipeline": True},
    "pipeline, model updates": {"sync_steps": 2, "pipeline": True, "currency": "deltas"},
    "ramp": {"sync_steps": 1, "ramp_minibatches": 2, "ramp": "linear"},
    "staircase": {"sync_steps": 2, "ramp_minibatches": 3, "currency": "deltas"},
    "other merge": {"sync_steps": 1, "merge": "sum"},
}


def asynchronous() -> Iterator[tuple[str, Case]]:
    optimizers = [SGD, MOMENTUM, ADAM]
    for i, (push, options) in enumerate(PUSHES.items()):
        for bits in (32, 4, 1):
            given = {**options, **CODECS[NAMES[bits]], "min_block": 16}
            given |= {} if bits == 32 else {"block_size": 64}
            for servers in (0, 1):
                algorithm = psgd.DataParallelASGD(mode="sync", servers=servers, **given)
                name = f"async, sync, {push}, {bits} bits, {servers} servers"
                yield name, (algorithm, optimizers[i % 3])
    # One worker alone makes every mode repeat.
    for mode in ("async", "bounded", "geo"):
        for bits in (32, 1):
            alone = psgd.DataParallelASGD(
                mode=mode, servers=2, sync_steps=2, min_block=16, **CODECS[NAMES[bits]]
            )
            yield f"async, {mode}, {bits} bits, one worker", (alone, MOMENTUM)
    late = psgd.DataParallelASGD(
        servers=2, sync_steps=1, delay_compensation=0.5, pipeline=True, placement="hash"
    )
    yield "async, delay compensation, one worker", (late, SGD)


CASES: dict[str, Case] = dict([*data_parallel(), *local_updates(), *asynchronous()])


def samples_of(rank: int, step: int) -> int:
    """Uneven, sometimes none; nobody has any in step 4."""
    return 0 if step == 4 else (3, 1, 0, 2, 4)[(2 * rank + step) % 5]


def fill_gradient(learner: psgd.Learner, rank: int, step: int, samples: int) -> None:
    """Of samples that pull each value to a centre with a stiffness: nothing here is rounded in
    another way on another processor."""
    x = learner.parameters.flat
    gradient = learner.gradient.flat
    gradient.fill(0)
    random = np.random.default_rng([31, rank, step])
    for _ in range(samples):
        stiffness = random.integers(2, 7, x.size).astype(x.dtype) / 4
        centre = random.integers(-512, 512, x.size).astype(x.dtype) / 256 + rank
        gradient += stiffness * (x - centre)


def trajectory(comm: psgd.Communicator, name: str) -> list[str]:
    """A digest of all ranks' models, and of what they have in common, after every step and at the
    end."""
    algorithm, optimizer = CASES[name]
    if getattr(algorithm, "hierarchical", False) is True:
        comm._hosts = ["a", "a", "b"]
    layout = LONG if "long" in name else LAYOUT
    steps = 3 if "long" in name else STEPS
    parameters = psgd.Parameters({k: np.zeros(v, np.float32) for k, v in layout.items()})
    parameters.flat[:] = (np.arange(parameters.flat.size) % 97 - 48) / 32
    digests = []
    try:
        with psgd.Learner(parameters, optimizer, algorithm, comm) as learner:
            for step in [] if learner.serves else range(steps):
                ranks = learner.comm.size if learner.distributed else 1
                rank = learner.comm.rank if learner.distributed else 0
                counts = [samples_of(k, step) for k in range(ranks)]
                fill_gradient(learner, rank, step, counts[rank])
                learner.announce(counts[rank], sum(counts))
                if counts[rank]:
                    for parameter in reversed(parameters.names):
                        learner.ready(parameter)
                learner.step(samples=counts[rank])
                digests.append(own_digest(learner))
            learner.finish()
            digests.append(own_digest(learner))
    finally:
        comm._hosts = None
    everywhere = comm.allgather_object(digests)
    steps = max(map(len, everywhere))  # servers see the end alone
    rows = zip(*([""] * (steps - len(own)) + own for own in everywhere), strict=True)
    return [hashlib.sha256("".join(row).encode()).hexdigest()[:8] for row in rows]


def own_digest(learner: psgd.Learner) -> str:
    digest = hashlib.sha256(learner.parameters.flat.tobytes())
    with learner.shared_model():
        digest.update(learner.parameters.flat.tobytes())
    return digest.hexdigest()


#: In the names of what is repeated over MPI: each algorithm, transport and overlap, with one codec
#: at least. `test_exchange` and `test_transports` have the sums of every codec there.
ON_MPI = ("1 bit", "data-parallel, 32 bits", "4 bits, overlap", "merged", "compensation")


def on_mpi(name: str) -> Any:
    """A case, with the number of ranks that it is recorded for, or none, as its mark."""
    ranks = [RANKS] if any(part in name for part in ON_MPI) else []
    return pytest.param(name, marks=pytest.mark.ranks(*ranks))


@pytest.mark.messages
@pytest.mark.threads(RANKS)
@pytest.mark.filterwarnings("ignore:servers=0")
@pytest.mark.parametrize("name", [on_mpi(name) for name in CASES])
def test_every_step_has_the_bits_that_it_had(comm, name):
    assert trajectory(comm, name) == json.loads(GOLDEN.read_text())[name]


def test_every_case_is_recorded():
    assert CASES.keys() == json.loads(GOLDEN.read_text()).keys()


if __name__ == "__main__":
    digests = {name: psgd.simulate(RANKS, lambda c, n=name: trajectory(c, n))[0] for name in CASES}
    lines = (f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in digests.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
