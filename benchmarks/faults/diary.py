"""The diary of a rank in training: a file that outlives the rank.

The file is mapped into memory. An entry is there at once, even if the rank is killed in the next
instant, and costs no system call.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

STEPS = 20_000  #: that a diary has room for

_ENTRY = np.dtype([("time_s", "f8"), ("samples", "i8"), ("total", "i8")])
"""One step: when it ended, on the clock of all processes of the machine; the learner's samples
then; those of all ranks in its minibatch. The head has the beginning, the steps, and the place."""


class Place(enum.IntEnum):
    """The place of a rank in its program."""

    START = 0  #: before its learner is made
    LOCAL_STEP = 1  #: it computes
    EXCHANGE = 2  #: in `Learner.step`
    CHECKPOINT = 3  #: in `Checkpoints.save`
    FINISH = 4  #: in `Learner.finish`: a server is there all the time
    END = 5  #: all is done and written down


class Diary:
    """The steps and the place of a process. Its file is named RANK-PID.diary."""

    def __init__(self, path: Path, mode: Literal["r", "w+"] = "r") -> None:
        self.rank, self.pid = map(int, path.stem.split("-"))
        file: npt.NDArray[Any] = np.memmap(path, _ENTRY, mode, shape=(STEPS + 1,))
        self._head, self._entries = file[:1], file[1:]
        if mode == "w+":
            self._head["time_s"] = time.monotonic()
        self.begun_s = float(self._head["time_s"][0])

    @classmethod
    def begun(cls, folder: Path, rank: int) -> Diary:
        """Begin the diary of this process."""
        return cls(folder / f"{rank}-{os.getpid()}.diary", "w+")

    @property
    def place(self) -> Place:
        """The rank's place now, or at its end."""
        return Place(int(self._head["total"][0]))

    def enter(self, place: Place) -> None:
        self._head["total"] = place

    @property
    def steps(self) -> int:
        return int(self._head["samples"][0])

    def stepped(self, samples: int, total: int) -> None:
        """Write down the end of a step."""
        steps = self.steps
        if steps < STEPS:
            self._entries[steps] = time.monotonic(), samples, total
            self._head["samples"] = steps + 1

    def entries(self) -> npt.NDArray[Any]:
        """Return a copy of all steps: fields `time_s`, `samples`, `total`."""
        return np.array(self._entries[: self.steps])


def diaries(folder: Path) -> list[Diary]:
    """Return all diaries in a folder, by rank; of a restarted rank the older diary first."""
    whole = (STEPS + 1) * _ENTRY.itemsize  # a shorter file is just being made
    paths = [path for path in folder.glob("*.diary") if path.stat().st_size >= whole]
    return sorted(map(Diary, paths), key=lambda diary: (diary.rank, diary.begun_s))


def recovery_s(
    books: Sequence[Diary], fault_s: float, *, started_again: bool = False
) -> float | None:
    """Return the seconds from a fault to the end of the first step after; None without a step.

    If ranks report the failure by a step without samples, the first step after that report counts:
    earlier steps may have been under way before the fault.

    Args:
        started_again: count only steps of processes that began after the fault.
    """
    ends: list[float] = []
    told: list[float] = []
    for book in books:
        entries = book.entries()
        after = entries[entries["time_s"] > fault_s]
        (lost,) = np.nonzero(after["total"] == 0)
        good = after[lost[0] + 1 :] if len(lost) else after
        good = good[good["total"] > 0]
        if len(good) and (book.begun_s > fault_s or not started_again):
            (told if len(lost) else ends).append(float(good["time_s"][0]) - fault_s)
    return min(told or ends, default=None)


def lost_samples(books: Sequence[Diary], since_s: float, until_s: float) -> int:
    """Return the samples that a rank was set back by in a span of time; of the ranks the most.

    Counts all processes of a rank, in the order of `diaries`.
    """
    lost = [0]
    for rank in {book.rank for book in books}:
        entries = np.concatenate([book.entries() for book in books if book.rank == rank])
        entries = entries[entries["total"] > 0]
        before, after = entries["samples"][:-1], entries[1:]
        back = (after["samples"] <= before) & (since_s < after["time_s"])
        back &= after["time_s"] <= until_s
        lost.append(int((before - after["samples"] + after["total"])[back].sum()))
    return max(lost)
