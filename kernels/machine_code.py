"""A cache of machine code on disk, compiled once by all processes that share a folder.

This cache improves on Numba's in four ways:

- With Numba, processes that start together all compile the same kernel. Here the first process
  locks the kernel, and later processes load its result.
- Numba does not notice a change in the files of a kernel's callees. Here a change of any file of
  this package recompiles.
- To load machine code, Numba imports its whole compiler. Here only the runtime is started.
- Numba updates an index and data files in place. Here each combination of sources and signature has
  its own file, written completely or not at all.

The folder is that of Numba's cache: next to Python's .pyc files, or the user's cache, or
NUMBA_CACHE_DIR.
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

#: The longest wait for a kernel that another process compiles. After that the process compiles the
#: kernel itself, and never waits again.
WAIT_S = 60.0

_POLL_S = 0.02  #: rarely enough not to slow down the compiling process

#: The least number of processes compiling at once: a process bound to a single core sees only
#: that core.
_AT_ONCE = 2

COMPILING = "compiling kernels, once: this takes some seconds"
COMPILING_ANEW = (
    "compiling kernels, which takes some seconds in every run because no folder can keep them: "
    "set NUMBA_CACHE_DIR to a folder that can be written"
)
LOCK_TIMED_OUT = "another process holds a kernel's lock: compiling without waiting"
UNREADABLE = "compiling kernels again: a file of compiled kernels cannot be read"


class KernelCache(NullCache):  # type: ignore[misc] # Numba has no types
    """The cache of one kernel, in place of Numba's `FunctionCache`.

    Args:
        function: the Python function compiled by Numba.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._lock = function, _Lock()

    @cached_property
    def _disk(self) -> FunctionCache | None:
        """Numba's cache, or None if no folder is writable."""
        try:
            disk = FunctionCache(self._function)
        except RuntimeError:
            return None
        disk._cache_file = _Files(disk.cache_path, disk._impl.filename_base, _stamp())
        return disk

    def unlocking(self, compile_: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a kernel's `compile` to release the kernel's lock at the end, even on errors."""

        def compile_and_unlock(sig: Any) -> Any:
            with global_compiler_lock:  # so that no other thread's lock is released
                try:
                    return compile_(sig)
                finally:
                    self._lock.release()

        return compile_and_unlock

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the machine code for a signature, or None if this process must compile.

        In the latter case the process holds the kernel's lock until the end of `compile`, unless
        waiting for the lock timed out.
        """
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
        """Write machine code, for all processes to load."""
        try:
            if self._disk is not None:
                self._disk.save_overload(sig, data)
        except OSError:  # a full disk, say: the machine code is still used in this run
            _thread_state.say(COMPILING_ANEW)


class _Files(IndexDataCacheFile):  # type: ignore[misc] # Numba has no types
    """The files of a kernel, one for each signature, without an index.

    A file's name contains a hash of the sources, so machine code of different sources is never
    loaded.
    """

    def __init__(self, folder: str, kernel: str, stamp: bytes) -> None:
        self._kernel, self._sources = kernel, f"{kernel}-{stamp.hex()[:16]}"
        super().__init__(folder, self._sources, stamp)

    def _name(self, key: object) -> str:
        return f"{self._sources}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"

    def load(self, key: object) -> Any:
        """Return the machine code for a signature.

        Raises:
            FileNotFoundError: the signature has not been compiled from these sources.
            Exception: of any type, if the file is unreadable or damaged.
        """
        key_of_file, data = self._load_data(self._name(key))
        return data if key_of_file == key else None

    def save(self, key: object, data: Any) -> None:
        """Write the file completely or not at all, and try to remove files of old sources."""
        self._save_data(self._name(key), (key, data))
        for path in Path(self._cache_path).glob(f"{self._kernel}*.nb[ci]"):
            if not path.name.startswith(self._sources):
                with contextlib.suppress(OSError):  # the file may belong to another user
                    path.unlink()


class KernelIsLocked(Exception):
    """Another process is compiling the kernel; this process should go on to its next kernel."""


class _ThreadState(threading.local):
    """The preparation of kernels in the calling thread.

    Attributes:
        skips_locked: True if kernels locked by another process are postponed.
        locks: the number of kernels locked by this thread: a kernel, and the kernels it calls.
        say: called with a line before kernels are compiled.
    """

    skips_locked = False
    locks = 0
    say: Callable[[str], object] = staticmethod(lambda line: None)


_thread_state = _ThreadState()


class _Lock:
    """A lock between processes, by an empty file next to the kernel's machine code.

    The system releases the lock when its process ends. If files cannot be locked, every process
    compiles for itself.
    """

    #: True after a wait for a lock timed out: the process never waits again.
    timed_out: ClassVar[bool] = False

    def __init__(self) -> None:
        self._file: int | None = None

    def acquire(self, path: Path) -> None:
        """Acquire the lock, or continue without it after `WAIT_S`.

        Raises:
            KernelIsLocked: by another process, while the thread skips locked kernels.
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
        """Return True if the file is locked now."""
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
            time.sleep(_POLL_S)

    def release(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            _thread_state.locks -= 1
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may also have the file open
            os.close(file)


def prepare(
    calls: Sequence[Callable[[], object]],
    number: int,
    say: Callable[[str], object],
    cores: int | None = None,
) -> None:
    """Call functions that use kernels, so that these are compiled or loaded from the disk.

    Args:
        calls: in any order; each has no effect but loading its kernels.
        number: the index of this process among the processes of its host doing the same. As many
            processes as there are cores begin with different calls: they compile different kernels
            in parallel and load each other's results. A process whose first kernel is locked waits
            for these results, because starting the compiler takes a quarter of a second.
        say: called with a line before the first kernel is compiled, and with advice if machine code
            cannot be written.
        cores: of this host; None: those that this process may use.

    Local. Cost: negligible if the kernels are loaded from the disk.
    """
    said: set[str] = set()

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    at_once = max(_AT_ONCE, cores or _cores())
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
    """Return the number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _stamp() -> bytes:
    """Return a hash of all files of this package and Numba's version."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    digests = [hashlib.sha256(f.read_bytes()).digest() for f in files]
    return hashlib.sha256(b"".join([numba.__version__.encode(), *digests])).digest()
