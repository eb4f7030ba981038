"""The learner's interface for code to capture, restore or reshard its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...communication import Communicator
from ...parameters import Parameters
from ...state import Cause
from ..runner import AlgorithmRunner


class Stateful(Protocol):
    """A subset of `Learner`; see there for all members."""

    @property
    def parameters(self) -> Parameters: ...

    @property
    def world(self) -> Communicator: ...

    @property
    def comm(self) -> Communicator: ...

    @property
    def runner(self) -> AlgorithmRunner: ...

    @property
    def state(self) -> Any: ...

    @property
    def states(self) -> Mapping[str, Any]: ...

    @property
    def samples(self) -> int: ...

    @property
    def stripe_sizes(self) -> Sequence[Mapping[str, int]]: ...

    def meet(self) -> None: ...

    def state_replaced(self, cause: Cause) -> None: ...
