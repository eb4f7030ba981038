"""Every algorithm with PyTorch's models: trains, and resumes bit for bit at any step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import MODELS, OPTIMIZERS, batch, made, values

import parallel_sgd as psgd
from parallel_sgd import Communicator, UserError

pytestmark = [
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
    pytest.mark.threads(2),
    pytest.mark.ranks(4),
]

STEPS, STOP = 7, 4

ALGORITHMS = {
    "32 bit": psgd.DataParallelSGD(),
    "1 bit": psgd.DataParallelSGD(gradient_bits=1),
    "4 bit, overlap": psgd.DataParallelSGD(gradient_bits=4, overlap=True),
    "double buffering": psgd.DataParallelSGD(gradient_bits=1, double_buffering=True),
    "PowerSGD": psgd.PowerSGD(rank=1),
    "model averaging": psgd.ModelAveragingSGD(sync_steps=3),
    "block momentum": psgd.BlockMomentumSGD(sync_steps=3, gradient_bits=8),
    "SlowMo": psgd.SlowMo(sync_steps=3, inner_state="zero"),
    "DiLoCo": psgd.DiLoCo(sync_steps=3, inner_state="average"),
    "servers": psgd.DataParallelASGD(mode="sync", currency="deltas", sync_steps=2),
}


class WithDropout(nn.Sequential):
    """Whose result depends on PyTorch's random generator, and with BatchNorm."""

    inputs = (6,)

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 5))


def learner_of(model: nn.Module, comm: Communicator, optimizer: str, algorithm: Any) -> Any:
    return psgd.torch.Learner(model, OPTIMIZERS[optimizer](model), algorithm, comm)


def train(learner: Any, first: int, last: int, model: Any = None) -> None:
    if learner.serves:
        return
    model = model or learner.model
    for step in range(first, last):
        x, y = batch(model, learner.comm.rank, step, 3)
        F.cross_entropy(model(x), y).backward()
        learner.step(samples=3)


def folder_of_all(comm: Communicator, path: Path) -> Path:
    return Path(comm.allgather_object(str(path))[0])


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("model", "optimizer"), [("mlp", "momentum"), ("attention", "adamw"), ("convnet", "groups")]
)
def test_resumes_bit_for_bit(comm, tmp_path, name, model, optimizer):
    """Every algorithm trains, and goes on in another learner as if nothing had happened."""
    folder = folder_of_all(comm, tmp_path)
    one, two = (made(MODELS[model], dtype=torch.float32) for _ in range(2))
    start = values(one)
    first = learner_of(one, comm, optimizer, ALGORITHMS[name])
    train(first, 0, STOP)
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(first)
    train(first, STOP, STEPS)
    first.finish()
    second = learner_of(two, comm, optimizer, ALGORITHMS[name])
    psgd.load_checkpoint(second, folder)
    assert second.serves or second.samples == STOP * 3 * second.comm.size
    train(second, STOP, STEPS)
    second.finish()
    assert np.array_equal(values(one), values(two))
    assert not np.array_equal(values(one), start)
    for (buffer, own), (_, again) in zip(one.named_buffers(), two.named_buffers(), strict=True):
        assert torch.equal(own, again), buffer
    for learner in (first, second):
        learner.close()


@pytest.mark.parametrize("stop", range(4))
@pytest.mark.threads(1)  # a process has one generator, and a thread could not tell whose turn it is
def test_random_generators_go_on(comm, tmp_path, stop):
    folder = folder_of_all(comm, tmp_path)
    torch.manual_seed(100 + comm.rank)
    one = made(WithDropout, dtype=torch.float32)
    first = learner_of(one, comm, "adamw", psgd.DataParallelSGD(gradient_bits=1))
    train(first, 0, stop)
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(first)
    train(first, stop, STEPS)
    two = made(WithDropout, dtype=torch.float32, seed=7)
    second = learner_of(two, comm, "adamw", psgd.DataParallelSGD(gradient_bits=1))
    torch.manual_seed(0)
    psgd.load_checkpoint(second, folder)
    train(second, stop, STEPS)
    assert np.array_equal(values(one), values(two))


class Annealed(nn.Linear):
    """Whose outputs grow by call; `get_extra_state` alone knows of it."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x) / max(0.1, 1 - 0.1 * self.calls)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, 0: (torch.tensor([self.calls], dtype=torch.bfloat16),)}

    def set_extra_state(self, state: Any) -> None:
        assert int(state[0][0]) == state["calls"]
        self.calls = state["calls"]


class Counting(nn.Module):
    """Which adds to the `state_dict` by methods of its own."""

    seen = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += float(x.detach().abs().mean())
        return x * (1 + self.seen / 10)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "seen"] = self.seen

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.seen = state_dict[prefix + "seen"]


class Remembering(nn.Sequential):
    inputs = (6,)

    def __init__(self) -> None:
        super().__init__(Annealed(6, 8), Counting(), Annealed(8, 5))


class OddBuffers(nn.Module):
    """Of every dtype; each forward pass changes all of them, on each rank otherwise."""

    inputs = (6,)
    DTYPES = "float16 bfloat16 float32 float64 float8_e4m3fn complex64 complex128 bool uint8 int8"
    DTYPES += " int16 int32 int64"

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 5)
        for name in self.DTYPES.split():
            dtype = getattr(torch, name)
            self.register_buffer(f"{name}_six", torch.zeros(2, 3, dtype=dtype))
            self.register_buffer(f"{name}_none", torch.zeros(0, 3, dtype=dtype))
            self.register_buffer(f"{name}_one", torch.zeros((), dtype=dtype))
        self.register_buffer("turned", torch.zeros(3, 2).T)
        self.register_buffer("leaf", torch.zeros(2, 3, requires_grad=True))
        self.register_buffer("own", torch.zeros(2, 3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for buffer in self.buffers():
                if buffer.numel():
                    buffer.copy_(x.detach()[:2, :3] if buffer.dim() else x.detach()[0, 0])
        out: torch.Tensor = self.last(x)
        return out


class Normed(nn.Module):
    """With cumulative averages, parametrizations, both kinds of weight_norm, and tied weights."""

    inputs = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=None)
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.third = nn.Linear(6, 6)
        self.fourth = nn.Linear(6, 6)
        self.fourth.weight = self.third.weight
        self.again = self.norm
        self.last = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.third(torch.tanh(self.second(self.first(self.norm(x))))))
        out: torch.Tensor = self.last(self.fourth(x))
        return out


def built(build: Any, seed: int) -> nn.Module:
    """A model with initial values that no other thread's draws decide."""
    model: nn.Module = build()
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.from_numpy(random.uniform(-0.4, 0.4, p.shape)))
    return model


def bits_of(state: Any) -> Any:
    """A `state_dict`, as text that tells every bit."""
    if isinstance(state, torch.Tensor):
        plain = state.detach().contiguous().flatten()
        return state.dtype, state.shape, plain.view(torch.uint8).tolist() if len(plain) else []
    if isinstance(state, dict):
        return {key: bits_of(value) for key, value in state.items()}
    return [bits_of(value) for value in state] if isinstance(state, tuple) else repr(state)


@pytest.mark.parametrize(
    ("build", "compiled"),
    [(Remembering, False), (Remembering, True), (OddBuffers, False), (Normed, False)],
)
@pytest.mark.threads(1)  # of which there is one generator
def test_a_model_resumes_as_by_pytorchs_own_save_and_load(comm, tmp_path, build, compiled):
    """Bit for bit, whatever its state_dict has."""
    folder, algorithm = folder_of_all(comm, tmp_path), psgd.DataParallelSGD()
    one, two, three = (built(build, seed) for seed in (0, 7, 8))
    torch.manual_seed(comm.rank)
    first = learner_of(one, comm, "momentum", algorithm)
    train(first, 0, STOP)
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(first)
    three.load_state_dict(one.state_dict())
    saved = bits_of(one.state_dict())
    assert saved == bits_of(three.state_dict())
    train(first, STOP, STEPS)
    assert bits_of(one.state_dict()) != saved
    seen = torch.compile(two, backend="eager") if compiled else two
    second = learner_of(seen, comm, "momentum", algorithm)
    psgd.load_checkpoint(second, folder)
    assert bits_of(two.state_dict()) == saved
    train(second, STOP, STEPS, two)
    assert bits_of(one.state_dict()) == bits_of(two.state_dict())
    if build is OddBuffers:  # PyTorch does not keep it, either
        assert not built(build, 7).own.any() and two.own.any()


def test_odd_buffers_become_means_on_another_number_of_ranks(comm, tmp_path):
    folder, algorithm = folder_of_all(comm, tmp_path), psgd.DataParallelSGD()
    one = built(OddBuffers, 0)
    rule = OPTIMIZERS["momentum"](one)
    learner = psgd.torch.Learner(one, rule, algorithm, comm, buffers="mean")
    assert comm.size > 1
    train(learner, 0, STOP)
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(learner)
    of_all = comm.allgather_object(
        {name: b.detach().to(torch.complex128).numpy() for name, b in one.named_buffers()}
    )
    if comm.rank == 0:
        two = built(OddBuffers, 3)
        psgd.load_checkpoint(learner_of(two, Communicator.single(), "momentum", algorithm), folder)
        for name, buffer in two.named_buffers():
            mean = np.mean([theirs[name] for theirs in of_all], axis=0)
            own = buffer.detach().to(torch.complex128).numpy()
            if name == "own":
                assert not own.any()
            elif buffer.is_floating_point() or buffer.is_complex():
                tolerance = 0.07 if "float8" in name else 0.01
                assert np.allclose(own, mean, rtol=tolerance, atol=tolerance), name
            else:
                assert np.array_equal(own, of_all[0][name]), name
    with learner.evaluation():  # the mean in the same way
        for name, buffer in one.named_buffers():
            if buffer.is_complex():
                mean = np.mean([theirs[name] for theirs in of_all], axis=0)
                assert np.allclose(buffer.numpy(), mean, atol=1e-6), name
    comm.barrier()


class Opaque(Annealed):
    def get_extra_state(self) -> Any:
        return {"calls": [object()]}


def test_an_extra_state_that_cannot_come_back_is_refused_by_name(comm, tmp_path):
    model = built(lambda: nn.Sequential(nn.Linear(6, 6), Opaque(6, 5)), 0)
    learner = learner_of(model, comm, "momentum", psgd.DataParallelSGD())
    checkpoints = psgd.Checkpoints(folder_of_all(comm, tmp_path))
    with pytest.raises(
        UserError, match=r"model.state_dict\(\)\['1._extra_state'\]\['calls'\]\[0\]="
    ):
        checkpoints.save(learner)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adagrad"])
def test_another_number_of_ranks_takes_over(comm, tmp_path, optimizer):
    """With the mean of what the ranks had: in data-parallel SGD all have the same."""
    folder = folder_of_all(comm, tmp_path)
    algorithm = psgd.DataParallelSGD(gradient_bits=4)
    one = made(MODELS["convnet"], dtype=torch.float32)
    learner = learner_of(one, comm, optimizer, algorithm)
    train(learner, 0, STOP)
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(learner)
    lost = np.sum(comm.allgather_object(learner.state.exchange.residuals.worker_error), axis=0)
    means = np.mean(comm.allgather_object(one.norm.running_mean.numpy()), axis=0)
    if comm.rank == 0:
        two = made(MODELS["convnet"], dtype=torch.float32, seed=3)
        alone = learner_of(two, Communicator.single(), optimizer, algorithm)
        psgd.load_checkpoint(alone, folder)
        assert np.array_equal(values(one), values(two))
        own, again = (m.local_step.state for m in (learner, alone))
        assert own.buffers.keys() == again.buffers.keys() != set()
        for key, vector in own.buffers.items():
            assert np.array_equal(vector, again.buffers[key]) and vector.any()
        residuals = alone.state.exchange.residuals
        assert np.allclose(residuals.worker_error, lost, atol=1e-6)
        assert np.allclose(two.norm.running_mean.numpy(), means, atol=1e-6)
        train(alone, STOP, STEPS)
        assert np.isfinite(values(two)).all()
    comm.barrier()


def test_what_a_checkpoint_is_not_for(comm, tmp_path):
    folder = folder_of_all(comm, tmp_path)
    model = made(MODELS["convnet"])
    model.last.requires_grad_(False)

    def made_of(model: nn.Module, rule: Any, **options: Any) -> Any:
        trained = [p for p in model.parameters() if p.requires_grad]
        return psgd.torch.Learner(
            model, rule(trained, **options), psgd.DataParallelSGD(), comm, buffers="local"
        )

    learner = made_of(model, torch.optim.SGD, lr=0.1)
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(learner)
    other = made(MODELS["convnet"], seed=1)
    other.last.requires_grad_(False)
    for make, text in (
        (lambda: made_of(other, torch.optim.SGD, lr=0.1), "other frozen parameters"),
        (lambda: made_of(made(MODELS["convnet"]), torch.optim.SGD, lr=0.1), "another model"),
        (lambda: made_of(_frozen(), torch.optim.AdamW), "it was kind='SGD', and is 'AdamW'"),
    ):
        with pytest.raises(UserError, match=text):
            psgd.load_checkpoint(make(), folder)
    again = made_of(_frozen(), torch.optim.SGD, lr=0.7)
    psgd.load_checkpoint(again, folder)
    assert again.local_step.lr == 0.1  # a scheduler's doing, which goes on


def _frozen() -> nn.Module:
    model = made(MODELS["convnet"])
    model.last.requires_grad_(False)
    return model
