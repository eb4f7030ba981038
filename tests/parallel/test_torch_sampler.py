"""DataLoaders whose minibatches the ranks share: every sample once an epoch, on any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch_models import CLASSES, MLP, OPTIMIZERS, made, values

import parallel_sgd as psgd
from parallel_sgd import Communicator, UserError
from parallel_sgd.data.order import epoch_order, order_of
from parallel_sgd.data.shares import rank_part

pytestmark = [
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
    pytest.mark.few_ranks,
    pytest.mark.threads(1, 3),
    pytest.mark.ranks(3),
]

SAMPLES, MINIBATCH = 22, 7
"""The last minibatch of an epoch has one sample: fewer than there are ranks, but for one."""


def data() -> TensorDataset:
    random = np.random.default_rng(5)
    x = torch.from_numpy(random.standard_normal((SAMPLES, 6)))
    return TensorDataset(x, torch.arange(SAMPLES) % CLASSES, torch.arange(SAMPLES))


def learner_of(comm: Communicator, algorithm: Any = None) -> Any:
    model = made(MLP)
    algorithm = algorithm or psgd.DataParallelSGD()
    return psgd.torch.Learner(model, OPTIMIZERS["momentum"](model), algorithm, comm)


def loader_of(learner: Any, *, workers: int = 0, **options: Any) -> DataLoader:
    dataset = data()
    sampler = psgd.torch.sampler(dataset, learner, MINIBATCH, seed=3, **options)
    return DataLoader(dataset, batch_sampler=sampler, num_workers=workers)


def train(learner: Any, loader: DataLoader, most: int = 10**9) -> list[list[int]]:
    """What this rank's minibatches were, by the numbers of their samples; at most so many."""
    seen = []
    for x, y, numbers in loader:
        if len(seen) == most:
            break
        F.cross_entropy(learner.model(x), y).backward()
        learner.step(samples=len(x))
        seen.append(numbers.tolist())
    return seen


def one_process(epochs: int, steps: int | None = None) -> np.ndarray:
    model, dataset = made(MLP), data()
    optimizer = OPTIMIZERS["momentum"](model)
    for epoch in range(epochs):
        order = epoch_order(SAMPLES, 3, epoch, True)
        for begin in range(0, SAMPLES, MINIBATCH):
            x, y, _ = dataset[order[begin : begin + MINIBATCH]]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return values(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_epoch_has_every_sample_once(comm, overlap):
    """The same minibatches, and the same model, on any number of ranks."""
    learner = learner_of(comm, psgd.DataParallelSGD(overlap=overlap))
    loader = loader_of(learner)
    assert len(loader) == 4
    for epoch in loader.batch_sampler.epochs(3):
        begin = learner.samples
        everywhere = comm.allgather_object(train(learner, loader))
        assert {len(theirs) for theirs in everywhere} == {4}
        order = epoch_order(SAMPLES, 3, epoch, True).tolist()
        for t, parts in enumerate(zip(*everywhere, strict=True)):
            minibatch = order[t * MINIBATCH : (t + 1) * MINIBATCH]
            joint = [number for part in parts for number in part]
            assert joint[: len(minibatch)] == minibatch
            assert len(joint) == max(
                len(minibatch), comm.size
            )  # some are given one that is not theirs
        assert learner.samples == begin + SAMPLES
    learner.finish()
    assert np.abs(values(learner.model) - one_process(3)).max() < 1e-9


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_the_position_is_part_of_a_checkpoint(comm, tmp_path, stop):
    """Also of one on another number of ranks: the joint minibatches know nothing of them."""
    folder = Path(comm.allgather_object(str(tmp_path))[0])
    learner = learner_of(comm)
    loader = loader_of(learner)
    left = stop
    for _ in loader.batch_sampler.epochs(3):
        left -= len(train(learner, loader, left))
        if left == 0:
            break
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(learner)
    learner.close()
    for other in (comm, Communicator.single()):
        again = learner_of(other)
        psgd.load_checkpoint(again, folder)
        loader = loader_of(again)
        epochs = []
        for epoch in loader.batch_sampler.epochs(3):
            train(again, loader)
            epochs.append(epoch)
        assert epochs == list(range(stop // 4, 3))
        assert np.abs(values(again.model) - one_process(3)).max() < 1e-9
    comm.barrier()


def dropout_run(
    comm: Communicator, folder: Path, workers: int, saves: tuple[int, bool] | None
) -> np.ndarray:
    """The final model of three epochs with dropout.

    Args:
        workers: of the DataLoader, which persist.
        saves: after how many steps to save, and whether within the loop, where the next minibatch
            has been fetched; None to go on from what was saved.
    """
    torch.manual_seed(comm.rank)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(6, CLASSES).double())
    with torch.no_grad():
        model[1].weight.copy_(torch.linspace(-1, 1, 6 * CLASSES).view(CLASSES, 6))
    learner = psgd.torch.Learner(model, OPTIMIZERS["momentum"](model), psgd.DataParallelSGD(), comm)
    dataset = data()
    sampler = psgd.torch.sampler(dataset, learner, MINIBATCH, seed=3)
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator() if workers == 0 and comm.size == 3 else None,
    )
    steps = 0
    if saves is None:
        torch.manual_seed(77)
        psgd.load_checkpoint(learner, folder)
    for _ in sampler.epochs(3):
        for x, y, _numbers in loader:
            if saves == (steps, True):
                psgd.Checkpoints(folder).save(learner, background=False)
            F.cross_entropy(learner.model(x), y).backward()
            learner.step(samples=len(x))
            steps += 1
            if saves == (steps, False):
                psgd.Checkpoints(folder).save(learner, background=False)
    learner.finish()
    learner.close()
    return values(model)


@pytest.mark.threads(1)  # a process has one generator
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "saves", [(2, False), (4, False), (4, True), (6, True), (8, False)], ids=str
)
def test_training_with_dropout_resumes_bit_for_bit(comm, tmp_path, workers, saves):
    """In the midst of an epoch and at its border, after a step and before the next one; workers
    that persist draw from PyTorch's generator in the first epoch alone."""
    folder = Path(comm.allgather_object(str(tmp_path))[0])
    right = dropout_run(comm, folder, workers, saves)
    assert np.array_equal(dropout_run(comm, folder, workers, None), right)


def test_what_the_program_draws_between_is_not_taken_back(comm):
    learner = learner_of(comm)
    loader = loader_of(learner)
    train(learner, loader, 2)
    minibatches = iter(loader)  # in the midst of an epoch
    drawn = torch.rand(3)
    next(minibatches)
    assert not torch.equal(torch.rand(3), drawn)


class Grouped(psgd.data.Arrays):
    """Samples of which each three are read together, of two such groups at a time."""

    open_groups = 2

    def groups(self, indexes):
        return np.asarray(indexes) // 3


def test_samples_that_are_read_together_stay_together(comm):
    dataset = Grouped(np.zeros((SAMPLES, 6)), np.arange(SAMPLES))
    learner = learner_of(comm)
    sampler = psgd.torch.sampler(dataset, learner, MINIBATCH, seed=3)
    order, whole = order_of(dataset, 3, 0, True), []
    for begin, own in zip(range(0, SAMPLES, MINIBATCH), sampler, strict=True):
        minibatch = order[begin : begin + MINIBATCH].tolist()
        everywhere = [number for part in comm.allgather_object(own) for number in part]
        assert everywhere[: len(minibatch)] == minibatch
        x = torch.zeros(len(own), 6, dtype=torch.float64)
        F.cross_entropy(learner.model(x), torch.tensor(own) % CLASSES).backward()
        learner.step(samples=len(own))
        whole += minibatch
    assert sorted(whole) == list(range(SAMPLES))


def test_ranks_that_use_other_numbers_of_groups_disagree(comm):
    dataset = Grouped(np.zeros((SAMPLES, 6)), np.arange(SAMPLES))
    dataset.open_groups += comm.rank
    if comm.size > 1:
        with pytest.raises(UserError, match="groups of samples in use at a time must be the same"):
            psgd.torch.sampler(dataset, learner_of(comm), MINIBATCH)


def test_a_short_last_minibatch_can_be_left_out(comm):
    learner = learner_of(comm)
    loader = loader_of(learner, drop_last=True)
    for epoch in loader.batch_sampler.epochs(2):
        everywhere = comm.allgather_object(train(learner, loader))
        order = epoch_order(SAMPLES, 3, epoch, True).tolist()
        assert {n for theirs in everywhere for part in theirs for n in part} == set(order[:-1])
    assert len(loader) == 3 and learner.samples == 2 * 3 * MINIBATCH


@pytest.mark.threads(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_fetch_ahead(comm, workers):
    """Processes of the DataLoader's own; what they have fetched and nobody took is not counted."""
    learner = learner_of(comm)
    loader = loader_of(learner, workers=workers)
    train(learner, loader, most=2)
    assert learner.samples == 2 * MINIBATCH
    for _ in loader.batch_sampler.epochs(2):
        train(learner, loader)
    assert np.abs(values(learner.model) - one_process(2)).max() < 1e-9


def test_gradients_that_wait_for_a_step_keep_their_minibatches(comm):
    """Over the end of an epoch, too."""
    learner = learner_of(comm)
    loader = loader_of(learner)
    train(learner, loader, most=len(loader) - 1)
    for x, y, _ in [*loader, next(iter(loader))]:
        F.cross_entropy(learner.model(x), y).backward()
    minibatches = range(SAMPLES % MINIBATCH), range(MINIBATCH)
    own = [len(m[rank_part(len(m), comm, None)]) for m in minibatches]
    learner.step(samples=sum(own))
    assert learner.samples == SAMPLES + MINIBATCH


def test_servers_have_no_minibatches(comm):
    learner = learner_of(comm, psgd.DataParallelASGD(currency="deltas", sync_period=4))
    loader = loader_of(learner)
    for _ in loader.batch_sampler.epochs(2):
        train(learner, loader)
    learner.finish()
    assert learner.serves or learner.samples == 2 * SAMPLES
    assert np.isfinite(values(learner.model)).all()


def test_a_warm_start_has_whole_minibatches(comm):
    learner = learner_of(comm, psgd.DataParallelSGD(distributed_after=2 * MINIBATCH))
    loader = loader_of(learner)
    sizes = [len(numbers) for numbers in train(learner, loader)]
    assert sizes[:2] == [MINIBATCH] * 2
    assert sum(comm.allgather_object(sizes[2])) == MINIBATCH


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataset": 3.5}, "dataset must be a length, or have"),
        ({"dataset": 0}, "dataset=0 must be"),
        ({"minibatch_size": 0}, "minibatch_size=0 must be"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"shuffle": 2}, "shuffle=2 must be"),
        ({"minibatch_size": 11, "drop_last": True}, "minibatch_size=11 must be"),
    ],
)
def test_arguments(comm, options, text):
    given = {"dataset": 10, "minibatch_size": 2, **options}
    with pytest.raises(UserError, match=text):
        psgd.torch.sampler(given.pop("dataset"), learner_of(comm), **given)


def test_arguments_differ(comm):
    if comm.size > 1:
        with pytest.raises(UserError, match="seed must be the same on all ranks"):
            psgd.torch.sampler(10, learner_of(comm), 2, seed=comm.rank)
