"""The algorithms: one file each, and one line here."""

from typing import Any

from .algorithm import Algorithm
from .asynchronous import DataParallelASGD
from .asynchronous_state import DataParallelASGDState
from .block_momentum import BlockMomentumSGD, CNTKBlockMomentumSGD
from .compressed import CompressedAlgorithm, problem_with
from .data_parallel import DataParallelSGD, DataParallelState
from .diloco import DiLoCo
from .local_updates import LocalUpdates, LocalUpdateState
from .model_averaging import ModelAveragingSGD
from .slow_momentum import SlowMo
from .synchronous import SynchronousAlgorithm, SynchronousState

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "data-parallel": DataParallelSGD,
    "model-averaging": ModelAveragingSGD,
    "block-momentum": BlockMomentumSGD,
    "cntk-block-momentum": CNTKBlockMomentumSGD,
    "slowmo": SlowMo,
    "diloco": DiLoCo,
    "async": DataParallelASGD,
}
"""By the names of the command line."""

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "BlockMomentumSGD",
    "CNTKBlockMomentumSGD",
    "CompressedAlgorithm",
    "DataParallelASGD",
    "DataParallelASGDState",
    "DataParallelSGD",
    "DataParallelState",
    "DiLoCo",
    "LocalUpdateState",
    "LocalUpdates",
    "ModelAveragingSGD",
    "SlowMo",
    "SynchronousAlgorithm",
    "SynchronousState",
    "problem_with",
]
