"""PyTorch's models: what is left out leaves nothing behind, in BatchNorm and optimizers either."""

from __future__ import annotations

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
from parallel_sgd.training.state_tree import capture, flatten

pytestmark = [pytest.mark.threads(3), pytest.mark.ranks(3)]

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
    assert learner.report()["left_out"]["minibatches"] == 3 * together
    assert same_bits(*map(values, models))
    same_on_all_ranks(comm, values(models[0]))
    assert np.isfinite(values(models[0])).all()
    assert all(torch.isfinite(buffer).all() for buffer in models[0].buffers())


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


def test_a_scaler_goes_on_as_it_would(comm):
    """Overflows are its affair and do not count; a loss that is not finite is left out besides."""
    model = made(MODELS["mlp"], dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    learner = learner_of(model, comm, scaler=scaler, not_finite="skip", most_skipped=0)
    x, y = batch(model, comm.rank, 0, 3)
    for factor in (1.0, 1e38, 1.0):
        scaler.scale(factor * F.cross_entropy(model(x), y)).backward()
        learner.step(3)
    assert learner.report() is None or "left_out" not in learner.report()
    assert scaler.get_scale() == 2.0**9
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(psgd.UserError, match=r"1 times in a row, .*: the loss is not finite"):
        learner.step(3, torch.tensor(torch.inf) if comm.rank == 0 else 0.5)
