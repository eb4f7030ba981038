"""Something to do while training goes on: one function in a thread of its own."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

from .liveness import finish as finish_protocol  # noqa: F401  its exit handler comes first here, and runs after the one below
from .liveness.abort import end_at_exit
from .liveness.failure import RankFailed, is_rank_failure

Result = TypeVar("Result")

_running: set[InBackground[Any]] = set()
_failed: set[InBackground[Any]] = set()  # with an error that nobody has been told
_ending = threading.Event()

ENDED_AFTER_S = 5.0  #: at the latest, what is stopped


class ProgramEnds(RuntimeError):
    """What was to be waited for never comes, since the program is at its end."""


def program_ends() -> bool:
    """Whether the program is at its end, and only waits for what runs in the background. Local."""
    return _ending.is_set()


def end_rank_tasks(then: Callable[[], object]) -> None:
    """The rank that is this thread ends: stop what it has begun, as soon as nothing needs it.

    Args:
        then: called when nothing of that goes on any more. What cannot be stopped comes to its own
            end first; this thread does not wait for that.

    Local.
    """
    own = [task for task in _running.copy() if task._begun_in == threading.get_ident()]
    waited_for = [task for task in own if task._stop is None]

    def end() -> None:
        for task in waited_for:
            task.wait()
        _stop(own)
        if all(task.done for task in own):
            then()

    if waited_for:
        threading.Thread(target=end, name="end of a rank", daemon=True).start()
    else:
        end()


def _stop(running: Iterable[InBackground[Any]]) -> None:
    """All of these that can be, and wait a little for that."""
    stopped = [task for task in running if task._stop is not None]
    for task in stopped:
        task.stop()
    latest = time.monotonic() + ENDED_AFTER_S
    for task in stopped:
        task._ended.wait(max(0.0, latest - time.monotonic()))


class InBackground(Generic[Result]):
    """Runs a function in a thread; `result()` waits for it, and raises what it raised.

    Args:
        name: of the thread.
        function: to run.
        stop: lets the function return soon, however much there is to do: called at the latest as
            the program ends, when all that has none has come to its own end: that may need it.

    Whoever communicates in it needs a communicator of its own (`Communicator.duplicate`), since
    its collectives run beside those of the main thread.

    Local. At the end of the program it is waited for, before MPI is shut down under it. What it has
    raised, if nobody has asked for it by then, is printed, and ends the program with exit code 1.

    >>> InBackground("addition", lambda: 1 + 1).result()
    2
    """

    def __init__(
        self, name: str, function: Callable[[], Result], stop: Callable[[], object] | None = None
    ) -> None:
        self._function: Callable[[], Result] | None = function
        self._stop = stop
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._begun_in = threading.get_ident()
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

    def wait(self) -> None:
        """Wait for the function's end, and leave what it returned or raised to others."""
        self._ended.wait()

    def result(self) -> Result:
        """Wait for the function's end; what it returned."""
        error = self.error()
        if error is not None:
            raise error
        return cast(Result, self._result)

    def error(self) -> BaseException | None:
        """Wait for the function's end; what it raised, of which the caller tells the user."""
        self.wait()
        _failed.discard(self)
        return self._error

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error of which nobody has been told."""
        return self in _failed

    def stop(self) -> None:
        """Ask the function to return soon."""
        assert self._stop is not None
        self._stop()

    def end(self) -> None:
        """Stop it, and wait a little for that."""
        _stop([self])

    def _run(self) -> None:
        assert self._function is not None
        try:
            self._result = self._function()
        except (RankFailed, ProgramEnds) as error:  # of which others tell
            self._error = error
        except BaseException as error:  # raised where somebody waits for the result
            self._error = error
            if not is_rank_failure(error):  # of which every rank hears by itself
                _failed.add(self)
        finally:
            self._function = None  # and what it holds
            self._ended.set()
            _running.discard(self)


def _forget() -> None:
    """In a child that this process has forked: none of these threads runs there."""
    for tasks in (_running, _failed):
        tasks.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _wait_for_all() -> None:
    """Python's own exit handlers run before MPI_Finalize, in which no thread may still be."""
    _ending.set()
    while waited_for := [task for task in _running.copy() if task._stop is None]:
        for task in waited_for:  # one may begin another
            task.wait()
    _stop(_running.copy())
    errors = {str(task._error): task._error for task in _failed if task._error is not None}
    if errors:  # threads that are ranks may have the same
        end_at_exit(list(errors.values()))
