"""`parallel-sgd train`, and what train.py runs: train a model on data, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say. Collective over all ranks that were started."""
    from .command import main  # and with it NumPy, the algorithms and the data

    return main(argv)
