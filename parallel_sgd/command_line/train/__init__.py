"""Train a model on data, on all ranks: `parallel-sgd train` and train.py."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Train according to the arguments. Collective over all ranks that were started."""
    from .command import main  # imports NumPy, the algorithms and the data

    return main(argv)
