"""PyTorch's models by the learner, step by step beside plain DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_models import MODELS, OPTIMIZERS, Branches, batch, made, values

import parallel_sgd as psgd
from parallel_sgd import Communicator

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.ranks(2, 4)]

STEPS, SAMPLES = 50, 4
CLIP = 0.5


class ByRank(Branches):
    """Of whose branches a rank uses one, and in some steps all ranks the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.which = int(x.sum() > 0)
        return super().forward(x)


CASES: dict[str, dict[str, Any]] = {
    **{name: {"model": model} for name, model in MODELS.items()},
    "overlap": {"model": MODELS["lstm"], "overlap": True},
    "adamw": {"model": MODELS["attention"], "optimizer": "adamw", "dtype": torch.float64},
    "groups": {"model": MODELS["mlp"], "optimizer": "groups"},
    "accumulated": {"model": MODELS["mlp"], "parts": 3},
    "accumulated, overlap": {"model": MODELS["mlp"], "parts": 3, "overlap": True},
    "clipped": {"model": MODELS["mlp"], "clip": CLIP},
    "unused": {"model": ByRank, "unused": True},
    "unused, adamw": {
        "model": ByRank,
        "unused": True,
        "optimizer": "adamw",
        "dtype": torch.float64,
    },
    "bfloat16": {"model": MODELS["mlp"], "amp": torch.bfloat16},
    "float16, scaled": {"model": MODELS["mlp"], "amp": torch.float16, "scale": 2.0**24},
}


def trained(
    comm: Communicator,
    model: nn.Module,
    forward: nn.Module,
    update: Callable[[int], None],
    case: dict[str, Any],
    apart: Callable[[], Any],
    scaler: Any,
) -> list[np.ndarray]:
    """The parameters after every step."""
    trajectory, parts = [], case.get("parts", 1)
    for step in range(STEPS):
        for part in range(parts):
            x, y = batch(model, comm.rank, parts * step + part, SAMPLES)
            with nullcontext() if part == parts - 1 else apart():
                with torch.autocast("cpu", case.get("amp"), enabled="amp" in case):
                    loss = F.cross_entropy(forward(x), y) / parts
                (scaler.scale(loss) if scaler else loss).backward()
        update(parts * SAMPLES)
        trajectory.append(values(model))
    return trajectory


def by_ddp(comm: Communicator, case: dict[str, Any]) -> list[np.ndarray]:
    model = made(case["model"], dtype=case.get("dtype", torch.float32))
    optimizer = OPTIMIZERS[case.get("optimizer", "momentum")](model)
    ddp = DistributedDataParallel(model, find_unused_parameters=case.get("unused", False))
    scaler = scaler_of(case)

    def update(samples: int) -> None:
        if "clip" in case:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    return trained(comm, model, ddp, update, case, ddp.no_sync, scaler)


def by_learner(comm: Communicator, case: dict[str, Any]) -> list[np.ndarray]:
    model = made(case["model"], dtype=case.get("dtype", torch.float32))
    optimizer = OPTIMIZERS[case.get("optimizer", "momentum")](model)
    scaler = scaler_of(case)
    with psgd.torch.Learner(
        model,
        optimizer,
        psgd.DataParallelSGD(overlap=case.get("overlap", False), bucket_values=100),
        comm,
        clip_norm=case.get("clip"),
        scaler=scaler,
    ) as learner:
        return trained(comm, model, model, learner.step, case, learner.no_sync, scaler)


def scaler_of(case: dict[str, Any]) -> Any:
    """Whose scale is too large at first, so that minibatches overflow until it has come down."""
    scale = case.get("scale")
    return torch.amp.GradScaler("cpu", init_scale=scale) if scale else None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_parameters_in_every_step(comm, case):
    ours, theirs = by_learner(comm, case), by_ddp(comm, case)
    worst = [np.abs(one - other).max() for one, other in zip(ours, theirs, strict=True)]
    assert max(worst) < 1e-6, f"in step {int(np.argmax(worst))}"
    moved = [np.abs(one - ours[0]).max() for one in ours]
    assert moved[-1] > 1e-2
    if "scale" in case:
        assert moved[2] == 0  # some were skipped
