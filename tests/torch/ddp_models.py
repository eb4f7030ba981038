"""Models, minibatches and training of the jobs with a DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES = 5
SMALL_MB = 0.004  #: of a bucket: a layer or two


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return Sequential(Linear(16, 40), ReLU(), Linear(40, 40), ReLU(), Linear(40, CLASSES))


class Branches(torch.nn.Module):
    """Ranks use one of two layers by their number; no rank uses the third."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.last = Linear(16, 30), Linear(30, CLASSES)
        self.branches = torch.nn.ModuleList(Linear(30, 30) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(self.branches[dist.get_rank() % 2](hidden).relu())


class Mixed(torch.nn.Module):
    """Float32, but for one layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.dtype, self.one, self.other = dtype, Linear(16, 8), Linear(8, CLASSES).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x).to(self.dtype)).float()


def minibatch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank alone."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(12, 16, generator=generator)
    return x, torch.randint(0, CLASSES, (12,), generator=generator)


def wrapped(model: Callable[[], torch.nn.Module], **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model(), **{"bucket_cap_mb": SMALL_MB, **options})


def trained(
    ddp: Any, steps: range = range(4), *, accumulated: int = 1, optimizer: Any = None
) -> list[float]:
    """The losses of this rank."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(accumulated):
            x, y = minibatch(accumulated * step + part)
            with nullcontext() if part == accumulated - 1 else ddp.no_sync():
                loss = cross_entropy(ddp(x), y)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def values_of(model: torch.nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def gathered(item: Any, group: Any = None) -> list[Any]:
    """Of all ranks."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, item, group=group)
    return found


def equal_on_all(model: torch.nn.Module, group: Any = None) -> bool:
    return len({*gathered(values_of(model).tobytes(), group)}) == 1


def residuals_of(state: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of a rank's saved state, by parameter."""
    found = {}
    for name, one in state["residuals"].items():
        found[name] = one["worker_error"].numpy().astype(float)
        begin, owner = one["owner_begin"], one["owner_error"].numpy()
        found[name][begin : begin + owner.size] += owner
    return found


def flat(arrays: dict[str, np.ndarray], module: torch.nn.Module) -> np.ndarray:
    """A vector of all parameters; zeros for those without an array."""
    named = module.named_parameters()
    return np.concatenate([arrays.get(name, np.zeros(p.numel())).ravel() for name, p in named])


def summed(arrays: dict[str, np.ndarray], module: torch.nn.Module) -> np.ndarray:
    """The sum of the vectors of all ranks."""
    return np.sum(gathered(flat(arrays, module)), axis=0)


def gradients_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Of this rank, by parameter."""
    return {
        name: p.grad.numpy().astype(float)
        for name, p in module.named_parameters()
        if p.grad is not None
    }
