"""What is damaged or partial is refused, and changes nothing; a kill leaves what was good."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd import Communicator, Learner, UserError
from parallel_sgd.array_files import flushed
from parallel_sgd.state import across, workspace
from parallel_sgd.training import (
    LOCK,
    FolderLock,
    Progress,
    capture,
    checkpoints_in,
    flatten,
    restore,
    unflatten,
)
from parallel_sgd.training.checkpoint import files as checkpoint_files
from parallel_sgd.training.session.state import SessionState

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def learner_of() -> Learner:
    parameters = psgd.Parameters({"w": np.zeros((2, 3), np.float32)})
    algorithm = psgd.DiLoCo(sync_steps=2, gradient_bits=1)
    return Learner(parameters, psgd.Adam(lr=0.1), algorithm, Communicator.single())


def train(learner: Learner, steps: int) -> Learner:
    for _ in range(steps):
        learner.gradient.flat[:] = np.sin(learner.samples + learner.comm.rank + np.arange(6))
        learner.step(samples=2)
    return learner


def everything(learner: Learner) -> tuple[Any, dict[str, bytes]]:
    tree, arrays = flatten(capture(learner))
    return tree, {name: array.tobytes() for name, array in arrays.items()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoints = psgd.Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(train(learner_of(), 3), extra={"epoch": 1}, background=False)
    path = checkpoints.latest()
    assert path is not None
    return path


def test_the_files_are_plain(saved):
    """Anybody can read them: safetensors and JSON, and a manifest with checksums."""
    from safetensors.numpy import load_file

    tensors = load_file(saved / "rank-00000.safetensors")
    numbers = json.loads((saved / "rank-00000.json").read_text())
    manifest = json.loads((saved / "manifest.json").read_text())
    assert {p.name for p in saved.iterdir()} == {*manifest["files"], "manifest.json"}
    assert np.array_equal(tensors["parameters"], train(learner_of(), 3).parameters.flat)
    assert tensors["algorithm.exchange.residuals.worker_error"].shape == (6,)
    assert numbers["state"]["optimizer"] == {
        "buffers": {"m": ["optimizer.buffers.m"], "v": ["optimizer.buffers.v"]},
        "steps": 3,
        "samples": 6,
        "correction": {},
    }
    assert numbers["extra"] == {"epoch": 1}
    assert (manifest["samples"], manifest["ranks"], manifest["format"]) == (6, 1, 4)
    assert manifest["layout"] == {"w": [2, 3]}
    assert manifest["parallel_sgd"] == psgd.__version__
    for name, facts in manifest["files"].items():
        data = (saved / name).read_bytes()
        assert facts == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def damages(data: bytes) -> Any:
    """Every truncation, and flips of single bits at every twentieth byte and some more."""
    for size in range(len(data)):
        yield f"cut to {size} bytes", data[:size]
    pick = random.Random(0)
    for at in [*range(0, len(data), 20), *(pick.randrange(len(data)) for _ in range(60))]:
        bit = pick.randrange(8)
        yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    yield "a byte more", data + b"\n"
    yield "zeros", bytes(len(data))


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.json", "rank-00000.safetensors"])
def test_every_truncation_and_flipped_bits_are_refused(saved, name):
    learner = train(learner_of(), 1)
    before, whole = everything(learner), (saved / name).read_bytes()
    count = 0
    for what, data in damages(whole):
        (saved / name).unlink()  # to write it over could flush it to the disk each time
        (saved / name).write_bytes(data)
        with pytest.raises(UserError) as caught:
            psgd.load_checkpoint(learner, saved)
        line = str(caught.value)
        assert "\n" not in line and repr(str(saved)) in line and name in line, what
        assert everything(learner) == before, what
        count += 1
    assert count > 100
    (saved / name).unlink()
    with pytest.raises(UserError, match=name):
        psgd.load_checkpoint(learner, saved)
    (saved / name).write_bytes(whole)
    psgd.load_checkpoint(learner, saved)
    assert everything(learner) == everything(train(learner_of(), 3))


def rewritten(
    path: Path,
    version: int,
    extra: str = "null",
    change: Callable[[Any, Any], object] = lambda numbers, manifest: None,
) -> None:
    """Make a checkpoint of one rank one of a format, with this JSON as its `extra`."""
    numbers = path / "rank-00000.json"
    document = json.loads(numbers.read_text())
    document["extra"] = json.loads(extra)
    manifest = json.loads((path / "manifest.json").read_text())
    change(document, manifest)
    numbers.write_text(json.dumps(document, indent=1) + "\n")
    manifest["format"] = version
    manifest["files"][numbers.name] = flushed(numbers)
    del manifest["sha256"]
    (path / "manifest.json").unlink()
    shutil.move(path, path.with_name("part"))
    checkpoint_files.publish(path.with_name("part"), path, manifest)


@pytest.mark.parametrize("version", [1, 5])
def test_another_format_is_refused(saved, version):
    rewritten(saved, version, "null")
    said = rf"has format {version}, written by .*; this version reads formats 2, 3 and 4"
    with pytest.raises(UserError, match=said):
        psgd.load_checkpoint(learner_of(), saved)


@pytest.mark.parametrize(
    "extra",
    [
        '{"note": [1, 2.5, null, NaN, -Infinity], "generator": {"state": {"3": true}}}',
        '{"$tuple": [1], "$dict": [["a", 1]], "$": {"$unknown": 1}}',
        "[[1, 2], 340282366920938463463374607431768211456]",
        '"text"',
        "null",
    ],
)
def test_a_checkpoint_of_the_format_before_is_read(saved, extra):
    right = everything(train(learner_of(), 3))
    rewritten(saved, 2, extra)
    learner = learner_of()
    loaded = psgd.load_checkpoint(learner, saved)
    assert repr(loaded.extra) == repr(json.loads(extra)) == repr(loaded.extras[0])
    assert everything(learner) == right


def test_blocks_of_the_format_before_are_read(tmp_path):
    """When a model had no fragments, and these options did not exist."""

    def learner() -> Learner:
        algorithm = psgd.DiLoCo(sync_steps=3, overlap_samples=2)
        parameters, alone = psgd.Parameters({"w": np.ones(6)}), Communicator.single()
        return Learner(parameters, psgd.Adam(lr=0.1), algorithm, alone)

    def without_fragments(numbers: Any, manifest: Any) -> None:
        state = numbers["state"]["algorithm"]
        block = state.pop("fragments")["0"]
        assert block.pop("blocks") == 1 and block.pop("is_first") is False
        earlier = {"samples": "block_samples", "steps": "block_steps"}
        state |= {earlier.get(name, name): value for name, value in block.items()}
        numbers["weight"] = block["own_samples"]
        for name in ("fragments", "residual_decay"):
            del manifest["algorithm"]["options"][name]

    saved, trained = psgd.Checkpoints(tmp_path), train(learner(), 4)
    assert trained.state.fragments["0"].samples
    saved.save(trained, background=False)
    rewritten(saved.latest(), 3, change=without_fragments)
    trained.state.fragments["0"].blocks = 0  # were not counted
    psgd.load_checkpoint(again := learner(), tmp_path)
    assert everything(again) == everything(trained)
    assert everything(train(again, 4)) == everything(train(trained, 4))


@pytest.mark.parametrize("extra", ['{"$torch.none": 1}', '{"$tuple": 3}', '{"$int": "x"}'])
def test_an_extra_of_no_value_is_refused_and_changes_nothing(saved, extra):
    learner = learner_of()
    before = everything(learner)
    rewritten(saved, 3, extra)
    with pytest.raises(UserError, match=r"checkpoint .*: its extra holds"):
        psgd.load_checkpoint(learner, saved)
    assert everything(learner) == before


def test_partial_writes_and_places_without_a_checkpoint(saved):
    learner, folder = learner_of(), saved.parent
    part = folder / "000000000009.part"
    shutil.copytree(saved, part)
    assert psgd.load_checkpoint(learner, folder).path == saved
    with pytest.raises(UserError, match="is a partial write"):
        psgd.load_checkpoint(learner, part)
    (empty := folder.parent / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty' contains no checkpoint"):
        psgd.load_checkpoint(learner, empty)
    with pytest.raises(UserError, match=r"must be a folder"):
        psgd.load_checkpoint(learner, folder / "nowhere")
    with pytest.raises(UserError, match=r"must be the path of a folder: it has a zero byte"):
        psgd.load_checkpoint(learner, "a\0b")
    checkpoints = psgd.Checkpoints(folder)
    checkpoints.save(train(learner, 1), background=False)  # cleans up
    assert not part.exists()


def test_the_newest_is_damaged(saved):
    """It is not skipped in silence; the one before it is named."""
    learner, checkpoints = train(learner_of(), 4), psgd.Checkpoints(saved.parent)
    checkpoints.save(learner, background=False)
    newest = checkpoints.latest()
    assert newest is not None and newest != saved
    (newest / "rank-00000.json").unlink()
    hint = rf"rank-00000.json is missing.*an earlier checkpoint is whole .*: '{saved}'"
    with pytest.raises(UserError, match=hint):
        psgd.load_checkpoint(learner, saved.parent)
    (saved / "manifest.json").unlink()
    with pytest.raises(UserError, match="there is no whole checkpoint before it"):
        psgd.load_checkpoint(learner, saved.parent)


def test_without_safetensors(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UserError, match=r"pip install '\.\[checkpoint\]'"):
        psgd.Checkpoints(tmp_path)


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_keep(keep, tmp_path):
    with pytest.raises(UserError, match=r"keep=.* must be a whole number, at least 1"):
        psgd.Checkpoints(tmp_path, keep=keep)


class Killed(BaseException):
    """In the place of a SIGKILL: nothing catches it."""


def test_a_save_reads_no_manifest_but_one_that_has_changed(tmp_path, disk):
    read = []

    def reading(right: Any, path: Path) -> dict[str, Any]:
        read.append(path.name)
        return right(path)

    disk["read_manifest"] = reading
    learner, checkpoints = learner_of(), psgd.Checkpoints(tmp_path, keep=4)
    for _ in range(6):
        checkpoints.save(train(learner, 1), background=False)
    assert read == []
    manifest = tmp_path / f"{8:012d}" / "manifest.json"
    manifest.write_text("damaged")
    for _ in range(4):
        checkpoints.save(train(learner, 1), background=False)
    assert read == [f"{8:012d}"]
    kept = [path.name for path in checkpoints_in(tmp_path)]
    assert kept == [f"{samples:012d}" for samples in (8, 14, 16, 18, 20)]


@pytest.mark.parametrize("clock_goes_on", [True, False])
def test_a_kill_at_every_step_of_writing(tmp_path, monkeypatch, clock_goes_on):
    """Stopped before every change of the file system, the newest checkpoint is always whole."""
    monkeypatch.setattr(FolderLock, "hold", lambda lock, **how: None)  # it goes when its user does
    calls = [0, 0]

    def counted(right: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == calls[1]:
                raise Killed
            return right(*arguments, **options)

        return call

    folder = tmp_path / "checkpoints"
    psgd.Checkpoints(folder, keep=1).save(train(learner_of(), 1), extra="old", background=False)
    for module, name in (
        (os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree"),
        (os, "unlink"), (os, "rmdir"), (Path, "write_text"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    seen = set()
    for limit in range(1, 100):
        calls[:] = [-(10**9), 0]
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "copy")
        learner = train(learner_of(), 2 if clock_goes_on else 1)
        calls[:] = [0, limit]
        try:
            psgd.Checkpoints(tmp_path / "copy", keep=1).save(learner, "new", background=False)
        except Killed:
            calls[1] = 0
            extra = psgd.load_checkpoint(learner_of(), tmp_path / "copy").extra
            seen.add(extra)
            psgd.Checkpoints(tmp_path / "copy", keep=1).save(learner, "next", background=False)
            loaded = psgd.load_checkpoint(learner_of(), tmp_path / "copy")
            assert loaded.extra == "next"
            assert [p.name for p in (tmp_path / "copy").iterdir()] == [loaded.path.name]
            continue
        break
    assert seen == {"old", "new"}
    assert limit > 10


@dataclass
class Inner:
    counts: np.ndarray = across("sum")
    memory: dict[str, np.ndarray] = across("mean", default_factory=dict)


@dataclass
class Odd:
    """A state with everything that a state may hold."""

    inner: Inner | None
    missing: np.ndarray | None = across("same")
    scale: float = across("same", default=0.1)
    name: str = across("same", default="x")
    on: bool = across("same", default=True)
    empty: np.ndarray = across("same", default_factory=lambda: np.zeros((0, 3)))
    scalar: np.ndarray = across("same", default_factory=lambda: np.array(1.5))
    buffer: Any = workspace(default_factory=lambda: field)


def with_state(state: Odd) -> Learner:
    learner = learner_of()
    learner.state = state
    return learner


def test_all_that_a_state_may_hold_comes_back():
    view = np.arange(12, dtype=np.int64).reshape(3, 4).T
    memory = {"a.b": np.ones(2), "a": np.array([np.nan, -0.0])}
    learner = with_state(Odd(Inner(view, memory), None))
    tree, arrays = flatten(capture(learner))
    text = json.dumps(tree)
    copies = {name: np.array(array) for name, array in arrays.items()}
    kept = np.zeros((4, 3), np.int64)
    other = with_state(Odd(Inner(kept, {"gone": np.ones(1)}), np.ones(1), 0.0, "", False))
    restore(other, unflatten(json.loads(text), copies))
    assert other.state.inner.counts is kept
    assert np.array_equal(kept, view)
    assert other.state.inner.memory.keys() == {"a.b", "a"}
    assert other.state.inner.memory["a"].tobytes() == np.array([np.nan, -0.0]).tobytes()
    assert (other.state.scale, other.state.name, other.state.on) == (0.1, "x", True)
    assert other.state.missing is None
    assert other.state.empty.shape == (0, 3)
    assert other.state.scalar == 1.5


@pytest.mark.parametrize("value", [{1, 2}, [np.ones(2)], np.array([{}]), {3: 4}, np.float32(1)])
def test_what_no_state_may_hold_is_named(value, tmp_path):
    learner = with_state(Odd(Inner(value), None))
    with pytest.raises(UserError, match=r"algorithm\.inner\.counts"):
        psgd.Checkpoints(tmp_path).save(learner, background=False)
    assert {path.name for path in tmp_path.iterdir()} <= {LOCK}


def test_the_lines_of_the_documentation(tmp_path, monkeypatch, disk):
    """Pasted as they are, beside an older checkpoint: what was saved is what is loaded."""
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "using.md").read_text()
    (lines,) = (block for block in text.split("```") if "checkpoints.save(" in block)
    learner = train(learner_of(), 1)
    psgd.Checkpoints("checkpoints").save(learner, background=False)

    def publish(right: Any, *arguments: Any) -> None:
        time.sleep(0.2)
        right(*arguments)

    disk["publish"] = publish
    names = {"psgd": psgd, "learner": train(learner, 2), "generator": np.random.default_rng(3)}
    exec(lines.removeprefix("python"), names)
    assert names["loaded"].samples == 6
    assert names["loaded"].extra["generator"] == names["generator"].bit_generator.state


ROW = asdict(Progress(1, 10, 0.5, 0.1, 64, 0, 1.0, {"test_loss": 0.5, "test_r2": None}))
KEPT = {**SessionState().as_dict(), "history": [ROW], "loss": 1.5, "count": 3, "seconds": 2.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"history": 3}, {"history": [3]}, {"history": [{}]}, {"history": [{**ROW, "x": 1}]},
        {"history": [{**ROW, "epoch": "1"}]}, {"history": [{**ROW, "details": 3}]},
        {"history": [{**ROW, "metrics": {"test_loss": "0"}}]}, {"history": [{**ROW, "event": 3}]},
        {"loss": None}, {"count": "3"}, {"seconds": []}, {"best": "0"}, {"factor": None},
    ],
)  # fmt: skip
def test_what_no_session_has_kept(wrong):
    assert SessionState.of([KEPT, {**KEPT, "history": []}], 0, 1) == SessionState(
        [Progress(**ROW)], 3.0, 6, 2.0
    )
    assert SessionState.of([{**KEPT, **wrong}], 0, 1) is None
    assert SessionState.of([None], 0, 1) is None
