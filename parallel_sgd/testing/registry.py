"""Checks: a function to run on all ranks, and the identity to hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from .cases import Case

Body = Callable[[Case], "str | None"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of the conformance suite.

    Attributes:
        name: used in `only` and `exceptions` of `check_algorithm`.
        identity: the property to hold, in a single line.
        body: run by all ranks. Returns this rank's problem in a single line, or None. A problem is
            not raised, since the remaining ranks would wait for a rank after its exit.
        least_ranks: least number of ranks for the check.
        alone: the ranks do not communicate in the check.
        largest: run on the largest of several numbers of ranks only.
    """

    name: str
    identity: str
    body: Body
    least_ranks: int = 1
    alone: bool = False
    largest: bool = False

    __test__: ClassVar[bool] = False  # not a test for pytest


def check(
    *, least_ranks: int = 1, alone: bool = False, largest: bool = False
) -> Callable[[Body], Check]:
    """Make a check of a function, named by the function.

    The first paragraph of its docstring is the identity.
    """

    def made(body: Body) -> Check:
        identity = (inspect.getdoc(body) or "").partition("\n\n")[0].replace("\n", " ")
        assert identity, f"{body.__name__} does not say what must hold"
        return Check(
            name=body.__name__,
            identity=identity,
            body=body,
            least_ranks=least_ranks,
            alone=alone,
            largest=largest,
        )

    return made
