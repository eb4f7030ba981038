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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import parallel_sgd as psgd
from parallel_sgd import Communicator, Learner, UserError, simulate
from parallel_sgd.array_files import flushed, write_arrays
from parallel_sgd.training import MANIFEST, capture, flatten
from parallel_sgd.training.checkpoint.files import CHECKSUM_FIELD

MUTATIONS = int(os.environ.get("PARALLEL_SGD_FUZZ", "15"))  #: of each algorithm and document

TABLE = psgd.Embedding(name="t", width=2, optimizer=psgd.Adagrad(lr=0.1), entry_count=2)

ALGORITHMS: dict[str, psgd.Algorithm[Any]] = {
    "1 bit": psgd.DataParallelSGD(gradient_bits=1),
    "DiLoCo, overlap": psgd.DiLoCo(sync_steps=2, overlap_samples=3, gradient_bits=1),
    "parameter servers": psgd.DataParallelASGD(servers=0, sync_steps=2, tables=(TABLE,)),
}

PYTORCH = "PyTorch"  #: a model of its own, on one rank: threads share PyTorch's generator

pytestmark = [
    pytest.mark.filterwarnings("ignore:servers=0"),
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
]


def learner_of(name: str, comm: Communicator) -> Learner:
    if name == PYTORCH:
        return torch_learner(comm)
    parameters = psgd.Parameters({"w": np.ones((4, 3), np.float32), "b": np.ones(1, np.float32)})
    return Learner(parameters, psgd.Adam(lr=0.1), ALGORITHMS[name], comm)


def torch_learner(comm: Communicator) -> Any:
    """With everything that a model can remember beside its parameters."""
    import torch

    class Called(torch.nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

        def get_extra_state(self) -> Any:
            return {"calls": self.calls, "latest": torch.tensor([0.5])}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"] if isinstance(state, dict) else 0

    torch.manual_seed(5)
    model = torch.nn.Sequential(Called(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    return psgd.torch.Learner(model, psgd.Adam(lr=0.1), psgd.DataParallelSGD(), comm, scaler=scaler)


def train(learner: Any, steps: int) -> None:
    for step in range(steps):
        if hasattr(learner, "model"):
            import torch

            learner.scaled(
                learner.model(torch.ones(2, 3) * (step + learner.comm.rank)).sum()
            ).backward()
            learner.step(samples=2)
            continue
        learner.gradient.flat[:] = np.sin(step + learner.comm.rank + np.arange(13))
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


def cases() -> list[Any]:
    """Each algorithm, the ranks that write a checkpoint, and those that load it."""
    ranks = [(1, 1), (1, 2), (2, 1)]
    cases = [(name, *some) for name in ALGORITHMS for some in ranks]
    return [*cases, (PYTORCH, 1, 1), (PYTORCH, 2, 1)]


@pytest.mark.parametrize(("name", "writers", "ranks"), cases())
@pytest.mark.parametrize("document", ["manifest.json", "rank-{:05d}.json"])
def test_edited_documents(name, document, writers, ranks, tmp_path):
    """On as many ranks as have written it, and on others."""
    document = document.format(writers - 1)

    def save(comm: Communicator) -> None:
        learner = learner_of(name, comm)
        train(learner, 3)
        with psgd.Checkpoints(tmp_path / "right") as checkpoints:
            checkpoints.save(learner, extra={"note": [1, 2.5]})
        learner.close()

    simulate(writers, save)
    (right,) = (tmp_path / "right").iterdir()
    manifest = json.loads((right / MANIFEST).read_text())
    del manifest["sha256"]
    original = manifest if document == MANIFEST else json.loads((right / document).read_text())
    wrong = tmp_path / right.name
    shutil.copytree(right, wrong)
    (wrong / document).unlink()
    pick = random.Random(f"{name} {document} {writers} {ranks}")

    def edit() -> None:
        text = mutated(pick, original)
        if document == MANIFEST:
            with_checksum(wrong, text)
            return
        (wrong / document).write_text(text)
        manifest["files"][document] = flushed(wrong / document)
        with_checksum(wrong, manifest)

    assert refusals(name, ranks, wrong, [edit] * MUTATIONS) > MUTATIONS // 3


def refusals(name: str, ranks: int, folder: Path, edits: Sequence[Callable[[], None]]) -> int:
    """Load the checkpoint after each edit; return how often it was refused, with nothing changed.

    Learners that have refused a checkpoint are as before, so they try the next one. A state that is
    taken up means something, be it no longer that of a run. So training may then end with an error,
    also of one rank alone; new learners try the rest.
    """
    refused, tried = 0, 0
    in_a_row: list[int] = []
    taken_up: list[int] = []

    def refuse(comm: Communicator) -> None:
        learner = learner_of(name, comm)
        train(learner, 1)
        before = repr(everything(learner))
        for edit in edits[tried:]:
            if comm.rank == 0:
                edit()
            comm.barrier()
            try:
                psgd.load_checkpoint(learner, folder)
            except UserError as error:
                assert "\n" not in str(error)
                assert repr(everything(learner)) == before, str(error)
            else:
                taken_up.append(comm.rank)
                train(learner, 3)
                break
            comm.barrier()
            in_a_row.extend([tried] * (comm.rank == 0))
        learner.close()

    while tried < len(edits):
        in_a_row.clear()
        taken_up.clear()
        try:
            simulate(ranks, refuse, timeout_s=30)
        except UserError:
            if not taken_up:
                raise
        refused += len(in_a_row)
        tried += len(in_a_row) + bool(taken_up)
    return refused


def odd_arrays(array: np.ndarray) -> list[np.ndarray]:
    """Others in its place."""
    values = [np.zeros_like(array), np.ones_like(array), np.full_like(array, 7)]
    if array.dtype.kind == "f":
        values += [np.full_like(array, bad) for bad in (np.nan, np.inf, -1, 1e30)]
    else:
        limits = np.iinfo(array.dtype) if array.dtype.kind in "iu" else None
        values += [np.full_like(array, bad) for bad in (limits.min, limits.max)] if limits else []
    flat = array.reshape(-1)
    shapes = [flat[:0], flat[:-1], np.concatenate([flat, flat[:1]]), array.reshape(1, *array.shape)]
    dtypes = [array.astype(kind) for kind in (np.float64, np.float16, np.int64, bool)]
    return [np.ascontiguousarray(one) for one in [*values, *shapes, *dtypes]]


@pytest.mark.parametrize(("name", "writers", "ranks"), cases())
def test_edited_arrays(name, writers, ranks, tmp_path):
    """Each array in turn, with checksums made right: taken up, or refused and nothing changed.

    Other ranks than have written it try every fourth; 4 divides no number of `odd_arrays`, so all
    kinds are among these.
    """

    def save(comm: Communicator) -> None:
        learner = learner_of(name, comm)
        train(learner, 3)
        with psgd.Checkpoints(tmp_path / "right") as checkpoints:
            checkpoints.save(learner)
        learner.close()

    simulate(writers, save)
    (right,) = (tmp_path / "right").iterdir()
    manifest = json.loads((right / MANIFEST).read_text())
    del manifest["sha256"]
    file = right / f"rank-{writers - 1:05d}.safetensors"
    arrays = load_file(file)

    def write(edited: dict[str, np.ndarray]) -> None:
        file.unlink()
        manifest["files"][file.name] = write_arrays(file, edited)
        with_checksum(right, manifest)

    edits = [
        partial(write, {**arrays, key: odd})
        for key, array in arrays.items()
        for odd in odd_arrays(array)
    ]
    edits = edits if writers == ranks else edits[2::4]
    assert refusals(name, ranks, right, edits) > len(edits) // 3


def test_bits_that_were_measured_are_not_missing(tmp_path):
    with Communicator.single() as comm:
        algorithm = psgd.DataParallelSGD(gradient_bits="auto")
        parameters = psgd.Parameters({"w": np.ones(3, np.float32)})
        learner = Learner(parameters, psgd.SGD(lr=0.1), algorithm, comm)
        with psgd.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(learner)
        (path,) = tmp_path.iterdir()
        manifest = json.loads((path / MANIFEST).read_text())
        numbers = json.loads((path / "rank-00000.json").read_text())
        assert numbers["state"]["algorithm"]["exchange"]["bits"] is not None
        numbers["state"]["algorithm"]["exchange"]["bits"] = None
        (path / "rank-00000.json").write_text(json.dumps(numbers))
        manifest["files"]["rank-00000.json"] = flushed(path / "rank-00000.json")
        del manifest["sha256"]
        with_checksum(path, manifest)
        with pytest.raises(UserError, match="has bits=None, which these options do not use"):
            psgd.load_checkpoint(learner, path)
