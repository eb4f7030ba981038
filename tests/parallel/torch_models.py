"""Small PyTorch models, data that differ on every rank, and what one process makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import parallel_sgd as psgd
from parallel_sgd import Communicator

CLASSES = 5


def made(build: Callable[[], nn.Module], seed: int = 0, dtype: Any = torch.float64) -> nn.Module:
    """A model with the same initial values wherever it is made: PyTorch's own would depend on what
    other threads draw from its generator at the time."""
    model = build().to(dtype)
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.from_numpy(random.uniform(-0.4, 0.4, p.shape)))
    return model


class MLP(nn.Sequential):
    inputs = (6,)

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class ConvNet(nn.Module):
    """With a residual branch, and BatchNorm."""

    inputs = (1, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.first(x)))
        h = h + self.second(h)
        out: torch.Tensor = self.last(h.mean(dim=(2, 3)))
        return out


class Recurrent(nn.Module):
    inputs = (4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.lstm(x)[0][:, -1])
        return out


class Attention(nn.Module):
    """A transformer's layer, with tied weights: what reads the bytes in writes the classes out."""

    inputs = (4,)

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Embedding(CLASSES, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.write = nn.Linear(8, CLASSES, bias=False)
        self.write.weight = self.read.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.write(self.layer(self.read(x)).mean(dim=1))
        return out


class Branches(nn.Module):
    """Of which a minibatch uses the first, or the second; `never` is not used at all."""

    inputs = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)])
        self.never = nn.Linear(3, 3)
        self.which = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.branches[self.which](x)
        return out


MODELS: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "convnet": ConvNet,
    "lstm": Recurrent,
    "attention": Attention,
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1
    ),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
    "groups": lambda model: torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.3},
        ],
        lr=0.1,
        momentum=0.5,
    ),
}


def batch(model: nn.Module, rank: int, step: int, samples: int) -> tuple[Any, torch.Tensor]:
    """Other samples on every rank, in every step."""
    random = np.random.default_rng([3, rank, step])
    shape = (samples, *model.inputs)
    if isinstance(model, Attention):
        x = torch.from_numpy(random.integers(0, CLASSES, shape))
    else:
        x = torch.from_numpy(random.standard_normal(shape)).to(next(model.parameters()).dtype)
    return x, torch.from_numpy(random.integers(0, CLASSES, samples))


def joined(model: nn.Module, step: int, counts: Sequence[int]) -> tuple[Any, torch.Tensor]:
    """The minibatches of all ranks as one."""
    parts = [batch(model, rank, step, n) for rank, n in enumerate(counts) if n]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))  # type: ignore[return-value]


def counts_of(ranks: int, step: int) -> list[int]:
    """Samples of each rank: uneven, and now and then a rank has none."""
    return [(2 * rank + step) % 4 + (ranks == 1) for rank in range(ranks)]


def values(model: nn.Module) -> np.ndarray:
    """All trainable parameters, as one vector."""
    flat = [p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]
    return torch.cat(flat).numpy().copy()


def learner_of(
    model: nn.Module,
    comm: Communicator,
    optimizer: str = "momentum",
    algorithm: Any = None,
    **options: Any,
) -> Any:
    return psgd.torch.Learner(
        model, OPTIMIZERS[optimizer](model), algorithm or psgd.DataParallelSGD(), comm, **options
    )


def train(learner: Any, step: int, samples: int, **how: Any) -> None:
    if samples:
        x, y = batch(learner.model, learner.comm.rank, step, samples)
        F.cross_entropy(learner.model(x), y, **how).backward()
    learner.step(samples=samples)
