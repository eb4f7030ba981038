"""Trainers of PyTorch's models: DistributedDataParallel with its hooks and ours, and our learner.

DDP's options are the quicker ones here: gradients lie in buckets (but for one contender with the
defaults), and the optimizer's step is fused. All ranks start from the same values, so DDP need not
send values around first, and buffers (of BatchNorm) are each rank's own.
"""

from __future__ import annotations

import time
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from parallel_sgd import Algorithm, Communicator
from parallel_sgd.torch import HookState, Learner, compress, hook, hook_state

from .contenders import CONTENDERS, PERIOD
from .modules import loss_of, module_of, optimizer_of, values_of
from .tasks import TASKS, Array
from .trainers import Ours

#: For PowerSGD: with several buckets its waits for all-reduces occupy gloo's two threads for ever.
ONE_BUCKET_MB = 1 << 14

POWER_FROM = 2  #: PowerSGD's first step; before it DDP is plain, and 2 is the least it takes

#: PyTorch's threads let go of the last step within so long. They need Python's lock for that, and
#: DDP's end waits for them while it holds the lock: where it came sooner, the process would hang.
IDLE_S = 0.5


class DDP:
    """A model, DDP with a hook, and an optimizer."""

    state: HookState | None = None  #: of our hook

    def __init__(self, comm: Communicator, name: str, task: str, lr: float, seed: int) -> None:
        chosen = CONTENDERS[name]
        self.names, self.module = module_of(TASKS[task].model(seed=seed))
        self.optimizer: Any = optimizer_of(self.module, lr)
        self.forward: Any = self.module
        if chosen.period:
            self.forward = DistributedDataParallel(
                self.module,
                gradient_as_bucket_view=chosen.in_buckets,
                init_sync=False,
                forward_sync_buffers=False,
                bucket_cap_mb=ONE_BUCKET_MB if chosen.hook == "power" else None,
            )
            self._register(chosen.hook, comm, **chosen.options)

    def _register(self, name: str, comm: Communicator, **options: Any) -> None:
        register = self.forward.register_comm_hook
        if name == "exchange":
            self.state = hook_state(comm, module=self.forward, **options)
            register(self.state, hook)
        elif name == "compress":
            self.state = compress(self.forward, **options)
        elif name == "fp16":
            register(None, default_hooks.fp16_compress_hook)
        elif name == "power":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=options["rank"],
                start_powerSGD_iter=POWER_FROM,
                use_error_feedback=True,
                warm_start=True,
            )
            register(state, powerSGD_hook.powerSGD_hook)
        elif name == "post-local":  # local from the first step; the mean after each `PERIOD`
            local = PostLocalSGDState(
                process_group=None,
                subgroup=None,
                start_localSGD_iter=0,
                post_local_gradient_allreduce=False,
            )
            register(local, post_localSGD_hook)
            averager = PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)
            self.optimizer = PostLocalSGDOptimizer(optim=self.optimizer, averager=averager)

    def step(self, x: Array, y: Array) -> float:
        self.optimizer.zero_grad()
        loss = loss_of(self.forward, x, y)
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def values(self) -> Array:
        return values_of(self.names, self.module)

    def finish(self) -> None:
        if self.state:
            self.state.close()
        time.sleep(IDLE_S)


class TorchOurs(Ours):
    """A module, its optimizer, our learner and the loop around them."""

    def make(self, model: Any, lr: float, algorithm: Algorithm[Any], comm: Communicator) -> Learner:
        self.names, self.model = module_of(model)
        return Learner(self.model, optimizer_of(self.model, lr), algorithm, comm)

    def gradient(self, x: Array, y: Array) -> float:
        loss = loss_of(self.model, x, y)
        loss.backward()
        return float(loss.item())

    def values(self) -> Array:
        return values_of(self.names, self.model)
