"""PyTorch's side: a process on each host, DistributedDataParallel over gloo with its own hooks.

Started with rank, number of ranks, the first host's address and the conductor's socket. What DDP
leaves open is set to what is quicker here: gradients lie in its buckets (but for one contender, who
has its defaults), and the optimizer's step is fused. All start from the same values, so DDP need
not send them around first, and buffers (of BatchNorm) are each rank's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from .contenders import CONTENDERS, PERIOD
from .member import Member
from .modules import gloo, loss_of, module_of, optimizer_of, values_of
from .tasks import TASKS, Array

ONE_BUCKET_MB = 1 << 14
"""For PowerSGD, which waits for all-reduces in gloo's two threads: with several buckets both wait,
for ever, and in which order they send is left to chance."""

POWER_FROM = 2  #: PowerSGD's first step; before it DDP is plain, and 2 is the least it takes


class Peer:
    """A model, DDP with a hook, and an optimizer.

    Args:
        hooks: by name; each makes DDP use it, and returns the optimizer to step with.
    """

    def __init__(
        self,
        contender: str,
        task: str,
        lr: float,
        seed: int,
        hooks: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        chosen = CONTENDERS[contender]
        self.names, self.module = module_of(TASKS[task].model(seed=seed))
        optimizer: Any = optimizer_of(self.module, lr)
        self.forward = self.module
        if chosen.period:
            self.forward = DistributedDataParallel(
                self.module,
                gradient_as_bucket_view=chosen.in_buckets,
                init_sync=False,
                forward_sync_buffers=False,
                bucket_cap_mb=ONE_BUCKET_MB if chosen.hook == "power" else None,
            )
            optimizer = (hooks or HOOKS)[chosen.hook](self.forward, optimizer, **chosen.options)
        self.optimizer = optimizer

    def step(self, x: Array, y: Array) -> float:
        self.optimizer.zero_grad()
        loss = loss_of(self.forward, x, y)
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def values(self) -> Array:
        return values_of(self.names, self.module)

    def finish(self) -> None:
        """Nothing: a step of DDP leaves nothing under way."""


def _fp16(model: Any, optimizer: Any) -> Any:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return optimizer


def _power(model: Any, optimizer: Any, rank: int) -> Any:
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=POWER_FROM,
        use_error_feedback=True,
        warm_start=True,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return optimizer


def _post_local(model: Any, optimizer: Any) -> Any:
    """Local from the first step; the mean of all models after each `PERIOD`."""
    state = PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=0,
        post_local_gradient_allreduce=False,
    )
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)
    return PostLocalSGDOptimizer(optim=optimizer, averager=averager)


HOOKS: dict[str, Callable[..., Any]] = {
    "none": lambda model, optimizer: optimizer,
    "fp16": _fp16,
    "power": _power,
    "post-local": _post_local,
}
"""Each makes DDP use it, and returns the optimizer to step with."""


def main(rank: str, ranks: str, address: str, path: str) -> None:
    with gloo(int(rank), int(ranks), address):
        Member(int(rank), int(ranks), Peer, dist.barrier).follow(path, "peer")


if __name__ == "__main__":
    main(*sys.argv[1:])
