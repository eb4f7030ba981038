"""A fuzzer: changes the files that a reader reads, and keeps to what has shown it something new.

Whatever is in them, a reader returns, or raises a UserError of one line; within seconds, and taking
little memory. In the tests its seeds are fixed; `make fuzz` gives it time, and it is guided by what
lines of the package each input has reached.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import parallel_sgd
from parallel_sgd import UserError

PACKAGE = str(Path(parallel_sgd.__file__).parent)

LONGEST_S = 60.0  #: of one input: these files have less than a few hundred kB
MOST_MEMORY = 512 << 20  #: bytes that all inputs of a reader may add to what this process has taken

KEPT = Path("build", "fuzz")  #: in which what `make fuzz` has found is tried again

Files = dict[str, bytes]  #: what a reader reads, by name


@dataclass(frozen=True)
class Reader:
    """Something that reads files.

    Attributes:
        write: writes right ones into a folder.
        read: reads them, as a user would.
        symbols: what its format is made of, beside any byte.
        words: that may stand in the place of others.
        mend: changes damaged files so that checksums are right again: else nothing behind these
            would be seen.
    """

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    symbols: bytes = b""
    words: tuple[bytes, ...] = ()
    mend: Callable[[Files, Files], Files] = lambda right, changed: changed


class TooLong(BaseException):
    """A reader is waited for: nothing that it catches."""


class Broken(AssertionError):
    """A reader has not kept to what it must."""


INTERESTING = (
    *(b"\0", b"\xff", b"\x7f", b"\x80", b"\n", b"\r\n", b'"', b"'", b"[", b"{", b"9" * 30, b"-1"),
    *(
        b"1e999",
        b"nan",
        b"inf",
        b"null",
        b"\xed\xa0\x80",
        b"\xff\xfe",
        b"\\ud800",
        b"../",
        b"[" * 3000,
    ),
    *(
        n.to_bytes(size, order, signed=n < 0)  # lengths and offsets
        for size in (2, 4, 8)
        for order in ("little", "big")
        for n in (
            0,
            1,
            -1,
            (1 << (8 * size - 1)) - 1,
            1 << (8 * size - 2),
            1 << 20 if size > 2 else 99,
        )
    ),
)


WORD = re.compile(rb"[^\s=:,\[\]{}]+")


def changed(random: Random, content: bytes, other: bytes, reader: Reader) -> bytes:
    """Content with one to five changes of some kinds; `other` may lend parts."""
    data, symbols = bytearray(content), reader.symbols
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        size = len(data)
        if reader.words and random.random() < 0.7 and (words := [*WORD.finditer(data)]):
            own = [bytes(word[0]) for word in words]
            begin, end = random.choice(words).span()
            data[begin:end] = random.choice((random.choice(own), random.choice(reader.words)))
            continue
        at = random.randrange(size + 1)
        if random.random() < 0.3:
            at = min(at, random.randrange(200))  # where the heads are
        match random.randrange(9):
            case 0 if size:
                data[at % size] ^= 1 << random.randrange(8)
            case 1:
                data[at : at + 1] = bytes([random.randrange(256)])
            case 2 if symbols:
                data[at : at + random.randrange(2)] = bytes([random.choice(symbols)])
            case 3:
                some = random.choice(INTERESTING)
                data[at : at + len(some) * random.randrange(2)] = some
            case 4:
                del data[at : at + random.choice((1, 2, 4, 8, 100))]
            case 5:
                data[at:at] = data[at : at + random.choice((1, 4, 40))] * random.choice((1, 2, 20))
            case 6 if other:
                begin = random.randrange(len(other))
                data[at : at + random.choice((0, 8))] = other[begin : begin + random.randrange(64)]
            case 7 if random.random() < 0.3:
                del data[at:]
            case _:
                data[at : at + 4] = random.randbytes(4)
    return bytes(data)


def fuzz(
    name: str,
    reader: Reader,
    folder: Path,
    *,
    inputs: int = 0,
    seconds: float = 0.0,
    longest_s: float = LONGEST_S,
    most_memory: int = MOST_MEMORY,
) -> int:
    """Try so many inputs, or for so long; the number of those that were refused.

    Raises:
        Broken: with what the reader has done, and where the input lies.
    """
    right_folder = folder / "right"
    right_folder.mkdir()
    reader.write(right_folder)
    right = read_files(right_folder)
    assert right and _tried(reader, right_folder, "right", right, longest_s) is None, (
        "what is right is taken"
    )
    random, refused, number = Random(name), 0, 0
    corpus, seen = [right], set[tuple[str, int]]()
    kept = KEPT / name
    again = [read_files(path) for path in sorted(kept.glob("*/"))] if seconds else []
    if seconds:
        random, end = Random(), time.monotonic() + seconds
        with lines_reached(seen):
            _tried(reader, right_folder, "right", right, longest_s)
    Path("/proc/self/clear_refs").write_text("5")  # the most memory begins at today's
    memory = memory_so_far()
    here = folder / "changed"
    here.mkdir()
    while number < inputs or (seconds and time.monotonic() < end):
        number += 1
        files = again.pop() if again else _changed_files(random, reader, right, corpus)
        _write(here, files)
        before = len(seen)
        if seconds:
            with lines_reached(seen):
                error = _tried(reader, here, f"{name}, input {number}", files, longest_s)
        else:
            error = _tried(reader, here, f"{name}, input {number}", files, longest_s)
        refused += error is not None
        if len(seen) > before:
            corpus.append(files)
            _write(kept / f"{len(corpus):05d}", files)
        taken = memory_so_far() - memory
        if taken > most_memory:
            raise Broken(f"{name}, input {number} took {taken:,} bytes{_kept(files)}")
    return refused


def memory_so_far() -> int:
    """Bytes that this process has had at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _changed_files(random: Random, reader: Reader, right: Files, corpus: list[Files]) -> Files:
    files = dict(random.choice(corpus))
    name = random.choice(sorted(files))
    other = random.choice(corpus)[random.choice(sorted(files))]
    files[name] = changed(random, files[name], other, reader)
    return reader.mend(right, files)


def _tried(
    reader: Reader, folder: Path, what: str, files: Files, longest_s: float
) -> UserError | None:
    """The error by which files were refused; None where they were taken."""
    try:
        with _alarm(longest_s):
            reader.read(folder)
    except UserError as error:
        text = str(error)
        if not text or "\n" in text or len(text) > 5000:
            raise Broken(f"{what}: no error of one line: {text!r}{_kept(files)}") from error
        text.encode()
        return error
    except (Exception, TooLong) as error:
        last = "".join(traceback.format_tb(error.__traceback__)[-4:])
        raise Broken(f"{what}: {type(error).__name__}: {error}{_kept(files)}\n{last}") from error
    return None


def _kept(files: Files) -> str:
    """Where an input lies that has broken a reader."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    _write(folder, files)
    return f"; the input lies in {folder}"


def _write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_files(folder: Path) -> Files:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@contextmanager
def _alarm(longest_s: float) -> Iterator[None]:
    """No reader may wait or compute without end."""

    def ring(number: int, frame: object) -> None:
        raise TooLong(f"longer than {longest_s:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, longest_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def lines_reached(seen: set[tuple[str, int]]) -> Iterator[None]:
    """Add the lines of the package that a body runs."""

    def trace(frame: Any, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
