"""Tables of rows found by their ids: what servers hold of them, in memory and in files.

What workers ask them for is in `parallel_sgd.parameter_server`, which has the messages.
"""

from .files import check_tables
from .options import Embedding, EmbeddingTables
from .tables import COUNTS, ServedTables

__all__ = ["COUNTS", "Embedding", "EmbeddingTables", "ServedTables", "check_tables"]
