"""Documents of a checkpoint that somebody has edited, with checksums made right again.

Whatever they say: a checkpoint is taken up, or refused in one line and then nothing has changed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd import Communicator, Learner, UserError, simulate
from parallel_sgd.array_files import flushed
from parallel_sgd.training.checkpoint_files import CHECKSUM_FIELD, MANIFEST
from parallel_sgd.training.state_tree import capture, flatten

MUTATIONS = int(os.environ.get("PARALLEL_SGD_FUZZ", "40"))  #: of each algorithm and document

TABLE = psgd.Embedding(name="t", width=2, optimizer=psgd.Adagrad(lr=0.1), entry_count=2)

ALGORITHMS: dict[str, psgd.Algorithm[Any]] = {
    "1 bit": psgd.DataParallelSGD(gradient_bits=1),
    "DiLoCo, overlap": psgd.DiLoCo(sync_steps=2, overlap_samples=3, gradient_bits=1),
    "parameter servers": psgd.DataParallelASGD(servers=0, sync_steps=2, tables=(TABLE,)),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:servers=0"),
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
]


def learner_of(name: str, comm: Communicator) -> Learner:
    parameters = psgd.Parameters({"w": np.ones((4, 3), np.float32), "b": np.ones(1, np.float32)})
    return Learner(parameters, psgd.Adam(lr=0.1), ALGORITHMS[name], comm)


def train(learner: Learner, steps: int) -> None:
    for step in range(steps):
        learner.gradient.flat[:] = np.sin(step + np.arange(13))
        learner.step(samples=2)
        for table in learner.tables.values():
            table.push(np.arange(3), np.ones((3, 2), np.float32), samples=1)


def everything(learner: Learner) -> Any:
    tree, arrays = flatten(capture(learner))
    counts = [table.counts() for table in learner.tables.values()]
    return tree, {name: array.tobytes() for name, array in arrays.items()}, counts


#: In the place of any value.
ODD: tuple[Callable[[random.Random, Any], Any], ...] = (
    lambda go, old: None,
    lambda go, old: go.choice([-1, 0, 1, 2, 3, 7, 10**6, 2**31, 2**63, 10**30, -(2**63)]),
    lambda go, old: go.choice([0.5, -0.5, 1e308, float("nan"), float("inf"), 1e-320]),
    lambda go, old: go.choice(["", "x", "0", "parameters", "../x.json", "\x00", "float32", "é"]),
    lambda go, old: go.choice([[], [[]], ["parameters"], [1], ["optimizer.buffers.m"], ["no"]]),
    lambda go, old: go.choice([{}, {"a": 1}, {"0": 1}, {"name": "SGD", "options": {}}]),
    lambda go, old: go.choice([True, False]),
    lambda go, old: [old],
    lambda go, old: {"x": old},
    lambda go, old: old + go.choice([-1, 1, 5]) if isinstance(old, int | float) else old,
    lambda go, old: old[:-1] if isinstance(old, str | list) else old,
)


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every container of a document with every key of it."""
    pairs: list[tuple[Any, Any]] = []
    rest = [document]
    while rest:
        container = rest.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            pairs.append((container, key))
            if isinstance(value, dict | list):
                rest.append(value)
    return pairs


def mutated(go: random.Random, document: Any) -> str:
    """Its text, with one to three places changed."""
    document = copy.deepcopy(document)
    for _ in range(go.choice([1, 1, 1, 2, 3])):
        pairs = places(document)
        if not pairs:
            break
        holder, key = go.choice(pairs)
        match go.randrange(4):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[go.choice(["x", key + "x", "parameters", "0"])] = holder.pop(key)
            case 2:
                other, place = go.choice(pairs)
                holder[key] = copy.deepcopy(other[place])
            case _:
                holder[key] = go.choice(ODD)(go, holder[key])
    if go.random() < 0.02:
        return "[" * 100_000
    return json.dumps(document, indent=1)


def with_checksum(checkpoint: Path, manifest: Any) -> None:
    body = (manifest if isinstance(manifest, str) else json.dumps(manifest, indent=1)).rstrip()
    body = body.removesuffix("}").rstrip() + CHECKSUM_FIELD
    checksum = hashlib.sha256(body.encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(f'{body}{checksum}"\n}}\n')


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("document", ["manifest.json", "rank-00000.json"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_edited_documents(name, document, ranks, tmp_path):
    """On as many ranks as have written it (one), and on others."""

    def save(comm: Communicator) -> None:
        learner = learner_of(name, comm)
        train(learner, 3)
        with psgd.Checkpoints(tmp_path / "right") as checkpoints:
            checkpoints.save(learner, extra={"note": [1, 2.5]})
        learner.close()

    simulate(1, save)
    (right,) = (tmp_path / "right").iterdir()
    manifest = json.loads((right / MANIFEST).read_text())
    del manifest["sha256"]
    original = manifest if document == MANIFEST else json.loads((right / document).read_text())
    wrong = tmp_path / right.name
    shutil.copytree(right, wrong)
    (wrong / document).unlink()
    pick = random.Random(f"{name} {document} {ranks}")

    def edit() -> None:
        text = mutated(pick, original)
        if document == MANIFEST:
            with_checksum(wrong, text)
            return
        (wrong / document).write_text(text)
        manifest["files"][document] = flushed(wrong / document)
        with_checksum(wrong, manifest)

    def body(comm: Communicator) -> int:
        learner, refused = learner_of(name, comm), 0
        train(learner, 1)
        for number in range(MUTATIONS):
            comm.barrier()
            if comm.rank == 0:
                edit()
            comm.barrier()
            before = everything(learner)
            try:
                psgd.load_checkpoint(learner, wrong)
            except UserError as error:
                assert "\n" not in str(error)
                assert repr(everything(learner)) == repr(before), f"{number}: {error}"
                refused += 1
            else:  # a state that means something, be it another one
                with suppress(UserError):  # no longer that of a run
                    train(learner, 3)
                learner.close()
                learner = learner_of(name, comm)
                train(learner, 1)
        learner.close()
        return refused

    refused = simulate(ranks, body, timeout_s=30)[0]
    assert refused > MUTATIONS // 3
