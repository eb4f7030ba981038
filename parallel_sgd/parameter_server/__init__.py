"""Parameter servers: servers hold the model; workers push gradients and pull parameters."""

from .assembly import Assembled, Shard, WorkerProgress, assemble
from .client import Client
from .connection import Connection
from .placement import DISPATCH, Placement, PlacementOptions, Slice, place
from .remote_table import RemoteTable, RemoteTables, Retry, load_tables, write_tables
from .roles import ROLES, ParameterServers, Role, ServerGroup
from .rules import MERGES, MODES, PUSH_TYPES, Merge, Mode, PushType, Rules, choose_push_bits
from .served import ServedModel
from .served_state import ServedState
from .statistics import Seconds, WorkerStatistics
from .wire import Kind

__all__ = [
    "DISPATCH",
    "MERGES",
    "MODES",
    "PUSH_TYPES",
    "ROLES",
    "Assembled",
    "Client",
    "Connection",
    "Kind",
    "Merge",
    "Mode",
    "ParameterServers",
    "Placement",
    "PlacementOptions",
    "PushType",
    "RemoteTable",
    "RemoteTables",
    "Retry",
    "Role",
    "Rules",
    "Seconds",
    "ServedModel",
    "ServedState",
    "ServerGroup",
    "Shard",
    "Slice",
    "WorkerProgress",
    "WorkerStatistics",
    "assemble",
    "choose_push_bits",
    "load_tables",
    "place",
    "write_tables",
]
