"""What training state is made of, so that every checkpoint can hold every algorithm's.

A state is a dataclass whose fields are arrays, numbers, text, dictionaries of arrays by name, None,
or dataclasses of the same, which speak for themselves. Each other field says by `across` what it
means on another number of ranks, and `workspace` marks what is no state at all: buffers,
communicators, threads.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

__all__ = ["across", "workspace"]

Meaning = Literal["same", "mean", "most", "sum", "stripe", "share"]


def across(meaning: Meaning, **options: Any) -> Any:
    """A field of a state, with its meaning across ranks, by which a checkpoint is redistributed
    where another number of ranks takes it up (`parallel_sgd.load_checkpoint`):

    - "same": equal on all ranks, and so on any number of them; rank 0's is taken.
    - "mean": an array of which only the mean over the ranks, by `Algorithm.weight` (alike where all
      weights are 0), goes on. What is equal on all ranks stays as it is, bit for bit. The model
      itself is a mean.
    - "most": a whole number of which the largest of all ranks goes on.
    - "sum": an array of which the sum over the ranks is kept: rank j of K' takes over those of
      ranks j, j + K', ...
    - "stripe": this rank's part of one vector, which is cut anew.
    - "share": a whole number that the ranks have together, divided among them.

    The arrays in a dictionary mean what its field says; the fields of a dataclass each say it
    themselves. A field without a meaning can be taken up by the same number of ranks only.
    """
    return field(metadata={"across": meaning}, **options)


def workspace(**options: Any) -> Any:
    """A field that holds no state: a new `init` makes it, and no checkpoint has it."""
    return field(metadata={"workspace": True}, repr=False, **options)
