"""The algorithms, each with `init`, `step` and `finish`, and their names."""

from typing import Any

from .algorithm import Algorithm, Minibatch, Work
from .asynchronous import DataParallelASGD
from .asynchronous_state import DataParallelASGDState
from .data_parallel import DataParallelSGD, DataParallelState
from .exchange_state import ExchangeState
from .local_update_state import Fragment, LocalUpdateState
from .local_updates import LocalUpdates
from .low_rank import PowerSGD, PowerSGDState
from .outer import (
    Averaging,
    Block,
    BlockMomentum,
    DesyncedAveraging,
    OuterNesterov,
    OuterSGD,
    OuterStep,
    SlowMomentum,
)
from .period import BlockPeriod, Period
from .presets import (
    DESLOC,
    BlockMomentumSGD,
    CNTKBlockMomentumSGD,
    DiLoCo,
    ModelAveragingSGD,
    SlowMo,
    SparseLoCo,
)
from .skipped import SavedOptimizer, Skipped

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "data-parallel": DataParallelSGD,
    "powersgd": PowerSGD,
    "model-averaging": ModelAveragingSGD,
    "block-momentum": BlockMomentumSGD,
    "cntk-block-momentum": CNTKBlockMomentumSGD,
    "slowmo": SlowMo,
    "diloco": DiLoCo,
    "sparseloco": SparseLoCo,
    "des-loc": DESLOC,
    "async": DataParallelASGD,
}
"""By the names of the command line."""

__all__ = [
    "ALGORITHMS",
    "DESLOC",
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
    "DesyncedAveraging",
    "DiLoCo",
    "ExchangeState",
    "Fragment",
    "LocalUpdateState",
    "LocalUpdates",
    "Minibatch",
    "ModelAveragingSGD",
    "OuterNesterov",
    "OuterSGD",
    "OuterStep",
    "Period",
    "PowerSGD",
    "PowerSGDState",
    "SavedOptimizer",
    "Skipped",
    "SlowMo",
    "SlowMomentum",
    "SparseLoCo",
    "Work",
]
