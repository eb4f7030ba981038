"""PyTorch's models on a GPU: arrays are CuPy's, and the results are those of the CPU.

All ranks share one GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import MODELS, OPTIMIZERS, batch, counts_of, joined, made

import parallel_sgd as psgd
from parallel_sgd.kernels import array_module
from parallel_sgd.torch.arrays import as_array, as_tensor

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
    pytest.mark.threads(2),
    pytest.mark.ranks(2),
]

STEPS = 8

ALGORITHMS = {
    "32 bit": psgd.DataParallelSGD(),
    "32 bit, overlap": psgd.DataParallelSGD(overlap=True, bucket_values=50),
    "1 bit": psgd.DataParallelSGD(gradient_bits=1),
    "4 bit, overlap": psgd.DataParallelSGD(gradient_bits=4, overlap=True),
    "double buffering": psgd.DataParallelSGD(gradient_bits=1, double_buffering=True),
    "model averaging": psgd.ModelAveragingSGD(sync_steps=3),
    "block momentum": psgd.BlockMomentumSGD(sync_steps=3, gradient_bits=8),
    "SlowMo": psgd.SlowMo(sync_steps=3, inner_state="zero"),
    "DiLoCo": psgd.DiLoCo(sync_steps=3, inner_state="average"),
}


class Linear(nn.Module):
    """The loss of which is its parameters times the samples: these are the gradient, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3000).reshape(60, 50))
        self.bias = nn.Parameter(torch.linspace(0, 1, 50))


def linear_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    random = np.random.default_rng([5, rank, step])
    parts = [
        (p * torch.from_numpy(random.standard_normal(p.shape, np.float32)).to(p.device)).sum()
        for p in model.parameters()
    ]
    return sum(parts, start=torch.zeros((), device=parts[0].device))


def on_gpu(name: str, seed: int = 0, dtype: Any = torch.float64) -> nn.Module:
    return made(MODELS[name], seed, dtype).to("cuda")


def train(learner: Any, step: int, samples: int, **how: Any) -> None:
    if samples:
        x, y = batch(learner.model, learner.comm.rank, step, samples)
        F.cross_entropy(learner.model(x.cuda()), y.cuda(), **how).backward()
    learner.step(samples=samples)


def values(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()]).numpy().copy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_tensors_and_arrays_share_memory(comm, dtype):
    tensor = torch.arange(12, device="cuda").reshape(3, 4).to(dtype)
    array = as_array(tensor.T)
    assert array_module(array).__name__ == "cupy" and array.shape == (4, 3)
    array[1, 2] = 99
    assert tensor[2, 1].item() == 99
    assert as_tensor(array).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_as_on_the_cpu(comm, name):
    """To the last bit, with an optimizer of our own."""
    trained = []
    for device in ("cpu", "cuda"):
        model = Linear().to(device)
        learner = psgd.torch.Learner(
            model, psgd.MomentumSGD(lr=0.1), ALGORITHMS[name], comm, reduction="sum"
        )
        for step in range(STEPS):
            linear_loss(model, comm.rank, step).backward()
            learner.step(samples=1)
        learner.finish()
        learner.close()
        trained.append(values(model))
    assert np.array_equal(*trained)


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("name", "optimizer"), [("mlp", "groups"), ("attention", "adamw"), ("lstm", "momentum")]
)
def test_as_one_process(comm, name, optimizer, overlap):
    alone, model = on_gpu(name), on_gpu(name, seed=comm.rank)
    own = OPTIMIZERS[optimizer](alone)
    algorithm = psgd.DataParallelSGD(overlap=overlap, bucket_values=50)
    learner = psgd.torch.Learner(model, OPTIMIZERS[optimizer](model), algorithm, comm)
    for step in range(STEPS):
        counts = counts_of(comm.size, step)
        x, y = joined(alone, step, counts)
        own.zero_grad()
        F.cross_entropy(alone(x.cuda()), y.cuda()).backward()
        own.step()
        train(learner, step, counts[comm.rank])
        assert np.abs(values(model) - values(alone)).max() < 1e-9


def test_on_a_stream_of_its_own(comm):
    """What else is on the model's stream comes before the step, and what follows after it."""
    trained = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        model = Linear().to("cuda")
        for overlap in (False, True):
            learner = psgd.torch.Learner(
                model,
                psgd.SGD(lr=0.1),
                psgd.DataParallelSGD(gradient_bits=1, overlap=overlap),
                comm,
                reduction="sum",
            )
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for step in range(STEPS):
                    loss = linear_loss(model, comm.rank, step)
                    torch.cuda._sleep(5_000_000)  # the gradient is late
                    loss.backward()
                    learner.step(samples=1)
                learner.finish()
            learner.close()
        stream.synchronize()
        trained.append(values(model))
    assert np.array_equal(*trained)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("model", "optimizer"), [("mlp", "momentum"), ("attention", "adamw"), ("convnet", "groups")]
)
def test_resumes_bit_for_bit(comm, tmp_path, monkeypatch, name, model, optimizer):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    folder = Path(comm.allgather_object(str(tmp_path))[0])

    def learner_of(seed: int) -> Any:
        module = on_gpu(model, seed, torch.float32)
        return psgd.torch.Learner(module, OPTIMIZERS[optimizer](module), ALGORITHMS[name], comm)

    first = learner_of(0)
    for step in range(STEPS):
        if step == 4:
            with psgd.Checkpoints(folder) as checkpoints:
                checkpoints.save(first)
        train(first, step, 3)
    first.finish()
    second = learner_of(1)
    psgd.load_checkpoint(second, folder)
    for step in range(4, STEPS):
        train(second, step, 3)
    second.finish()
    again = second.model.state_dict()
    for key, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, again[key]), key
    for learner in (first, second):
        learner.close()


@pytest.mark.parametrize("bits", [32, 1])
def test_an_overflow_on_one_rank_skips_the_step_on_all(comm, bits):
    model = made(MODELS["mlp"], dtype=torch.float32).to("cuda")
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    learner = psgd.torch.Learner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        psgd.DataParallelSGD(gradient_bits=bits),
        comm,
        scaler=scaler,
        clip_norm=1.0,
    )
    losses = []
    for step in range(12):
        x, y = batch(model, comm.rank, 0, 8)
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        before = values(model)
        if step == 5 and comm.rank == comm.size - 1:
            next(iter(model.parameters())).grad.view(-1)[0] = float("inf")
        learner.step(samples=8)
        assert np.array_equal(values(model), before) == (step == 5)
        losses.append(loss.item())
    assert scaler.get_scale() == 128 and losses[-1] < losses[0]


@pytest.mark.parametrize("buffers", ["mean", "first"])
def test_evaluation(comm, buffers):
    """Metrics of all ranks' samples, with BatchNorm's statistics in common."""
    model = on_gpu("convnet")
    learner = psgd.torch.Learner(
        model, OPTIMIZERS["momentum"](model), psgd.DataParallelSGD(), comm, buffers=buffers
    )
    for step in range(3):
        train(learner, step, 4)
    own = [batch(model, comm.rank, step, 3 + comm.rank) for step in (100, 101)]

    def score(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"loss": F.cross_entropy(model(x), y)}

    means = learner.evaluate([(x.cuda(), y.cuda()) for x, y in own], score)
    assert len({*comm.allgather_object(means["loss"])}) == 1
    statistics = model.norm.running_mean.cpu().numpy()
    assert all(np.array_equal(statistics, s) for s in comm.allgather_object(statistics))
