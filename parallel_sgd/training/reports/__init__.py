"""Reports on runs: a page about one run, and comparisons of several."""

from .comparison import comparison_page, comparison_table
from .page import run_page
from .record import RunRecord

__all__ = ["RunRecord", "comparison_page", "comparison_table", "run_page"]
