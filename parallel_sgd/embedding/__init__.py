"""Tables of rows found by their ids: what servers hold of them, and what workers ask them for.

How requests and rows travel is for others to say: `RowServers` is all that a worker's side knows.
"""

from .files import check_tables
from .options import Embedding, EmbeddingTables
from .remote_table import RemoteTable, RemoteTables, RowServers
from .tables import ServedTables

__all__ = [
    "Embedding",
    "EmbeddingTables",
    "RemoteTable",
    "RemoteTables",
    "RowServers",
    "ServedTables",
    "check_tables",
]
