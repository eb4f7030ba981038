"""Ranks that `torch.multiprocessing.spawn` starts: no launcher, and nothing in the environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_models import equal_on_all, mlp, trained, values_of, wrapped
from rank_checks import wait_for_threads_of_pytorch

from parallel_sgd.torch import compress


def train(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ddp = wrapped(mlp)
    start = values_of(ddp)
    with compress(ddp, gradient_bits=1) as handle:
        losses = trained(ddp, range(20))
        found = {"report": handle.report(), "losses": losses, "equal": equal_on_all(ddp)}
    found["moved"] = float(abs(values_of(ddp) - start).max())
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    wait_for_threads_of_pytorch()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (sys.argv[1],), nprocs=2)
