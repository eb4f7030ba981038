"""Parallel SGD over MPI: ranks train one model together, with gradients from 32 bits down to 1/20.

>>> import numpy as np, parallel_sgd as psgd
>>> comm = psgd.Communicator.single()  # under mpiexec: psgd.Communicator.world()
>>> model = psgd.models.SoftmaxRegression(4, 3)
>>> learner = psgd.Learner(
...     model.parameters, psgd.SGD(lr=0.5), psgd.DataParallelSGD(gradient_bits=1), comm
... )
>>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 2, 0])
>>> for x, y in psgd.data.Source(x, y, minibatch_size=4, epochs=20).minibatches(learner):
...     loss = model.gradient(x, y, out=learner.gradient)
...     global_samples = learner.step(samples=len(x))
>>> learner.finish()
>>> bool(loss < 4 * np.log(3))
True
"""

# ruff: noqa: E402 - the handler for Ctrl-C must be installed before the slow imports
from . import starting

starting.begin()

from typing import TYPE_CHECKING

from .communication.liveness.abort import install_excepthook_if_launched
from .lazy import on_first_use
from .version import __version__

if TYPE_CHECKING:
    from . import data, models, schedules
    from . import torch as torch
    from .algorithms import (
        DESLOC,
        Algorithm,
        BlockMomentumSGD,
        CNTKBlockMomentumSGD,
        DataParallelASGD,
        DataParallelSGD,
        DiLoCo,
        ModelAveragingSGD,
        PowerSGD,
        SlowMo,
        SparseLoCo,
    )
    from .communication import Communicator, simulate
    from .embedding import ArrayTable, Embedding
    from .errors import Preempted, RanksLost, UserError
    from .optimizers import SGD, Adagrad, Adam, MomentumSGD, NesterovSGD, Optimizer
    from .parameters import Parameters
    from .trace import Trace
    from .training import (
        AutoLearningRate,
        AutoMinibatchSize,
        CheckpointConfig,
        Checkpoints,
        CrossValidation,
        Learner,
        NotFinitePolicy,
        Objective,
        Progress,
        RunFolder,
        Tracker,
        TrainingSession,
        load_checkpoint,
        resume,
        traced,
    )

__all__ = [
    "DESLOC",
    "SGD",
    "Adagrad",
    "Adam",
    "Algorithm",
    "ArrayTable",
    "AutoLearningRate",
    "AutoMinibatchSize",
    "BlockMomentumSGD",
    "CNTKBlockMomentumSGD",
    "CheckpointConfig",
    "Checkpoints",
    "Communicator",
    "CrossValidation",
    "DataParallelASGD",
    "DataParallelSGD",
    "DiLoCo",
    "Embedding",
    "Learner",
    "ModelAveragingSGD",
    "MomentumSGD",
    "NesterovSGD",
    "NotFinitePolicy",
    "Objective",
    "Optimizer",
    "Parameters",
    "PowerSGD",
    "Preempted",
    "Progress",
    "RanksLost",
    "RunFolder",
    "SlowMo",
    "SparseLoCo",
    "Trace",
    "Tracker",
    "TrainingSession",
    "UserError",
    "__version__",
    "data",
    "load_checkpoint",
    "models",
    "resume",
    "schedules",
    "simulate",
    "traced",
]

#: The module of each public name, imported on first use. A launcher uses none of these names,
#: and only a program that uses `torch` waits for PyTorch.
_ROOMS = {
    "": (
        *("algorithms", "array_files", "checks", "compression", "costs", "data", "embedding"),
        *("exchange", "files", "kernels", "models", "optimizers", "options", "parameter_server"),
        *("parameters", "patterns", "schedules", "state", "torch", "trace", "training"),
    ),
    "algorithms": (
        *("Algorithm", "BlockMomentumSGD", "CNTKBlockMomentumSGD", "DESLOC", "DataParallelASGD"),
        *("DataParallelSGD", "DiLoCo", "ModelAveragingSGD", "PowerSGD", "SlowMo", "SparseLoCo"),
    ),
    "communication": ("Communicator", "simulate"),
    "embedding": ("ArrayTable", "Embedding"),
    "errors": ("Preempted", "RanksLost", "UserError"),
    "optimizers": ("SGD", "Adagrad", "Adam", "MomentumSGD", "NesterovSGD", "Optimizer"),
    "parameters": ("Parameters",),
    "trace": ("Trace",),
    "training": (
        *("AutoLearningRate", "AutoMinibatchSize", "CheckpointConfig", "Checkpoints"),
        *("CrossValidation", "Learner", "NotFinitePolicy", "Objective", "Progress", "RunFolder"),
        *("Tracker", "TrainingSession", "load_checkpoint", "resume", "traced"),
    ),
}
__getattr__, _names = on_first_use(__name__, _ROOMS)


def __dir__() -> list[str]:
    """Return the public names, without `torch` unless imported: `help`, `inspect.getmembers` or a
    tab access all names, and PyTorch may not be installed."""
    return [name for name in _names() if name != "torch" or name in globals()]


install_excepthook_if_launched()  # a rank that fails before Communicator.world() ends the job
