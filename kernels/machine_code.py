"""Machine code on disk, compiled once by all processes that share a folder.

Numba's own cache leaves three things to wish for. Processes that start together all compile the
same kernel: here the first process locks the kernel, and the others load what it has written. A
kernel whose parts are in another file is not compiled anew when that file changes: here a change of
any file of this package counts. To load machine code Numba imports all that it needs to compile:
here only the runtime is started.

The folder is that of Numba's cache: beside Python's .pyc files, or the user's, or NUMBA_CACHE_DIR.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.runtime import rtsys

#: How long a process waits for another one's kernel; then it compiles that kernel itself.
WAIT_S = 60.0

_LOOK_EVERY_S = 0.005

COMPILING = "compiling kernels, once: this takes some seconds"
COMPILING_ANEW = (
    "compiling kernels, which takes some seconds of every run, as no folder can keep them: set "
    "NUMBA_CACHE_DIR to a folder that can be written"
)


class KernelCache(NullCache):  # type: ignore[misc] # Numba has no types
    """The cache of one kernel: in the place of Numba's `FunctionCache`.

    Args:
        function: of Python, that Numba compiles.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._lock = function, _Lock()

    @cached_property
    def _disk(self) -> FunctionCache | None:
        """Numba's cache; None where there is no folder that can be written."""
        try:
            disk = FunctionCache(self._function)
        except RuntimeError:
            return None
        name = disk._impl.filename_base
        disk._cache_file = IndexDataCacheFile(disk.cache_path, name, _stamp())
        return disk

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The machine code for a signature. None: this process is to compile it, and holds the
        kernel's lock until `save_overload`."""
        rtsys.initialize(target_context)
        if self._disk is None:
            _at_present.say(COMPILING_ANEW)
            return None
        code = self._disk._load_overload(sig, target_context)
        if code is None:
            _at_present.say(COMPILING)
            path = Path(self._disk.cache_path, f"{self._disk._impl.filename_base}.lock")
            self._lock.acquire(path)
            code = self._disk._load_overload(sig, target_context)
            if code is not None:
                self._lock.release()
        return code

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write machine code, and let the other processes load it."""
        try:
            if self._disk is not None:
                self._disk.save_overload(sig, data)
        except OSError:  # a full disk, say: the machine code is there for this run
            _at_present.say(COMPILING_ANEW)
        finally:
            self._lock.release()


class KernelIsLocked(Exception):
    """Another process compiles a kernel, and this one has something else to do."""


class _AtPresent(threading.local):
    """What the calling thread does.

    Attributes:
        puts_off: whether a kernel that another process compiles is put off.
        locks: how many kernels it has locked: one, and those of which that one is made.
        say: called with a line before kernels are compiled.
    """

    puts_off = False
    locks = 0
    say: Callable[[str], object] = staticmethod(lambda line: None)


_at_present = _AtPresent()


class _Lock:
    """A lock among processes, by an empty file beside the kernel's machine code.

    The system gives it back where its process dies. Where files cannot be locked, every process
    compiles for itself.
    """

    def __init__(self) -> None:
        self._file: int | None = None

    def acquire(self, path: Path) -> None:
        """
        Raises:
            KernelIsLocked: by another process, and the thread puts kernels off.
        """
        try:
            file = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError:
            return
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if _at_present.puts_off and not _at_present.locks:
                    os.close(file)
                    raise KernelIsLocked from None
                if time.monotonic() < deadline:
                    time.sleep(_LOOK_EVERY_S)
                    continue
            except OSError:
                pass
            break
        self._file = file
        _at_present.locks += 1

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
            _at_present.locks -= 1


def prepare(
    calls: Sequence[Callable[[], object]], first: int, say: Callable[[str], object]
) -> None:
    """Call functions that need kernels, so that these are compiled, or loaded from the disk.

    Args:
        calls: in any order; each for nothing but its kernels.
        first: which is called first, counted around: processes that begin with different ones
            compile different kernels at the same time, and load those of the others.
        say: called with a line before the first kernel is compiled; and with one that says what
            helps where machine code cannot be written.

    Local. Cost: nothing to speak of where the kernels are loaded.
    """
    said: set[str] = set()

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    first %= max(1, len(calls))
    later = []
    _at_present.say, _at_present.puts_off, _at_present.locks = say_once, True, 0
    try:
        for call in (*calls[first:], *calls[:first]):
            try:
                call()
            except KernelIsLocked:
                later.append(call)
        _at_present.puts_off = False
        for call in later:
            call()
    finally:
        del _at_present.say
        _at_present.puts_off = False


@cache
def _stamp() -> bytes:
    """Differs where any file of this package does."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(hashlib.sha256(f.read_bytes()).digest() for f in files)).digest()
