"""What the programs of the misuse table begin with: ``from beside import *``; see `misuses`."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import parallel_sgd as psgd
from parallel_sgd.training.checkpoint import folder_lock

__all__ = ["Path", "comm", "damage", "full_disk", "in_use", "learner_of", "np", "os", "psgd"]
__all__ += ["saved", "signal", "subprocess", "sys", "time", "torch_learner_of", "without"]

comm = psgd.Communicator.world()


def learner_of(algorithm=None, shape=(4, 3), comm=comm):
    parameters = psgd.Parameters({"w": np.zeros(shape, np.float32)})
    return psgd.Learner(parameters, psgd.SGD(lr=0.1), algorithm or psgd.DataParallelSGD(), comm)


def torch_learner_of():
    """A learner of a linear layer, and a function that returns its loss on four samples."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm)

    def loss(seed=comm.rank):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        return model(x).square().mean()

    return learner, loss


def saved(folder, **options):
    psgd.Checkpoints(folder).save(learner_of(**options), background=False)
    comm.barrier()


def damage(folder):
    if comm.rank == 0:
        file = sorted(Path(folder).rglob("*.safetensors"))[0]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    comm.barrier()


def in_use(folder):
    """Lock a folder as another job does: Linux binds the lock to the open file."""
    if comm.rank == 0:
        Path(folder).mkdir()
        file = os.open(Path(folder, folder_lock.LOCK), os.O_RDWR | os.O_CREAT)
        assert folder_lock._is_locked(file)
        folder_lock._write_holder(file)
    comm.barrier()


def without(library):
    """Have a library missing from now on."""

    class Missing:
        @staticmethod
        def find_spec(name, *others):
            if name.partition(".")[0] == library:
                raise ModuleNotFoundError(f"No module named {name!r}")

    sys.meta_path.insert(0, Missing)


def full_disk():
    """Let this process write no byte to any file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
