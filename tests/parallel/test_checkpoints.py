"""Checkpoints on ranks: they may be taken at any step, and training goes on from each of them."""

from __future__ import annotations

import errno
import hashlib
import itertools
import math
import shutil
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import GATHERS, OPTIMIZERS, few_ranks_but, gradient_of, samples_of, shared, zeros
from conforming import CONFORMING
from invariants import nothing_lost

import parallel_sgd as psgd
from parallel_sgd import Communicator, Learner, UserError
from parallel_sgd.algorithms import DataParallelState, Work
from parallel_sgd.array_files import ArrayInFile
from parallel_sgd.state import across
from parallel_sgd.training import LOCK, capture, checkpoints_in, flatten
from parallel_sgd.training.state import state_tree

STEPS = 7


pytestmark = [
    pytest.mark.filterwarnings("ignore:servers=0"),
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
]


def learner_of(case: str, comm: Communicator, **changes: Any) -> Learner:
    algorithm, options = CONFORMING[case]
    parameters = zeros(changes.get("layout", "large and small"), changes.get("dtype", np.float32))
    parameters.flat[:] = np.linspace(-1, 1, parameters.flat.size)
    return Learner(
        parameters,
        changes.get("optimizer", options.get("optimizer", psgd.SGD(lr=0.1))),
        changes.get("algorithm", algorithm),
        comm,
    )


def train(learner: Learner, step: int) -> None:
    """On data that differ on all ranks, of uneven number; alike in the warm start."""
    rank = learner.comm.rank if learner.distributed else 0
    if learner.algorithm.has_quorum:
        every = [samples_of(k, step) for k in range(learner.comm.size)]
        learner.announce(every[rank], sum(every))
    learner.gradient.flat[:] = gradient_of(rank, step, learner.gradient.flat.size)
    learner.step(samples_of(rank, step) if learner.distributed else 3)


def everything(learner: Learner) -> dict[str, Any]:
    """All state, the arrays as digests."""
    tree, arrays = flatten(capture(learner))
    digests = {name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in arrays.items()}
    return {"tree": tree, **digests, "sent": learner.bytes_sent}


#: In the largest world of MPI: residuals, the clock of a warm start, a block under way.
EVERYWHERE = ("data-parallel, warm start", "model averaging, 2 bits", "DiLoCo, overlap")


@pytest.mark.threads(3)
@pytest.mark.parametrize("case", few_ranks_but(EVERYWHERE, CONFORMING))
def test_going_on_is_as_never_having_stopped(case, comm, tmp_path):
    """Saved after every step of a run, and gone on with from four of them, by other learners: each
    place in blocks of two and of three steps, and one after a step without samples."""
    folder = shared(comm, tmp_path)
    plain, whole = learner_of(case, comm), learner_of(case, comm)
    checkpoints = psgd.Checkpoints(folder, keep=2 * STEPS)
    states = []
    for step in range(STEPS + 1):
        checkpoints.save(whole, {"step": step, "rank": comm.rank}, background=step % 3 > 0)
        states.append(everything(whole))
        if step < STEPS:
            train(plain, step)
            train(whole, step)
    assert everything(whole) == everything(plain), "saving changes the trajectory"
    checkpoints.wait()
    used = learner_of(case, comm)
    for path in checkpoints_in(folder)[1:5]:
        fresh = learner_of(case, comm)
        fresh.parameters.flat[:] = np.nan
        view = fresh.parameters["a"]
        step = psgd.load_checkpoint(fresh, path).extra["step"]
        assert np.shares_memory(view, fresh.parameters.flat)
        if case == "asynchronous, in rounds":  # which have left with finish()
            used = learner_of(case, comm)
            train(used, 0)
        loaded = psgd.load_checkpoint(used, path)  # one that stands elsewhere
        assert loaded.extra == {"step": step, "rank": comm.rank}
        assert loaded.samples == used.samples
        assert everything(fresh) == states[step]
        for rest in range(step, STEPS):
            train(fresh, rest)
            train(used, rest)
        assert everything(fresh) == everything(whole), f"differs when stopped at {step}"
        assert everything(used) == everything(whole), f"differs in a used one, from {step}"
        used.finish()
        fresh.finish()
    plain.finish()
    assert everything(used) == everything(plain) == everything(fresh)


SIGNS = {"gradient_bits": 1, "code": "sign"}
IN_TURN: list[dict[str, Any]] = [
    SIGNS,
    *({"gradient_bits": bits} for bits in (1, 0.5, 0.25)),
    SIGNS,
    {"gradient_bits": {0: 1, 40: 32}},
]


def test_what_is_still_to_be_sent_is_sent_with_other_bits(comm, tmp_path):
    """From signs to one of 8, 16 and 32 values and back: residuals are the same for all bits, so
    nothing is lost where a checkpoint is taken up with others; 32 bits at last leave none."""
    checkpoints = psgd.Checkpoints(shared(comm, tmp_path))
    step, saved, inputs = 0, None, np.zeros(zeros("long").flat.size)
    for options in IN_TURN:
        algorithm = psgd.DataParallelSGD(block_size=64, **options)
        learner, twin = (Learner(zeros("long"), GATHERS, algorithm, comm) for _ in range(2))
        if saved is not None:
            for taken_up in (learner, twin):
                psgd.load_checkpoint(taken_up, checkpoints.folder)
            assert everything(learner) == saved
        residuals = learner.state.exchange.residuals
        assert residuals is not None
        for _ in range(3):
            for trained in (learner, twin):
                trained.gradient.flat[:] = gradient_of(comm.rank, step, inputs.size)
                trained.step(samples=3)
            assert everything(twin) == everything(learner)
            inputs += sum(gradient_of(k, step, inputs.size).astype(float) for k in range(comm.size))
            step += 1
            nothing_lost(comm, inputs, -learner.parameters.flat, residuals, step)
        checkpoints.save(learner, background=False)
        saved = everything(learner)
    assert not residuals.worker_error.any()
    np.testing.assert_allclose(-learner.parameters.flat, inputs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("one", "other"), [(32, 1), (0.25, 32), (1, "auto")])
def test_bits_with_which_nothing_is_left_to_send_are_others(one, other, comm, tmp_path):
    folder = shared(comm, tmp_path)
    first, second = (
        learner_of("data-parallel", comm, algorithm=psgd.DataParallelSGD(gradient_bits=bits))
        for bits in (one, other)
    )
    psgd.Checkpoints(folder).save(first, background=False)
    with pytest.raises(UserError, match=f"it was gradient_bits={one}, and is {other!r}"):
        psgd.load_checkpoint(second, folder)


def test_the_last_and_the_best_are_kept(comm, tmp_path):
    folder = shared(comm, tmp_path) / "made" / "here"
    learner, checkpoints = (
        learner_of("data-parallel, 1 bit", comm),
        psgd.Checkpoints(folder, keep=2),
    )
    assert checkpoints.wait() is None
    metrics = [3.0, 1.0, float("nan"), None, 1.5, 2.0]
    for metric in metrics:
        checkpoints.save(learner, metric=metric)
        learner.samples += 10
    assert checkpoints.wait() == checkpoints.latest() == folder / "000000000050"
    kept = [int(path.name) for path in checkpoints_in(folder)]
    assert kept == [10, 40, 50]
    learner.samples = 50
    checkpoints.save(learner, metric=0.5)  # the same once more: in place of the other
    assert checkpoints.wait() == folder / "000000000050-1"
    comm.barrier()
    kept = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
    assert kept == ["000000000040", "000000000050-1"]
    assert psgd.load_checkpoint(learner, folder).path.name == "000000000050-1"
    checkpoints.save(learner, metric=0.7)  # the same samples, but worse: beside the best one
    assert checkpoints.wait() == folder / "000000000050-2"
    comm.barrier()
    kept = [path.name for path in checkpoints_in(folder)]
    assert kept == ["000000000050-1", "000000000050-2"]


def save_twice(checkpoints: psgd.Checkpoints, learner: Learner, background: bool) -> None:
    """The second time says what went wrong in the background."""
    checkpoints.save(learner, background=background)
    checkpoints.save(learner)


@pytest.mark.parametrize(
    ("name", "background"),
    [("write_rank", True), ("write_rank", False), ("begin", False), ("publish", False)],
)
def test_a_full_disk_leaves_nothing_behind(on_ranks, tmp_path, disk, name, background):
    """Of one rank's files, the folder or the manifest: one line everywhere, and the checkpoint
    before is still good."""

    def body(comm: Communicator) -> None:
        folder, culprit = shared(comm, tmp_path), comm.size - 1 if name == "write_rank" else 0
        learner, checkpoints = learner_of("data-parallel, 1 bit", comm), psgd.Checkpoints(folder)
        checkpoints.save(learner)
        good = checkpoints.wait()
        train(learner, 0)
        comm.barrier()

        def full(right: Any, *arguments: Any) -> Any:
            if name == "write_rank":
                written = right(*arguments)
                if arguments[1] != culprit:
                    return written
            raise OSError(errno.ENOSPC, "No space left on device")

        disk[name] = full
        message = rf"no checkpoint could be written to .*No space left .* \(on rank {culprit}\)$"
        with pytest.raises(UserError, match=message):
            save_twice(checkpoints, learner, background)
        comm.barrier()
        assert {path.name for path in folder.iterdir()} - {LOCK} == {good.name}
        disk.pop(name, None)
        comm.barrier()
        checkpoints.save(learner)
        assert good != checkpoints.wait() == psgd.load_checkpoint(learner, folder).path

    on_ranks(body)


def test_what_a_step_has_told_is_not_told_again(on_ranks, tmp_path, disk):
    """By another learner of this program, that goes on from the checkpoint before."""

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def body(comm: Communicator) -> None:
        folder = shared(comm, tmp_path)
        learner, checkpoints = learner_of("data-parallel", comm), psgd.Checkpoints(folder)
        checkpoints.save(learner)
        good = checkpoints.wait()
        comm.barrier()
        disk["write_rank"] = full
        comm.barrier()
        checkpoints.save(learner)
        while checkpoints.writing:
            time.sleep(0.001)
        comm.barrier()
        with pytest.raises(UserError, match="no checkpoint could be written to"):
            train(learner, 0)
        comm.barrier()
        disk.pop("write_rank", None)
        another = learner_of("data-parallel", comm)
        assert psgd.load_checkpoint(another, folder).path == good

    on_ranks(body)


def test_ranks_with_other_folders_disagree(comm, tmp_path):
    folder = shared(comm, tmp_path)
    learner = learner_of("data-parallel", comm)
    own = psgd.Checkpoints(folder / ("a" if comm.rank < comm.size - 1 else "b"))
    own.save(learner)
    if comm.size == 1:
        return own.close()
    with pytest.raises(UserError, match=rf"rank 0 has .*/a', and rank {comm.size - 1} has .*/b'"):
        own.wait()
    assert {file.name for file in folder.glob("*/*")} <= {".lock"}


def extra_of(rank: int) -> dict[Any, Any]:
    return {
        "rank": rank,
        "milestones": Counter({3: 1, 6: 2}),
        "drawn": {0: (1.5, math.nan), "0": [np.float32(0.1), b"\0"]},
        "state": np.random.PCG64(5).state,
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "long": 10**4000,
    }


def test_what_a_program_adds_comes_back_as_it_was(comm, tmp_path):
    """On every rank its own, and those of all ranks in their order."""
    folder = shared(comm, tmp_path)
    learner = learner_of("data-parallel", comm)
    with psgd.Checkpoints(folder) as checkpoints:
        extra = extra_of(comm.rank)
        checkpoints.save(learner, extra=extra)
        extra["drawn"][0] = "changed while it is written"
    loaded = psgd.load_checkpoint(learner, folder)
    assert len(loaded.extras) == comm.size
    for rank, extra in [(comm.rank, loaded.extra), *enumerate(loaded.extras)]:
        assert repr(extra) == repr(extra_of(rank))
        assert type(extra["milestones"]) is Counter
        extra["array"][0, 0] = 7  # each is an object of its own, and can be changed


def test_what_cannot_come_back_is_said_on_all_ranks(comm, tmp_path):
    learner, checkpoints = (
        learner_of("data-parallel", comm),
        psgd.Checkpoints(shared(comm, tmp_path)),
    )
    with pytest.raises(
        UserError, match=r"extra\['a'\]\[0\]=.* is the class map, which checkpoints"
    ):
        checkpoints.save(learner, extra={"a": [map]} if comm.rank == comm.size - 1 else None)
    checkpoints.save(learner)  # training, and saving, can go on
    checkpoints.close()


@pytest.mark.parametrize("use", ["save", "load"])
def test_a_rank_that_has_failed_is_not_waited_for(comm, tmp_path, use):
    """Within a block the others come to a checkpoint before they come to the next meeting."""
    checkpoints = psgd.Checkpoints(shared(comm, tmp_path))
    algorithm = psgd.ModelAveragingSGD(sync_steps=100)
    learner = Learner(zeros("one block"), OPTIMIZERS["SGD"], algorithm, comm)

    def go_on():
        if comm.rank == comm.size - 1:
            learner.fail("label 12")
        if use == "save":
            checkpoints.save(learner)
        psgd.load_checkpoint(learner, tmp_path)

    with pytest.raises(UserError, match=rf"label 12 \(on rank {comm.size - 1}\)"):
        go_on()


OTHER = {
    "layout": ({"layout": "matrix and bias"}, r"another model: its parameter a was \[700\]"),
    "dtype": ({"dtype": np.float64}, "another model: its parameters were float32"),
    "algorithm": (
        {"algorithm": psgd.ModelAveragingSGD()},
        "another algorithm: DiLoCo, not ModelAveragingSGD",
    ),
    "option": (
        {"algorithm": psgd.DiLoCo(sync_steps=4)},
        "another algorithm: it was sync_steps=3, and is 4",
    ),
    "optimizer": ({"optimizer": psgd.SGD(lr=1)}, "another optimizer: Adam, not SGD"),
    "optimizer's option": (
        {"optimizer": psgd.Adam(lr=1, beta1=0.8)},
        "another optimizer: it was beta1=0.9, and is 0.8",
    ),
}


@pytest.mark.parametrize("what", OTHER)
def test_a_checkpoint_of_something_else(what, comm, tmp_path):
    changes, expected = OTHER[what]
    folder = shared(comm, tmp_path)
    checkpoints = psgd.Checkpoints(folder)
    checkpoints.save(learner_of("DiLoCo", comm), background=False)
    other = learner_of("DiLoCo", comm, **changes)
    before = everything(other)
    with pytest.raises(UserError, match=expected):
        psgd.load_checkpoint(other, folder)
    assert everything(other) == before


def test_another_learning_rate_and_other_facts(comm, tmp_path):
    folder = shared(comm, tmp_path)
    checkpoints = psgd.Checkpoints(folder, facts={"seed": 3, "data": "digits"})
    checkpoints.save(learner_of("DiLoCo", comm), background=False)
    slower = psgd.Adam(lr_per_sample=0.001, weight_decay=0.1)
    other = learner_of("DiLoCo", comm, optimizer=slower)
    psgd.load_checkpoint(other, folder)
    psgd.load_checkpoint(other, folder, facts={"seed": 3})
    with pytest.raises(UserError, match="another run: its seed was 3, and is 4"):
        psgd.load_checkpoint(other, folder, facts={"seed": 4})


def test_a_damaged_rank_is_everybodys(comm, tmp_path):
    """One rank alone reads the file that is damaged; none may begin to change its learner."""
    folder, last = shared(comm, tmp_path), comm.size - 1
    learner = learner_of("DiLoCo, overlap", comm)
    checkpoints = psgd.Checkpoints(folder)
    for step in (0, 2):
        train(learner, step)
        checkpoints.save(learner)
    checkpoints.wait()
    first, second = checkpoints_in(folder)
    for step in (3, 5):
        train(learner, step)
    before = everything(learner)
    for suffix, damage in itertools.product(("safetensors", "json"), DAMAGES):
        name = f"rank-{last:05d}.{suffix}"
        comm.barrier()
        if comm.rank == 0:
            shutil.copy(second / name, folder / "whole")
            DAMAGES[damage](second / name)
        comm.barrier()
        earlier = rf"an earlier checkpoint is whole and can be given instead: '{first}'"
        with pytest.raises(UserError, match=rf"{second}' is damaged: {name}.*{earlier}"):
            psgd.load_checkpoint(learner, folder)
        with pytest.raises(UserError, match=rf"is damaged: {name} [^;]*$"):
            psgd.load_checkpoint(learner, second)
        assert everything(learner) == before
        comm.barrier()
        if comm.rank == 0:
            shutil.move(folder / "whole", second / name)
    comm.barrier()
    psgd.load_checkpoint(learner, second)
    if comm.rank == 0:
        (second / "manifest.json").unlink()
    comm.barrier()
    with pytest.raises(UserError, match=rf"is not whole: it has no manifest.*'{first}'"):
        psgd.load_checkpoint(learner, folder)
    psgd.load_checkpoint(learner, first)


@dataclass(kw_only=True)
class TrendState(DataParallelState):
    trend: float = across("same", default=-0.5)
    best: float = across("same", default=-7.5)


class Trend(psgd.DataParallelSGD):
    """An algorithm of one's own, whose numbers need not be counts."""

    def init(self, work: Work) -> TrendState:
        return TrendState(**vars(super().init(work)))


def test_numbers_of_ones_own_may_be_any(comm, tmp_path):
    folder = shared(comm, tmp_path)
    learner = learner_of("data-parallel", comm, algorithm=Trend())
    learner.state.trend = -2.5
    psgd.Checkpoints(folder).save(learner, background=False)
    other = learner_of("data-parallel", comm, algorithm=Trend())
    psgd.load_checkpoint(other, folder)
    assert (other.state.trend, other.state.best) == (-2.5, -7.5)


@pytest.mark.parametrize(("owner", "name"), [(ArrayInFile, "whole"), (state_tree, "_room")])
@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_arrays_that_one_rank_cannot_read(on_ranks, tmp_path, monkeypatch, owner, name, error):
    """They are read before any rank begins to change its learner."""
    stuck: list[int] = []
    right = getattr(owner, name)

    def fails(*args: Any) -> Any:
        if threading.get_ident() in stuck:
            raise error("Unable to\nallocate")
        return right(*args)

    monkeypatch.setattr(owner, name, fails)

    def body(comm: Communicator) -> None:
        folder = shared(comm, tmp_path)
        learner = learner_of("DiLoCo", comm)
        psgd.Checkpoints(folder).save(learner, background=False)
        train(learner, 0)
        before = everything(learner)
        if comm.rank == comm.size - 1:
            stuck.append(threading.get_ident())
        message = rf"^checkpoint '.*' cannot be read: Unable to allocate \(on rank {comm.size - 1}"
        with pytest.raises(UserError, match=message):
            psgd.load_checkpoint(learner, folder)
        assert everything(learner) == before

    on_ranks(body)


def test_a_failure_in_the_background_names_its_ranks_once(comm, tmp_path):
    """Also where workers hear of it, who have another way to tell each other."""
    folder = shared(comm, tmp_path) / "file"
    if comm.rank == 0:
        folder.touch()
    comm.barrier()
    algorithm = psgd.DataParallelASGD(sync_steps=1, servers=comm.size // 2)
    learner = learner_of("asynchronous, in rounds", comm, algorithm=algorithm)
    message = r"no checkpoint could be written to .*file' \(on rank 0\)$"
    checkpoints = psgd.Checkpoints(folder)

    def until_it_is_heard() -> None:
        if not learner.serves:
            checkpoints.save(learner)
            while checkpoints.writing:
                time.sleep(0.001)
            train(learner, 0)
        learner.finish()

    with pytest.raises(UserError, match=message):
        until_it_is_heard()
    with suppress(UserError):  # what one rank has heard of another is still its own, too
        checkpoints.wait()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "flipped": flip,
}
