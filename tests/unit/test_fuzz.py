"""Whatever is in a file: it is read, or refused in one line; within seconds, and little memory.

`PARALLEL_SGD_FUZZ_SECONDS` for all readers together, as `make fuzz` gives them, is for other inputs
each time.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from fuzzed_readers import READERS
from fuzzing import Broken, Reader, fuzz, lines_reached

from parallel_sgd import UserError
from parallel_sgd.parameter_server.wire import as_text

SECONDS = float(os.environ.get("PARALLEL_SGD_FUZZ_SECONDS", "0")) / len(READERS)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of libraries, about what is in files
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
]


@pytest.mark.parametrize("name", READERS)
def test_damaged_files(name, tmp_path):
    refused = fuzz(name, READERS[name], tmp_path, inputs=0 if SECONDS else 40, seconds=SECONDS)
    every_byte_is_data = ("texts", "PBS", "cifar10", "cifar100", "images")
    assert refused > 2 or name in every_byte_is_data


def raises(error: BaseException):
    def read(folder: Path) -> None:
        if (folder / "a").read_bytes() != b"right":
            raise error

    return read


def waits(folder: Path) -> None:
    if (folder / "a").read_bytes() != b"right":
        time.sleep(60)


def takes_memory(folder: Path) -> None:
    if (folder / "a").read_bytes() != b"right":
        np.full(10 << 20, 1.0)


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (raises(IndexError("list index out of range")), "IndexError: list index out of range"),
        (raises(UserError("two\nlines")), "no error of one line"),
        (raises(UserError("")), "no error of one line"),
        (waits, "TooLong: longer than 0.5 s"),
        (takes_memory, r"took [78]\d,\d{3},\d{3} bytes"),
    ],
)
@pytest.mark.usefixtures("temporary_folder")
def test_what_breaks_a_reader_is_found(read, why, tmp_path):
    longest_s = 10.0 if read is takes_memory else 0.5
    reader = Reader(lambda folder: (folder / "a").write_bytes(b"right"), read)
    with pytest.raises(Broken, match=why):
        fuzz("broken", reader, tmp_path, inputs=20, longest_s=longest_s, most_memory=70 << 20)


def test_new_lines_are_seen():
    seen: set[tuple[str, int]] = set()
    with lines_reached(seen):
        READERS["header"].mend({"header": b""}, {"header": b"1"})
        few = len(seen)
        UserError("x")
    with lines_reached(seen):
        as_text(np.zeros(1, np.uint8))
    assert len(seen) > few
