"""Reports on runs: a page about one run, and comparisons of several."""

from .comparison import comparison_page, comparison_table, relative_to_first
from .page import run_page
from .record import RunRecord

__all__ = [
    "RunRecord",
    "comparison_page",
    "comparison_table",
    "relative_to_first",
    "run_page",
]
