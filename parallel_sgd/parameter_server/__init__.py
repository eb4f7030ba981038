"""Parameter servers: servers hold the model; workers push gradients and pull parameters."""

from .assembly import Assembled, Shard, WorkerProgress, assemble
from .client import Client
from .connection import Connection
from .placement import PlacementOptions, place
from .remote_table import RemoteTable, RemoteTables, Retry, load_tables, write_tables
from .roles import ParameterServers, ServerGroup
from .rules import Rules, choose_push_bits
from .served import ServedModel
from .served_state import ServedState
from .statistics import WorkerStatistics
from .wire import Kind

__all__ = [
    "Assembled",
    "Client",
    "Connection",
    "Kind",
    "ParameterServers",
    "PlacementOptions",
    "RemoteTable",
    "RemoteTables",
    "Retry",
    "Rules",
    "ServedModel",
    "ServedState",
    "ServerGroup",
    "Shard",
    "WorkerProgress",
    "WorkerStatistics",
    "assemble",
    "choose_push_bits",
    "load_tables",
    "place",
    "write_tables",
]
