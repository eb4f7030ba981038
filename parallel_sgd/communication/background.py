"""Something to do while training goes on: one function in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

Result = TypeVar("Result")


class InBackground(Generic[Result]):
    """Runs a function in a thread; `result()` waits for it, and raises what it raised.

    Whoever communicates in it needs a communicator of its own (`Communicator.duplicate`), since
    its collectives run beside those of the main thread.

    Local. The thread does not keep the program from ending.

    >>> InBackground("addition", lambda: 1 + 1).result()
    2
    """

    def __init__(self, name: str, function: Callable[[], Result]) -> None:
        self._function = function
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return not self._thread.is_alive()

    def result(self) -> Result:
        """Wait for the function's end; what it returned."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return cast(Result, self._result)

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # raised where somebody waits for the result
            self._error = error
