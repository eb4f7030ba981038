"""Parameter servers: servers hold the model; workers push gradients and pull parameters."""

from .assembly import Assembled, Shard, WorkerProgress, assemble
from .client import Client
from .connection import Connection
from .order import Order, RecordedOrder, ReplayedOrder
from .placement import Placement, PlacementOptions, Slice, place
from .remote_array import RemoteArray
from .remote_table import RemoteTable, RemoteTables, Retry, load_tables, write_tables
from .roles import ParameterServers, ServerGroup
from .rules import Rules, choose_push_bits
from .served import ServedModel
from .served_state import ServedState
from .server import Server
from .statistics import WorkerStatistics
from .wire import Kind, Malformed, Message

__all__ = [
    "Assembled",
    "Client",
    "Connection",
    "Kind",
    "Malformed",
    "Message",
    "Order",
    "ParameterServers",
    "Placement",
    "PlacementOptions",
    "RecordedOrder",
    "RemoteArray",
    "RemoteTable",
    "RemoteTables",
    "ReplayedOrder",
    "Retry",
    "Rules",
    "ServedModel",
    "ServedState",
    "Server",
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
