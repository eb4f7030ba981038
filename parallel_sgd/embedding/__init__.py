"""Tables of rows found by their ids: what servers hold of them, in memory and in files.

What workers ask them for is in `parallel_sgd.parameter_server`, which has the messages.
"""

from .array_table import ArrayTable
from .declared import Table, Tables
from .files import check_tables
from .options import Embedding
from .tables import COUNTS, ServedTables

__all__ = [
    "COUNTS",
    "ArrayTable",
    "Embedding",
    "ServedTables",
    "Table",
    "Tables",
    "check_tables",
]
