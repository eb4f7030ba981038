"""What a check is: a function that all ranks run, and the identity that must hold in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from .cases import Case

Body = Callable[[Case], "str | None"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """
    Attributes:
        name: for `only` and `exceptions` of `check_algorithm`.
        identity: what must hold, in one line.
        body: run by all ranks; returns what is wrong as this rank sees it, in one line, or None.
            It does not raise for that: ranks that leave a run would be waited for.
        least_ranks: with fewer there is nothing to see.
        alone: the ranks have nothing to do with each other in it.
    """

    name: str
    identity: str
    body: Body
    least_ranks: int = 1
    alone: bool = False

    __test__: ClassVar[bool] = False  # no test of pytest's


def check(*, least_ranks: int = 1, alone: bool = False) -> Callable[[Body], Check]:
    """Make a check of a function: its name is the check's, the first line of its docstring the
    identity."""

    def made(body: Body) -> Check:
        identity = (inspect.getdoc(body) or "").partition("\n\n")[0].replace("\n", " ")
        assert identity, f"{body.__name__} does not say what must hold"
        return Check(
            name=body.__name__,
            identity=identity,
            body=body,
            least_ranks=least_ranks,
            alone=alone,
        )

    return made
