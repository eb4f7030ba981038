"""Run functions in background threads while training continues."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

from .. import runtime
from ..errors import RankFailed, RanksLost
from ..runtime import SimulatedFailure
from .liveness import finish as finish_protocol  # noqa: F401  registers its exit handler first, so it runs after the one below
from .liveness.abort import end_at_exit

Result = TypeVar("Result")

_running: dict[InBackground[Any], None] = {}  # in the order of their starts
_failed: set[InBackground[Any]] = set()  # with an exception not yet collected
_ending = runtime.Event()

ENDED_AFTER_S = 5.0  #: longest wait for stopped tasks


class ProgramEnds(RuntimeError):
    """The program is ending, so the awaited event will never happen."""


def program_ends() -> bool:
    """Return True if the program is ending and only waits for background tasks. Local."""
    return _ending.is_set()


def end_rank_tasks(then: Callable[[], object]) -> None:
    """Stop this thread-rank's background tasks, once no remaining task needs them. Local.

    Args:
        then: called after all tasks have ended. Tasks without a `stop` run to their own end first;
            this thread does not wait for them.
    """
    tasks = [task for task in list(_running) if task._started_by == threading.get_ident()]
    waited_for = [task for task in tasks if task._stop is None]

    def end() -> None:
        for task in waited_for:
            task.wait()
        _stop(tasks)
        if all(task.done for task in tasks):
            then()

    if waited_for:
        runtime.Thread(end, "end of a rank").start()
    else:
        end()


def uncollected() -> list[InBackground[Any]]:
    """Return the ended tasks with an exception that nobody has collected. Local."""
    return list(_failed)


def _stop(running: Iterable[InBackground[Any]]) -> None:
    """Stop all stoppable tasks, and wait up to `ENDED_AFTER_S` for their end."""
    stopped = [task for task in running if task._stop is not None]
    for task in stopped:
        task.stop()
    latest = runtime.monotonic() + ENDED_AFTER_S
    for task in stopped:
        task._ended.wait(max(0.0, latest - runtime.monotonic()))


class InBackground(Generic[Result]):
    """Run a function in a background thread. `result()` waits for it, and raises its exception.

    Args:
        name: name of the thread.
        function: to run.
        stop: makes the function return soon, however much work is left. Called at the latest when
            the program ends, after all tasks without a `stop` have ended: those may need this one.
        reports: False if other calls raise the function's exception, too: then nobody need collect
            it.

    A function that communicates needs its own communicator (`Communicator.duplicate`), since its
    collectives run concurrently with those of the main thread.

    Local. The program waits for the task before MPI is finalized. An exception not collected by
    then is printed, and ends the program with exit code 1.

    >>> InBackground("addition", lambda: 1 + 1).result()
    2
    """

    def __init__(
        self,
        name: str,
        function: Callable[[], Result],
        stop: Callable[[], object] | None = None,
        *,
        reports: bool = True,
    ) -> None:
        self._reports = reports
        self._function: Callable[[], Result] | None = function
        self._stop = stop
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._ended = runtime.Event()
        self._started_by = threading.get_ident()
        self._thread = runtime.Thread(self._run, name)
        _running[self] = None
        try:
            self._thread.start()
        except RuntimeError:  # too many threads
            del _running[self]
            raise

    @property
    def done(self) -> bool:
        """True if `result` would return or raise at once."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait for the function's end, without taking its result or exception."""
        # bounded: for work of this rank, whose own waits are looked at here
        self._ended.wait()

    def result(self) -> Result:
        """Wait for the function's end. Return its result, or raise its exception."""
        error = self.error()
        if error is not None:
            raise error
        return cast(Result, self._result)

    def error(self) -> BaseException | None:
        """Wait for the function's end. Return its exception, for the caller to report, or None."""
        self.wait()
        _failed.discard(self)
        return self._error

    @property
    def failed(self) -> bool:
        """True if the function ended with an exception not yet collected."""
        return self in _failed

    def stop(self) -> None:
        """Ask the function to return soon."""
        assert self._stop is not None
        self._stop()

    def end(self) -> None:
        """Stop the function, and wait up to `ENDED_AFTER_S` for its end."""
        _stop([self])

    def _run(self) -> None:
        assert self._function is not None
        try:
            self._result = self._function()
        except (RankFailed, RanksLost, ProgramEnds, SimulatedFailure) as error:
            # reported elsewhere
            self._error = error
        except BaseException as error:  # raised again in `result`
            self._error = error
            if self._reports and not runtime.process_failed():
                _failed.add(self)
        finally:
            self._function = None  # frees the objects it refers to
            self._ended.set()
            _running.pop(self, None)


def _clear_in_child() -> None:
    """Clear the tasks in a forked child: none of the threads runs there."""
    _running.clear()
    _failed.clear()


os.register_at_fork(after_in_child=_clear_in_child)


@atexit.register
def _wait_for_all() -> None:
    """Wait for all tasks as Python exits: no thread may be in MPI during MPI_Finalize."""
    _ending.set()
    # bounded: for work of this rank, whose own waits are looked at here
    while waited_for := [task for task in list(_running) if task._stop is None]:
        for task in waited_for:  # a task may start another task
            task.wait()
    _stop(list(_running))
    errors = {str(task._error): task._error for task in _failed if task._error is not None}
    if errors:  # one each: ranks as threads may fail with the same text
        end_at_exit(list(errors.values()))
