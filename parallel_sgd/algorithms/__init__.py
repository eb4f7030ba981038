"""The algorithms: one file each, and one line here."""

from typing import Any

from .algorithm import Algorithm
from .data_parallel import DataParallelSGD, DataParallelState

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "data-parallel": DataParallelSGD,
}
"""By the names of the command line."""

__all__ = ["ALGORITHMS", "Algorithm", "DataParallelSGD", "DataParallelState"]
