"""Tables of rows by id: the servers' part, in memory and in files.

The messages between workers and servers are in `parallel_sgd.parameter_server`.
"""

from .files import check_tables
from .options import ArrayTable, Embedding, Table, Tables
from .rows import RowTable, server_of
from .tables import COUNTS, ServedTables

__all__ = [
    "COUNTS",
    "ArrayTable",
    "Embedding",
    "RowTable",
    "ServedTables",
    "Table",
    "Tables",
    "check_tables",
    "server_of",
]
