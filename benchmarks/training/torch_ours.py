"""Our side with PyTorch's models, through both of its doors: the learner, and DDP's hook.

Started as `ours` is. The ranks of MPI have a process group of gloo's beside, for DDP.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from parallel_sgd import Algorithm, Communicator
from parallel_sgd.communication.entry_point import abort_on_error
from parallel_sgd.torch import HookState, Learner, hook, hook_state, init_process_group

from .contenders import CONTENDERS
from .member import Member, Trainer
from .modules import loss_of, module_of, optimizer_of, values_of
from .ours import Ours
from .peer import Peer
from .tasks import Array


class TorchOurs(Ours):
    """A module, its optimizer, a learner and the loop around them."""

    def make(self, model: Any, lr: float, algorithm: Algorithm[Any], comm: Communicator) -> Learner:
        self.names, self.model = module_of(model)
        return Learner(self.model, optimizer_of(self.model, lr), algorithm, comm)

    def gradient(self, x: Array, y: Array) -> float:
        loss = loss_of(self.model, x, y)
        loss.backward()
        return float(loss.item())

    def values(self) -> Array:
        return values_of(self.names, self.model)


class Hooked(Peer):
    """DDP with our hook."""

    def __init__(self, comm: Communicator, contender: str, task: str, lr: float, seed: int) -> None:
        self.states: list[HookState] = []
        super().__init__(contender, task, lr, seed, {"exchange": partial(self._exchange, comm)})

    def _exchange(self, comm: Communicator, model: Any, optimizer: Any, **options: Any) -> Any:
        (state,) = self.states = [hook_state(comm, module=model, **options)]
        model.register_comm_hook(state, hook)
        return optimizer

    def finish(self) -> None:
        for state in self.states:
            state.close()


def trainer(comm: Communicator, contender: str, task: str, lr: float, seed: int) -> Trainer:
    """Through the door that is the contender's. Collective."""
    learns = CONTENDERS[contender].algorithm is not None
    return (TorchOurs if learns else Hooked)(comm, contender, task, lr, seed)


def main(path: str) -> None:
    torch.set_num_threads(1)
    comm = Communicator.world()
    init_process_group(comm)
    Member(comm.rank, comm.size, partial(trainer, comm), comm.barrier).follow(path, "ours")
    dist.destroy_process_group()


if __name__ == "__main__":
    with abort_on_error():
        main(sys.argv[1])
