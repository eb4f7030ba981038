"""A session trains a PyTorch model as the loop of one's own does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch_models import made

import parallel_sgd as psgd
from parallel_sgd.data import Arrays

pytestmark = [pytest.mark.few_ranks, pytest.mark.threads(1, 2), pytest.mark.ranks(2)]

SIZE = 12


def net() -> nn.Module:
    return made(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        dtype=torch.float32,
    )


def data() -> Arrays:
    random = np.random.default_rng(0)
    x = random.standard_normal((60, 4)).astype(np.float32)
    return Arrays(x, x[:, :3].argmax(axis=1))


def accuracy(outputs, y):
    return (outputs.argmax(1) == y).float().mean()


def values(model: nn.Module) -> np.ndarray:
    """Parameters and buffers."""
    return np.concatenate(
        [tensor.detach().numpy().ravel() for tensor in model.state_dict().values()]
    )


def learner_of(model, comm, algorithm=None, reduction="mean"):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    algorithm = algorithm or psgd.DataParallelSGD(gradient_bits=4)
    return psgd.torch.Learner(model, optimizer, algorithm, comm, reduction=reduction)


def looped(comm, algorithm=None):
    model, train = net(), TensorDataset(*map(torch.from_numpy, data().arrays()))
    with learner_of(model, comm, algorithm) as learner:
        sampler = psgd.torch.sampler(train, learner, SIZE)
        for _ in sampler.epochs(3):
            for x, y in DataLoader(train, batch_sampler=sampler):
                F.cross_entropy(model(x), y).backward()
                learner.step(samples=len(x))
        learner.finish()
    return values(model)


@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize(
    "algorithm",
    [
        psgd.DataParallelSGD(gradient_bits=4),
        psgd.DataParallelSGD(overlap=True),
        psgd.BlockMomentumSGD(sync_steps=4),
    ],
    ids=["4 bits", "overlap", "blocks"],
)
def test_it_is_the_loop(comm, algorithm, loader):
    model = net()
    with learner_of(model, comm, algorithm) as learner:
        if loader:
            train = TensorDataset(*map(torch.from_numpy, data().arrays()))
            sampler = psgd.torch.sampler(train, learner, SIZE)
            given = {"train": DataLoader(train, batch_sampler=sampler)}
        else:
            given = {"train": data(), "minibatch_size": SIZE}
        session = psgd.TrainingSession(
            learner=learner,
            objective=psgd.torch.Objective(model, F.cross_entropy, {"accuracy": accuracy}),
            epochs=3,
            test=data(),
            **given,
        )
        rows = session.run()
    assert np.array_equal(values(model), looped(comm, algorithm))
    assert [row.epoch for row in rows] == [1, 2, 3]
    x, y = map(torch.from_numpy, data().arrays())
    with torch.no_grad():
        outputs = model.eval()(x)
    assert rows[-1].metrics["test_loss"] == pytest.approx(F.cross_entropy(outputs, y).item())
    assert rows[-1].metrics["test_accuracy"] == pytest.approx(accuracy(outputs, y).item())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_added_up_from_pieces(comm, reduction, overlap):
    """Of a model without BatchNorm, to which pieces are other minibatches."""

    def trained(microbatch_size):
        model = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        algorithm = psgd.DataParallelSGD(overlap=overlap)
        with learner_of(model, comm, algorithm, reduction) as learner:

            def loss(outputs, y):
                return F.cross_entropy(outputs, y, reduction=reduction)

            rows = psgd.TrainingSession(
                learner=learner,
                objective=psgd.torch.Objective(model, loss, reduction=reduction, dtype=np.float64),
                train=data(),
                minibatch_size=16,
                epochs=2,
                test=data(),
                microbatch_size=microbatch_size,
            ).run()
        return values(model), rows[-1]

    (whole, row), (pieces, other) = trained(None), trained(3)
    assert np.abs(whole - pieces).max() < 1e-12
    assert row.train_loss == pytest.approx(other.train_loss)
    assert row.metrics["test_loss"] < 1.1  # a mean, whichever the loss is


@pytest.mark.parametrize("torchs", [False, True])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_the_loss_is_scaled_by_the_learners_scaler(comm, torchs, microbatch_size):
    """By a power of two: then nothing is rounded otherwise than without it."""

    def trained(scaler):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02) if torchs else psgd.SGD(lr=0.2)
        algorithm = psgd.DataParallelSGD(gradient_bits=4)
        with psgd.torch.Learner(model, optimizer, algorithm, comm, scaler=scaler) as learner:
            rows = psgd.TrainingSession(
                learner=learner,
                objective=psgd.torch.Objective(model, F.cross_entropy),
                train=data(),
                minibatch_size=SIZE,
                microbatch_size=microbatch_size,
                epochs=2,
            ).run()
        return values(model), rows[-1].train_loss

    scaled, loss = trained(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    unscaled, other = trained(None)
    assert np.array_equal(scaled, unscaled) and loss == other
    assert not np.array_equal(scaled, values(net()))


class Means(nn.Module):
    """Of the vectors of a sequence's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.last = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x):
        mask = torch.arange(x.values.shape[1]) < x.lengths[:, None]
        sums = (self.vectors(x.values) * mask[:, :, None]).sum(1)
        return self.last(sums / x.lengths[:, None])


def test_sequences(comm):
    random = np.random.default_rng(5)
    x = [random.integers(0, 9, length) for length in random.integers(1, 7, 30)]
    y = np.array([int(tokens.mean()) // 3 for tokens in x])

    def loss(outputs, y):
        return F.cross_entropy(outputs, y, reduction="sum")

    def source():
        return psgd.data.SequenceSource(x, y, 20, epochs=2, classes=3)

    model, other = (made(Means, dtype=torch.float32) for _ in range(2))
    with learner_of(model, comm, reduction="sum") as learner:
        objective = psgd.torch.Objective(model, loss, reduction="sum")
        test = psgd.data.SequenceArrays(x, y)
        validation = psgd.CrossValidation(data=test, batch=4)
        session = psgd.TrainingSession(
            learner=learner, objective=objective, train=source(), validation=validation
        )
        rows = session.run()
    with learner_of(other, comm, reduction="sum") as learner:
        for padded, targets in source().minibatches(learner):
            if len(targets):
                inputs = psgd.data.Padded(*map(torch.from_numpy, padded))
                loss(other(inputs), torch.from_numpy(targets)).backward()
            learner.step(samples=padded.tokens)
        learner.finish()
    assert np.array_equal(values(model), values(other))
    tokens = sum(map(len, x))
    assert rows[-1].samples == 2 * tokens
    whole = psgd.data.Padded(*map(torch.from_numpy, psgd.data.padded(x)))
    expected = loss(model(whole), torch.from_numpy(y)).item() / tokens
    assert rows[-1].metrics["validation_loss"] == pytest.approx(expected, rel=1e-5)


class Two(nn.Module):
    """Has two inputs in a list, and a third in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, pair, named):
        return self.last(torch.cat([*pair, named["last"]], dim=1))


class Nested(Dataset):
    """The rows of `data`, their inputs nested."""

    def __init__(self) -> None:
        self.x, self.y = map(torch.from_numpy, data().arrays())

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return [self.x[i, :1], self.x[i, 1:2]], {"last": self.x[i, 2:]}, self.y[i]


@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_nested_inputs(comm, microbatch_size):
    """They train as one flat input does."""

    def trained(model, train):
        with learner_of(model, comm) as learner:
            sampler = psgd.torch.sampler(train, learner, 16)  # 60 samples: the last is shorter
            rows = psgd.TrainingSession(
                learner=learner,
                objective=psgd.torch.Objective(model, F.cross_entropy),
                train=DataLoader(train, batch_sampler=sampler),
                epochs=2,
                microbatch_size=microbatch_size,
            ).run()
        return values(model), rows[-1].train_loss

    flat = made(lambda: nn.Sequential(nn.Linear(4, 3)), dtype=torch.float32)
    nested = made(Two, dtype=torch.float32)
    nested.last.load_state_dict(flat[0].state_dict())
    expected, loss = trained(flat, TensorDataset(*map(torch.from_numpy, data().arrays())))
    found, other = trained(nested, Nested())
    assert np.array_equal(found, expected) and other == loss


class TimeFirst(nn.Module):
    """Means over time, the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(x.mean(0))


def test_samples_beside_the_first_axis(comm):
    """Counted by the objective's samples=; refused on all ranks without it, or in pieces."""

    def collate(items):
        return [
            torch.stack([x for x, _ in items]).expand(7, -1, -1),
            torch.stack([y for _, y in items]),
        ]

    def run(microbatch_size=None, **options):
        model = made(TimeFirst, dtype=torch.float32)
        train = TensorDataset(*map(torch.from_numpy, data().arrays()))
        with learner_of(model, comm) as learner:
            sampler = psgd.torch.sampler(train, learner, 30)
            return psgd.TrainingSession(
                learner=learner,
                objective=psgd.torch.Objective(model, F.cross_entropy, **options),
                train=DataLoader(train, batch_sampler=sampler, collate_fn=collate),
                microbatch_size=microbatch_size,
            ).run()

    def samples(batch):
        return len(batch[1])

    assert run(samples=samples)[-1].samples == 60
    with pytest.raises(psgd.UserError, match=r"batch\[0\] has 7, and batch\[1\] .*samples="):
        run()
    with pytest.raises(psgd.UserError, match=r"microbatch_size=2 must be None .*batch\[0\] has 7"):
        run(2, samples=samples)


def test_a_source_and_the_objective_count_the_same(comm):
    """A mean over sequences is no mean over tokens."""
    x, y = [np.arange(n) for n in (1, 2, 3, 4)], [0, 1, 2, 0]

    def run(**options):
        model = made(Means, dtype=torch.float32)
        with learner_of(model, comm) as learner:
            return psgd.TrainingSession(
                learner=learner,
                objective=psgd.torch.Objective(model, F.cross_entropy, **options),
                train=psgd.data.SequenceSource(x, y, 4, unit="sequences", classes=3),
                test=psgd.data.SequenceArrays(x, y),
            ).run()

    row = run(samples=lambda batch: len(batch[1]))[-1]
    inputs = psgd.data.Padded(*map(torch.from_numpy, psgd.data.padded(x)))
    before = F.cross_entropy(made(Means, dtype=torch.float32)(inputs), torch.tensor(y)).item()
    assert (row.samples, row.train_loss) == (4, pytest.approx(before, rel=1e-5))
    assert 0 < row.metrics["test_loss"] < before
    with pytest.raises(psgd.UserError, match=r"must have one number of samples: batch\[0\] has"):
        run()
    with pytest.raises(psgd.UserError, match=r"source counts \d samples .*, and the objective \d+"):
        run(samples=lambda batch: batch[0].tokens)


LOSSES = {
    "a number": (lambda outputs, y: 0.5, r"loss must return a tensor of one value, .* a float"),
    "a vector": (
        lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"),
        r"loss must return a tensor of one value, .* a torch\.Tensor of shape \[\d+\]",
    ),
    "without a gradient": (lambda outputs, y: outputs.sum().detach(), r"without a gradient"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_none(comm, name):
    """On one rank alone."""
    loss, text = LOSSES[name]
    model, last = net(), comm.size - 1
    with learner_of(model, comm) as learner:
        objective = psgd.torch.Objective(model, loss if comm.rank == last else F.cross_entropy)
        session = psgd.TrainingSession(learner=learner, objective=objective, train=data())
        with pytest.raises(psgd.UserError, match=rf"{text}.*on rank {last}"):
            session.run()


def test_a_rollback_takes_the_modules_state_along(comm, tmp_path):
    """Buffers and the optimizer's moments too: the end is the loop's of two epochs."""
    model = net()
    with learner_of(model, comm) as learner:
        destroyed = []

        def destroy(row):
            if row.epoch == 2:
                destroyed.append(row)
                learner.local_step.torch_optimizers[0].param_groups[0]["lr"] = 1e3

        validation = psgd.CrossValidation(data=data(), restore_best=True)
        psgd.TrainingSession(
            learner=learner,
            objective=psgd.torch.Objective(model, F.cross_entropy),
            train=data(),
            minibatch_size=SIZE,
            epochs=4,
            validation=validation,
            callbacks=[destroy],
        ).run()
    assert destroyed
    two = net()
    with learner_of(two, comm) as learner:
        psgd.TrainingSession(
            learner=learner,
            objective=psgd.torch.Objective(two, F.cross_entropy),
            train=data(),
            minibatch_size=SIZE,
            epochs=2,
            validation=psgd.CrossValidation(data=data()),
        ).run()
    assert np.array_equal(values(model), values(two))


def test_what_is_refused(comm):
    model, other = net(), net()
    with learner_of(model, comm) as learner:
        for objective, message in [
            (psgd.torch.Objective(other, F.cross_entropy), "must be the model of the learner"),
            (psgd.torch.Objective(model, F.cross_entropy, reduction="sum"), "reduction='sum'"),
        ]:
            session = psgd.TrainingSession(learner=learner, objective=objective, train=data())
            with pytest.raises(psgd.UserError, match=message):
                session.run()
    with pytest.raises(psgd.UserError, match="model must be a torch"):
        psgd.torch.Objective(3, F.cross_entropy)
    for options, message in [
        ({"loss": "cross_entropy"}, "loss must be a function"),
        ({"metrics": [1]}, r"metrics=\[1\] must be a mapping from names to functions"),
        ({"metrics": {"accuracy": 1}}, r"metrics\['accuracy'\] must be a function of outputs and"),
        ({"samples": 3}, "samples must be a function of a batch"),
        ({"dtype": "int"}, "dtype='int' must be a float type"),
        ({"classes": "3"}, "classes='3' must be a whole number"),
    ]:
        with pytest.raises(psgd.UserError, match=message):
            psgd.torch.Objective(model, **{"loss": F.cross_entropy, **options})


class Relative(torch.optim.Optimizer):
    """One that chooses its steps by itself, as Adafactor can."""

    def __init__(self, params, lr=None):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * 1e-3)


@pytest.mark.parametrize(
    "algorithm",
    [psgd.DataParallelSGD(), psgd.BlockMomentumSGD(sync_steps=2), psgd.DiLoCo(sync_steps=2)],
    ids=["every step", "blocks", "DiLoCo"],
)
def test_an_optimizer_without_a_rate(comm, tmp_path, algorithm):
    model = net()
    before = values(model)

    def session(epochs, **options):
        with psgd.torch.Learner(model, Relative(model.parameters()), algorithm, comm) as learner:
            return psgd.TrainingSession(
                learner=learner,
                objective=psgd.torch.Objective(model, F.cross_entropy),
                train=data(),
                minibatch_size=SIZE,
                epochs=epochs,
                checkpoints=psgd.CheckpointConfig(folder=str(folder)),
                **options,
            ).run()

    folder = comm.allgather_object(str(tmp_path))[0]
    assert session(2)[-1].learning_rate is None
    rows = session(3)  # goes on from the checkpoint, whose rows have none
    assert [row.samples for row in rows] == [60, 120, 180]
    assert not np.array_equal(values(model), before)
    assert "learning_rate" not in rows[-1].as_dict()
    for options in (
        {"rate_follows": "linear"},
        {"auto_learning_rate": psgd.AutoLearningRate()},
        {"not_finite": "reduce"},
    ):
        message = r"must not be given: it changes .*optimizer Relative has none \(lr=None"
        with pytest.raises(psgd.UserError, match=message):
            session(4, **options)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (psgd.SlowMo(sync_steps=2), "SlowMo divides by the local learning rate, but optimizer Re"),
        (
            psgd.DataParallelASGD(currency="deltas", servers=0, ramp_minibatches=2),
            "ramp_minibatches=2 changes the learning rate, but optimizer Relative has none",
        ),
    ],
    ids=["SlowMo", "ramp"],
)
@pytest.mark.filterwarnings("ignore:servers=0")
def test_algorithms_that_need_a_rate(comm, algorithm, message):
    model = net()
    with pytest.raises(psgd.UserError, match=message):
        psgd.torch.Learner(model, Relative(model.parameters()), algorithm, comm)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
def test_a_factor_on_pytorchs_rates_is_the_rate(comm, kind, reduction):
    """To the last bit, whether rates are numbers or tensors, which stay what they are."""

    def trained(*, scheduled):
        model = net()
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": kind(0.25)}, {"params": others}]
        optimizer = torch.optim.Adam(groups, lr=kind(0.125))
        rates = [group["lr"] for group in optimizer.param_groups]
        with psgd.torch.Learner(
            model, optimizer, psgd.SlowMo(sync_steps=2), comm, reduction=reduction
        ) as learner:
            for step in range(8):
                factor = 1 + 2 * (step >= 4)
                if not scheduled:
                    learner.local_step.state.lr_factor = float(factor)
                elif factor > 1:
                    for group, rate in zip(optimizer.param_groups, rates, strict=True):
                        group["lr"] = rate * factor
                random = np.random.default_rng([5, step, comm.rank])
                x = torch.from_numpy(random.standard_normal((4, 4)).astype(np.float32))
                y = torch.from_numpy(random.integers(0, 3, 4))
                F.cross_entropy(model(x), y, reduction=reduction).backward()
                learner.step(samples=4)
            learner.finish()
            if not scheduled:
                assert all(
                    group["lr"] is rate
                    for group, rate in zip(optimizer.param_groups, rates, strict=True)
                )
        return values(model)

    assert np.array_equal(trained(scheduled=True), trained(scheduled=False))
