"""The algorithms, each with `init`, `step` and `finish`, and their names."""

from typing import Any

from .algorithm import Algorithm, Minibatch, Work
from .asynchronous import DataParallelASGD
from .asynchronous_state import DataParallelASGDState
from .data_parallel import DataParallelSGD, DataParallelState
from .exchange_state import ExchangeState
from .local_updates import LocalUpdates, LocalUpdateState
from .low_rank import PowerSGD, PowerSGDState
from .outer import Averaging, Block, BlockMomentum, OuterNesterov, OuterStep, SlowMomentum
from .period import BlockPeriod, Period
from .presets import BlockMomentumSGD, CNTKBlockMomentumSGD, DiLoCo, ModelAveragingSGD, SlowMo
from .skipped import SavedOptimizer, Skipped

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "data-parallel": DataParallelSGD,
    "powersgd": PowerSGD,
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
    "Averaging",
    "Block",
    "BlockMomentum",
    "BlockMomentumSGD",
    "BlockPeriod",
    "CNTKBlockMomentumSGD",
    "DataParallelASGD",
    "DataParallelASGDState",
    "DataParallelSGD",
    "DataParallelState",
    "DiLoCo",
    "ExchangeState",
    "LocalUpdateState",
    "LocalUpdates",
    "Minibatch",
    "ModelAveragingSGD",
    "OuterNesterov",
    "OuterStep",
    "Period",
    "PowerSGD",
    "PowerSGDState",
    "SavedOptimizer",
    "Skipped",
    "SlowMo",
    "SlowMomentum",
    "Work",
]
