"""What the tests of all trainers need."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

RANKS = 2


def everywhere(value: Any) -> list[Any]:
    """The value of every rank, on all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def values_of(model: torch.nn.Module) -> torch.Tensor:
    """All parameters, after a check that they are the same on all ranks."""
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(torch.equal(values, other) for other in everywhere(values))
    return values


def total(states: list[Any]) -> dict[str, torch.Tensor]:
    """The sum of all ranks' residuals, by parameter."""
    sums: dict[str, torch.Tensor] = {}
    for state in states:
        for name, one in state["residuals"].items():
            parameter = sums.setdefault(name, torch.zeros_like(one["worker_error"]))
            parameter += one["worker_error"]
            begin = one["owner_begin"]
            parameter[begin : begin + one["owner_error"].numel()] += one["owner_error"]
    return sums
