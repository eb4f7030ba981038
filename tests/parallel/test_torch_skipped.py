"""PyTorch's models: what is left out leaves nothing behind, in BatchNorm and optimizers either."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from cases import BLOCK_SIZE
from invariants import same_bits, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch_models import MODELS, Branches, batch, learner_of, made, values

import parallel_sgd as psgd
from parallel_sgd.errors import DivergedError
from parallel_sgd.training import Snapshot, capture, flatten

pytestmark = [pytest.mark.few_ranks, pytest.mark.threads(3), pytest.mark.ranks(3)]

LOSSY = {"gradient_bits": 1, "block_size": BLOCK_SIZE}
ALGORITHMS: dict[str, tuple[Any, int]] = {  # and minibatches in what is left out together
    "1 bit": (psgd.DataParallelSGD(**LOSSY), 1),
    "overlap": (psgd.DataParallelSGD(**LOSSY, overlap=True), 1),
    "double buffering": (psgd.DataParallelSGD(**LOSSY, double_buffering=True), 1),
    "blocks": (psgd.ModelAveragingSGD(sync_steps=2, inner_state="keep"), 2),
}


def step(learner: Any, number: int, *, bad: bool) -> None:
    """With `bad` numbers on the last rank, in its inputs: they get into BatchNorm's statistics."""
    rank = learner.comm.rank
    x, y = batch(learner.model, rank, number, 2 + rank)
    if bad and rank == learner.comm.size - 1:
        x[0] = torch.nan
    loss = F.cross_entropy(learner.model(x), y)
    loss.backward()
    learner.step(len(x), loss)


def left_behind(learner: Any, twin: Any) -> list[str]:
    """What differs between two learners, of all that a checkpoint would hold."""
    _, arrays = flatten(capture(learner))
    _, others = flatten(capture(twin))
    assert arrays.keys() == others.keys()
    wrong = [name for name, array in arrays.items() if not same_bits(array, others[name])]
    return [name for name in wrong if ".random." not in name]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_left_out_leaves_no_trace(comm, name):
    algorithm, together = ALGORITHMS[name]
    models: list[nn.Module] = [made(MODELS["convnet"], dtype=torch.float32) for _ in range(2)]
    learner, twin = (
        learner_of(model, comm, "adamw", algorithm, not_finite=policy)
        for model, policy in zip(models, ("skip", "stop"), strict=True)
    )
    for block in range(6):
        for number in range(together * block, together * (block + 1)):
            before = learner.samples
            step(learner, number, bad=block in (0, 2, 4) and number % 2 == 0)
            assert all(p.grad is None for p in learner.model.parameters())
            if block in (0, 2, 4):
                twin.local_step.state.samples += learner.samples - before
            else:
                step(twin, number, bad=False)
        assert left_behind(learner, twin) == []
    for each in (learner, twin):
        each.finish()
    assert learner.report()["skipped"]["minibatches"] == 3 * together
    assert same_bits(*map(values, models))
    same_on_all_ranks(comm, values(models[0]))
    assert np.isfinite(values(models[0])).all()
    assert all(torch.isfinite(buffer).all() for buffer in models[0].buffers())


WARM = 9  # samples: two minibatches
WITH_OTHERS: dict[str, Any] = {
    "1 bit": psgd.DataParallelSGD(**LOSSY),
    "warm start": psgd.DataParallelSGD(distributed_after=WARM),
    "blocks": psgd.ModelAveragingSGD(sync_steps=2, inner_state="keep"),
    "blocks, warm start": psgd.BlockMomentumSGD(sync_steps=3, distributed_after=WARM),
    "servers": psgd.DataParallelASGD(servers=1, sync_steps=2, currency="deltas"),
}


@pytest.mark.parametrize(
    ("bad", "snapshot"), [*((bad, False) for bad in range(6)), (1, True), (2, True), (3, True)]
)
@pytest.mark.parametrize("name", WITH_OTHERS)
def test_statistics_are_those_of_good_minibatches(comm, tmp_path, name, bad, snapshot):
    """Whichever was left out: in a warm start, as a block begins, or as a state was loaded. What is
    not finite in the midst of a block is not kept either."""
    model, algorithm = made(MODELS["convnet"], dtype=torch.float32), WITH_OTHERS[name]
    folder = comm.allgather_object(tmp_path)[0]
    with learner_of(model, comm, algorithm=algorithm, not_finite="skip") as learner:
        for number in range(0 if learner.serves else 12):
            finite = bool(np.isfinite(values(model)).all())  # else it is no checkpoint's
            if snapshot:
                here = Snapshot()
                here.take(learner)
                here.restore(learner)
            elif number in (1, 4) and all(learner.comm.allgather_object(finite)):
                psgd.Checkpoints(folder).save(learner, background=False)
                psgd.load_checkpoint(learner, folder)
            whole, rank = not learner.distributed, learner.comm.rank
            x, y = batch(model, 0 if whole else rank, number, 5)
            if number == bad and (whole or rank == learner.comm.size - 1):
                x[0] = torch.nan
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            learner.step(len(x), loss)
        learner.finish()
        counted = comm.allgather_object(learner.skipped.minibatches)
        assert max(counted) in (1, 2, 3)  # one, or its block
    assert np.isfinite(values(model)).all()
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())


def test_what_a_minibatch_has_used_is_left_out_with_it(comm):
    """Else the next update would take what it uses for what that has used."""
    models = [made(Branches) for _ in range(2)]
    learner, twin = (learner_of(model, comm, not_finite="skip") for model in models)
    for number, which in enumerate((0, 1, 0, 0)):
        for each in (learner, twin):
            each.model.which = which
            x, y = batch(each.model, comm.rank, number, 3)
            if number != 1:
                F.cross_entropy(each.model(x), y).backward()
                each.step(3)
            elif each is learner:
                (torch.nan * F.cross_entropy(each.model(x), y)).backward()
                each.step(3)
    assert learner.samples == twin.samples + 3 * comm.size
    assert same_bits(*map(values, models))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_scaler_goes_on_after_a_step_that_has_diverged(comm, optimizer):
    """As where a session then goes back to an earlier model: the step leaves nothing behind."""
    model = made(MODELS["mlp"], dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    learner = learner_of(model, comm, optimizer, scaler=scaler)
    x, y = batch(model, comm.rank, 0, 3)
    for diverges in (True, False):
        before = values(model)
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        with pytest.raises(DivergedError) if diverges else nullcontext():
            learner.step(3, torch.inf if diverges and comm.rank == 0 else 0.5)
        assert same_bits(values(model), before) == diverges
    assert scaler.get_scale() == 2.0**10


def test_a_scaler_goes_on_as_it_would(comm):
    """Overflows are its affair and do not count; a loss that is not finite is left out besides."""
    model = made(MODELS["mlp"], dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    learner = learner_of(model, comm, scaler=scaler, not_finite="skip", most_skipped=0)
    x, y = batch(model, comm.rank, 0, 3)
    for factor in (1.0, 1e38, 1.0):
        scaler.scale(factor * F.cross_entropy(model(x), y)).backward()
        learner.step(3)
    assert learner.report() is None or "skipped" not in learner.report()
    assert scaler.get_scale() == 2.0**9
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(psgd.UserError, match=r"1 times in a row, .*: the loss is not finite"):
        learner.step(3, torch.tensor(torch.inf) if comm.rank == 0 else 0.5)
