"""The checkpoints of a session: a run goes on from where it was, also with the best model."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from sessions import SIZE, TESTED, data, learner_of, model, without_seconds

import parallel_sgd as psgd
from parallel_sgd import UserError
from parallel_sgd.training import MANIFEST, checkpoints_in

pytestmark = [pytest.mark.few_ranks, pytest.mark.threads(1, 2), pytest.mark.ranks(2)]

#: What the model is worth after so many minibatches: the third is better by less than is asked for,
#: and the fourth as good as the best.
GRADES = (1.8, 1.44, 1.43, 1.44, *np.linspace(1.6, 2.0, 12))
BEST = 2 * SIZE


def graded(comm, *, interrupted_after=99, **checkpoints):
    """The parameters and the rows of a session that ends with its best model; None where it was
    interrupted after so many rows."""
    own, made = model(), []

    def interrupt(row):
        made.append(row)
        if len(made) == interrupted_after:
            raise RuntimeError("interrupted")

    def grade(outputs, y):
        return GRADES[learner.samples // SIZE - 1]

    validation = psgd.CrossValidation(
        data=data(TESTED, 1), every=SIZE, criterion="grade", min_improvement=0.1, restore_best=True
    )
    with learner_of(comm, own, optimizer=psgd.MomentumSGD(lr=0.1)) as learner:
        session = psgd.TrainingSession(
            learner=learner,
            objective=psgd.training.ModelObjective(own, {"grade": grade}),
            train=data(),
            minibatch_size=SIZE,
            epochs=3,
            validation=validation,
            callbacks=[interrupt],
            checkpoints=psgd.CheckpointConfig(**checkpoints) if checkpoints else None,
        )
        with pytest.raises(psgd.UserError) if interrupted_after < 99 else nullcontext():
            return own.parameters.flat, without_seconds(session.run())
    return None


def test_ranks_with_other_folders_disagree_before_they_train(comm, tmp_path):
    """Whatever each calls the same one."""
    folder = comm.allgather_object(tmp_path)[0]
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    comm.barrier()
    if comm.size > 1:
        own = folder / "other" if comm.rank == comm.size - 1 else saved
        message = (
            rf"same on all ranks: rank 0 has .*/saved', and rank {comm.size - 1} has .*/other'"
        )
        with pytest.raises(UserError, match=message):
            graded(comm, folder=own, every=SIZE)
        assert not list(saved.iterdir())
    comm.barrier()
    link = folder / "link"
    if comm.rank == 0:
        link.symlink_to(saved)
    comm.barrier()
    graded(comm, folder=link if comm.rank else saved, every=3 * SIZE)
    assert list(saved.iterdir())


def test_the_best_model_is_kept_whatever_else_is_only_a_little_better(comm, tmp_path):
    folder = comm.allgather_object(tmp_path)[0]
    whole, rows = graded(comm)
    assert rows[-1]["event"] == f"restored the model of {BEST} samples"
    saved = {"folder": folder, "every": SIZE, "keep": 2, "resume": True}
    graded(comm, interrupted_after=7, **saved)
    kept = [int(path.name) for path in checkpoints_in(folder)]
    assert kept == [BEST, 5 * SIZE, 6 * SIZE]
    resumed, others = graded(comm, **saved)
    assert np.array_equal(whole, resumed) and rows == others


def test_a_damaged_checkpoint_beside_the_best_one_is_in_nobodys_way(comm, tmp_path):
    folder = comm.allgather_object(tmp_path)[0]
    whole, rows = graded(comm)
    saved = {"folder": folder, "every": SIZE, "keep": 99, "resume": True}
    graded(comm, interrupted_after=5, **saved)
    comm.barrier()
    if comm.rank == 0:
        (checkpoints_in(folder)[0] / MANIFEST).write_text("{")
    comm.barrier()
    resumed, others = graded(comm, **saved)
    assert np.array_equal(whole, resumed) and rows == others


def test_a_run_goes_on_from_a_link_to_its_checkpoint(comm, tmp_path):
    folder = comm.allgather_object(tmp_path)[0]
    whole, rows = graded(comm)
    saved = {"folder": folder, "every": SIZE, "keep": 99}
    graded(comm, interrupted_after=6, **saved)
    comm.barrier()
    if comm.rank == 0:
        (folder / "chosen").symlink_to(f"{3 * SIZE:012d}")
    comm.barrier()
    resumed, others = graded(comm, **saved, resume=folder / "chosen")
    assert np.array_equal(whole, resumed) and rows == others
    comm.barrier()
    assert [*folder.glob("*.aside")]  # what was newer


def test_a_checkpoint_with_a_second_name_is_resumed(comm, tmp_path):
    """As a rank has it that was told to leave right after one was saved: of the same samples."""
    folder = comm.allgather_object(tmp_path)[0]
    own = model()
    with learner_of(comm, own) as learner, psgd.Checkpoints(folder, keep=1) as checkpoints:
        learner.samples = SIZE
        for _ in range(2):
            checkpoints.save(learner)
    comm.barrier()
    assert [path.name for path in checkpoints_in(folder)] == [f"{SIZE:012d}-1"]
    assert psgd.CheckpointConfig(folder=folder, resume=True).to_resume == folder
