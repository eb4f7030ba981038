"""Servers that keep the model, and workers that push gradients and pull parameters."""

from .client import Client
from .connection import Connection
from .group import ROLES, Group, Role, form, roles
from .placement import DISPATCH, Placement, Slice, place
from .served import (
    COUNTERS,
    CURRENCIES,
    MERGES,
    MODES,
    OF_EACH_WORKER,
    Currency,
    Merge,
    Mode,
    Rules,
    ServedModel,
    compile_step,
)
from .statistics import Seconds, WorkerStatistics
from .wire import Kind

__all__ = [
    "COUNTERS",
    "CURRENCIES",
    "DISPATCH",
    "MERGES",
    "MODES",
    "OF_EACH_WORKER",
    "ROLES",
    "Client",
    "Connection",
    "Currency",
    "Group",
    "Kind",
    "Merge",
    "Mode",
    "Placement",
    "Role",
    "Rules",
    "Seconds",
    "ServedModel",
    "Slice",
    "WorkerStatistics",
    "compile_step",
    "form",
    "place",
    "roles",
]
