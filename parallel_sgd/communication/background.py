"""Something to do while training goes on: one function in a thread of its own."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from . import departures  # noqa: F401  its exit handler comes first here, and runs after the one below

Result = TypeVar("Result")

_running: set[InBackground[Any]] = set()
_ending = threading.Event()


def program_ends() -> bool:
    """Whether the program is at its end, and only waits for what runs in the background. Local."""
    return _ending.is_set()


class InBackground(Generic[Result]):
    """Runs a function in a thread; `result()` waits for it, and raises what it raised.

    Whoever communicates in it needs a communicator of its own (`Communicator.duplicate`), since
    its collectives run beside those of the main thread.

    Local. At the end of the program it is waited for, before MPI is shut down under it.

    >>> InBackground("addition", lambda: 1 + 1).result()
    2
    """

    def __init__(self, name: str, function: Callable[[], Result]) -> None:
        self._function = function
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _running.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many
            _running.discard(self)
            raise

    @property
    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._ended.is_set()

    def result(self) -> Result:
        """Wait for the function's end; what it returned."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return cast(Result, self._result)

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # raised where somebody waits for the result
            self._error = error
        finally:
            self._ended.set()
            _running.discard(self)


@atexit.register
def _wait_for_all() -> None:
    """Python's own exit handlers run before MPI_Finalize, in which no thread may still be."""
    _ending.set()
    while _running:  # one may begin another
        for background in _running.copy():
            background._ended.wait()
