"""Buffers, and parameters, that a forward pass changes on each rank by the samples there."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import parallel_sgd as psgd
from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.training import Snapshot

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


class Queue(torch.nn.Module):
    """Which keeps the latest outputs, as MoCo does, beside statistics of BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
        self.register_buffer("queue", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(x))
        self.queue = out.detach()[:2].clone()
        return out


class Growing(torch.nn.Linear):
    """Which keeps all inputs."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("seen", torch.zeros(0, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach()])
        return super().forward(x)


def learner_of(comm: Communicator, model: Any, algorithm: Any = None, **options: Any) -> Any:
    algorithm = algorithm or psgd.DataParallelSGD()
    return psgd.torch.Learner(model, psgd.SGD(lr=0.1), algorithm, comm, **options)


def step(learner: Any) -> None:
    x = torch.arange(12.0).view(3, 4) + 20 * learner.comm.rank + learner.samples
    learner.model(x).pow(2).mean().backward()
    learner.step(samples=3)


def test_a_buffer_that_each_rank_has_for_itself_is_named_as_it_is_averaged():
    def body(comm: Communicator) -> None:
        assert comm.size == 2
        learner = learner_of(comm, Queue())
        for _ in range(2):
            step(learner)
            with learner.evaluation():
                pass
        learner.close()

    with pytest.warns(UserWarning, match="buffer 'queue' differs between ranks and") as warned:
        simulate(2, body)
    assert len(warned) == 1  # once, and on one rank; nothing of BatchNorm's
    assert warned[0].filename == __file__  # the program's own line
    assert 'give the learner buffers="mean"' in str(warned[0].message)


@pytest.mark.parametrize("buffers", ["mean", "first", "local"])
def test_what_is_said_to_be_meant_is_not_warned_of(buffers):
    def body(comm: Communicator) -> None:
        learner = learner_of(comm, Queue(), buffers=buffers)
        step(learner)
        learner.finish()
        learner.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(2, body)


def test_a_buffer_that_has_grown_goes_back_to_what_it_was(tmp_path):
    with Communicator.single() as comm:
        learner = learner_of(comm, Growing())
        step(learner)
        snapshot, before = Snapshot(), learner.model.seen.clone()
        snapshot.take(learner)
        with psgd.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(learner)
        step(learner)
        assert len(learner.model.seen) == 6
        snapshot.restore(learner)
        assert torch.equal(learner.model.seen, before) and before.dtype == torch.complex64
        with pytest.raises(UserError, match=r"has model.buffers.seen of \[3, 4, 2\], but this"):
            psgd.load_checkpoint(learner_of(comm, Growing()), tmp_path)


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_an_embedding_that_forward_renormalizes(kind):
    """It is refused where ranks must have one model in every step, and else taken."""

    def learner(comm: Communicator, algorithm: Any) -> None:
        model = torch.nn.Sequential(kind(5, 3, max_norm=1.0), torch.nn.Linear(3, 2))
        with learner_of(comm, model, algorithm):
            pass

    with pytest.raises(UserError, match=f"{kind.__name__} '0' with max_norm=1.0: its forward"):
        simulate(2, lambda comm: learner(comm, psgd.DataParallelSGD()))
    simulate(2, lambda comm: learner(comm, psgd.ModelAveragingSGD(sync_steps=2)))
    simulate(1, lambda comm: learner(comm, psgd.DataParallelSGD()))
