"""What PyTorch optimizers keep, where ranks differ in it: some have not begun, some cannot save."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import MODELS, OPTIMIZERS, batch, made, values

import parallel_sgd as psgd
from parallel_sgd import Communicator, UserError
from parallel_sgd.training.copies import Copy, Sharing

pytestmark = [
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
    pytest.mark.threads(2),
    pytest.mark.ranks(2),
]

BLOCK = psgd.DiLoCo(sync_steps=2, inner_state="average")


class Filtered(torch.optim.SGD):
    """Whose groups have what is another object in every process."""

    def __init__(self, params: Any, **own: Any) -> None:
        super().__init__([{"params": [*params], **own}], lr=0.1)


class WithObject(torch.optim.SGD):
    """Whose state has an object on the last rank."""

    rank = size = 0

    def step(self, closure: Any = None) -> Any:
        super().step()
        if self.rank == self.size - 1:
            self.state[self.param_groups[0]["params"][0]]["own"] = object()


def step(learner: Any, number: int, samples: int = 3) -> None:
    if samples:
        x, y = batch(learner.model, learner.comm.rank, number, samples)
        F.cross_entropy(learner.model(x), y).backward()
    learner.step(samples=samples)


def learner_of(comm: Communicator, optimizer: Any, algorithm: Any, **options: Any) -> Any:
    model: nn.Module = made(MODELS["mlp"], dtype=torch.float32, **options)
    return psgd.torch.Learner(model, optimizer(model), algorithm, comm)


def test_what_groups_have_of_the_program_is_compared(comm):
    """Functions and objects are others on every rank; what they are is the same."""
    assert comm.size > 1

    def narrow(p: torch.Tensor) -> bool:
        return p.dim() < 2

    class Settings:
        def __init__(self, value: int) -> None:
            self.value = value

    def optimizer(model: nn.Module, value: int = 1) -> Any:
        names = ["bias", "norm", "scale"]
        several = {names[(i + comm.rank) % 3] for i in range(3)}
        own = {"one": narrow, "two": lambda p: p, "three": partial(narrow, 3)}
        return Filtered(model.parameters(), **own, four=Settings(value), five=several)

    with learner_of(comm, optimizer, psgd.DataParallelSGD()) as learner:
        step(learner, 0)
    with pytest.raises(UserError, match=r"hyperparameters of the optimizer must be the same.*'va"):
        learner_of(comm, lambda model: optimizer(model, comm.rank), psgd.DataParallelSGD())


def test_what_cannot_be_held_is_said_on_all_ranks_as_it_is_saved(comm, tmp_path):
    def optimizer(model: nn.Module) -> Any:
        made = WithObject(model.parameters(), lr=0.1)
        made.rank, made.size = comm.rank, comm.size
        return made

    with learner_of(comm, optimizer, psgd.DataParallelSGD()) as learner:
        step(learner, 0)
        checkpoints = psgd.Checkpoints(comm.allgather_object(str(tmp_path))[0])
        with pytest.raises(
            UserError, match=rf"WithObject\.state_dict\(\).*'own'\].*\(on rank {comm.size - 1}\)"
        ):
            checkpoints.save(learner)
        step(learner, 1)
        checkpoints.close()


def test_ranks_that_have_not_begun_take_part_in_averages(comm, tmp_path):
    """Rank 0 has no samples in the first block: it has zeros for its state. A checkpoint for
    another number of ranks has the state of those that have one."""
    folder = comm.allgather_object(str(tmp_path))[0]
    with learner_of(comm, OPTIMIZERS["adamw"], BLOCK) as learner:
        for number in (0, 1):
            step(learner, number, samples=3 * (comm.rank > 0))
        vectors = learner.local_step.state.buffers
        assert [*vectors] == ["exp_avg", "exp_avg_sq"]
        sums = [v.copy() for v in vectors.values()]
        everywhere = comm.allgather_object(sums)
        for theirs in everywhere:
            assert all(np.array_equal(a, b) and a.any() for a, b in zip(theirs, sums, strict=True))
        with psgd.Checkpoints(folder) as checkpoints:
            checkpoints.save(learner)
        step(learner, 2)
        step(learner, 3)
        assert len({v.tobytes() for v in comm.allgather_object(values(learner.model))}) == 1
    if comm.rank == 0:
        alone = learner_of(Communicator.single(), OPTIMIZERS["adamw"], BLOCK, seed=1)
        psgd.load_checkpoint(alone, folder)
        for of_p in alone.local_step._torch.state.values():
            assert of_p["step"] == 2 and of_p["exp_avg"].any()
        assert len(alone.local_step._torch.state) == 4
        step(alone, 0)
        alone.close()
    comm.barrier()


def test_a_rank_that_has_not_begun_keeps_what_it_has_in_common(comm):
    """Copies of ranks may have other parts: each goes back to its own; one that has none gets
    those of another."""
    with learner_of(comm, OPTIMIZERS["adamw"], psgd.ModelAveragingSGD(sync_steps=4)) as learner:
        for number in (0, 1):
            step(learner, number, samples=3 * (comm.rank > 0))
        copy = Copy()
        copy.take(learner, [{}] * comm.size)
        before = [len(learner.local_step._torch.state), values(learner.model)]
        step(learner, 2)
        assert before[0] == 4 * (comm.rank > 0)
        Sharing(learner, copy).put_back(learner, [{}] * comm.size)
        assert len(learner.local_step._torch.state) == before[0]
        assert np.array_equal(values(learner.model), before[1])
        Sharing(learner, copy if comm.rank else None).put_back(learner, [{}] * comm.size)
        assert len(learner.local_step._torch.state) == 4
        moments = comm.allgather_object(learner.local_step.state.buffers["exp_avg"])
        assert all(np.array_equal(m, moments[0]) and m.any() for m in moments)
        Sharing(learner, None if comm.rank else copy).put_back(learner, [{}] * comm.size)
