"""Predicted cost of an exchange: a cost model, and the measurements for its parameters."""

from .kernel_speeds import measure_kernel_speeds
from .measured import Measured, measure
from .model import (
    LINK_EFFICIENCY,
    TOLERANCE,
    ExchangeCost,
    KernelSpeeds,
    Link,
    StepSearch,
    best_bits,
    bytes_sent,
    exchange_s,
)
from .pushes import best_push_bits, push_s
from .queueing import closed_throughput

__all__ = [
    "LINK_EFFICIENCY",
    "TOLERANCE",
    "ExchangeCost",
    "KernelSpeeds",
    "Link",
    "Measured",
    "StepSearch",
    "best_bits",
    "best_push_bits",
    "bytes_sent",
    "closed_throughput",
    "exchange_s",
    "measure",
    "measure_kernel_speeds",
    "push_s",
]
