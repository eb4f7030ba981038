"""Machine code on disk, compiled once by all processes that share a folder.

Numba's own cache leaves four things to wish for. Processes that start together all compile the
same kernel: here the first process locks the kernel, and the others load what it has written. A
kernel whose parts are in another file is not compiled anew when that file changes: here a change of
any file of this package counts. To load machine code Numba imports all that it needs to compile:
here only the runtime is started. Numba writes an index, and then the data that the index names, in
files that it uses again after a change: here the machine code of some sources for a signature is a
file of its own, that is written whole or not at all.

The folder is that of Numba's cache: beside Python's .pyc files, or the user's, or NUMBA_CACHE_DIR.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime import rtsys

#: How long a process waits for another one's kernel; then it compiles that kernel itself, and waits
#: for no other.
WAIT_S = 60.0

_LOOK_EVERY_S = 0.02  #: seldom enough to take nothing from the process that compiles

#: How many processes compile at once at least: one that is bound to a core sees no other.
_AT_ONCE = 2

COMPILING = "compiling kernels, once: this takes some seconds"
COMPILING_ANEW = (
    "compiling kernels, which takes some seconds of every run, as no folder can keep them: set "
    "NUMBA_CACHE_DIR to a folder that can be written"
)
LOCK_TIMED_OUT = "another process keeps a kernel locked: compiling without waiting"
UNREADABLE = "compiling kernels anew, as a file of compiled kernels cannot be read"


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
        disk._cache_file = _Files(disk.cache_path, disk._impl.filename_base, _stamp())
        return disk

    def unlocking(self, compile_: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The `compile` of a kernel of Numba's, which gives the kernel's lock back at its end, also
        where it raises."""

        def compile_and_unlock(sig: Any) -> Any:
            with global_compiler_lock:  # so that no other thread's lock is given back
                try:
                    return compile_(sig)
                finally:
                    self._lock.release()

        return compile_and_unlock

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The machine code for a signature. None: this process is to compile it, and holds the
        kernel's lock until the end of `compile`, unless it has waited in vain."""
        rtsys.initialize(target_context)
        if self._disk is None:
            _thread_state.say(COMPILING_ANEW)
            return None
        code = self._load(sig, target_context)
        if code is None:
            _thread_state.say(COMPILING)
            path = Path(self._disk.cache_path, f"{self._disk._impl.filename_base}.lock")
            self._lock.acquire(path)
            code = self._load(sig, target_context)
        return code

    def _load(self, sig: Any, target_context: Any) -> Any:
        assert self._disk is not None
        try:
            return self._disk._load_overload(sig, target_context)
        except FileNotFoundError:
            return None
        except Exception as error:  # damaged bytes raise anything when they are unpickled
            _thread_state.say(f"{UNREADABLE} ({self._disk.cache_path}: {type(error).__name__})")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write machine code, so that the other processes load it."""
        try:
            if self._disk is not None:
                self._disk.save_overload(sig, data)
        except OSError:  # a full disk, say: the machine code is there for this run
            _thread_state.say(COMPILING_ANEW)


class _Files(IndexDataCacheFile):  # type: ignore[misc] # Numba has no types
    """The files of one kernel, one for each signature, without an index.

    The name of a file says of which sources it is, so that no process loads machine code of others.
    """

    def __init__(self, folder: str, kernel: str, stamp: bytes) -> None:
        self._kernel, self._sources = kernel, f"{kernel}-{stamp.hex()[:16]}"
        super().__init__(folder, self._sources, stamp)

    def _name(self, key: object) -> str:
        return f"{self._sources}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"

    def load(self, key: object) -> Any:
        """
        Raises:
            FileNotFoundError: the signature has not been compiled from these sources.
            Exception: any, where the file cannot be read or is damaged.
        """
        key_of_file, data = self._load_data(self._name(key))
        return data if key_of_file == key else None

    def save(self, key: object, data: Any) -> None:
        """Write the file, or none, and remove those of other sources where that is allowed."""
        self._save_data(self._name(key), (key, data))
        for path in Path(self._cache_path).glob(f"{self._kernel}*.nb[ci]"):
            if not path.name.startswith(self._sources):
                with contextlib.suppress(OSError):  # it may be another user's
                    path.unlink()


class KernelIsLocked(Exception):
    """Another process compiles a kernel, and this one has something else to do."""


class _ThreadState(threading.local):
    """What the calling thread does.

    Attributes:
        puts_off: whether a kernel that another process compiles is put off.
        locks: how many kernels it has locked: one, and those of which that one is made.
        say: called with a line before kernels are compiled.
    """

    skips_locked = False
    locks = 0
    say: Callable[[str], object] = staticmethod(lambda line: None)


_thread_state = _ThreadState()


class _Lock:
    """A lock among processes, by an empty file beside the kernel's machine code.

    The system gives it back where its process dies. Where files cannot be locked, every process
    compiles for itself.
    """

    #: Whether this process has waited for a lock in vain: it waits for no other.
    timed_out: ClassVar[bool] = False

    def __init__(self) -> None:
        self._file: int | None = None

    def acquire(self, path: Path) -> None:
        """Lock, or after `WAIT_S` go on without the lock.

        Raises:
            KernelIsLocked: by another process, and the thread puts kernels off.
        """
        if self._file is not None:
            return
        try:
            flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(path, flags, 0o666)
        except OSError:
            return
        try:
            if self._wait(file):
                self._file = file
                _thread_state.locks += 1
        finally:
            if self._file is None:
                os.close(file)

    def _wait(self, file: int) -> bool:
        """Whether the file is locked now."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if _thread_state.skips_locked and not _thread_state.locks:
                    raise KernelIsLocked from None
            except OSError:
                return False
            if _Lock.timed_out:
                return False
            if time.monotonic() >= deadline:
                _Lock.timed_out = True
                _thread_state.say(LOCK_TIMED_OUT)
                return False
            time.sleep(_LOOK_EVERY_S)

    def release(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            _thread_state.locks -= 1
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may have the file open, too
            os.close(file)


def prepare(
    calls: Sequence[Callable[[], object]], number: int, say: Callable[[str], object]
) -> None:
    """Call functions that need kernels, so that these are compiled, or loaded from the disk.

    Args:
        calls: in any order; each for nothing but its kernels.
        number: of this process among those of its host that do the same. As many of them as there
            are cores begin with different calls, so they compile different kernels at the same
            time, and load those of the others. A process that finds another one at its first call
            compiles nothing that others compile: to get ready for that takes a quarter of a second.
        say: called with a line before the first kernel is compiled; and with one that says what
            helps where machine code cannot be written.

    Local. Cost: nothing to speak of where the kernels are loaded.
    """
    said: set[str] = set()

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    at_once = max(_AT_ONCE, _cores())
    first = number % at_once % max(1, len(calls))
    in_order = [*calls[first:], *calls[:first]]
    later: list[Callable[[], object]] = []
    _thread_state.say, _thread_state.skips_locked = say_once, True
    try:
        for place, call in enumerate(in_order):
            try:
                call()
            except KernelIsLocked:
                if place == 0:
                    later = in_order
                    break
                later.append(call)
        _thread_state.skips_locked = False
        for call in later:
            call()
    finally:
        del _thread_state.say
        _thread_state.skips_locked = False


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _stamp() -> bytes:
    """Differs where any file of this package does, or Numba's version."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    digests = [hashlib.sha256(f.read_bytes()).digest() for f in files]
    return hashlib.sha256(b"".join([numba.__version__.encode(), *digests])).digest()
