"""Access to a learner's model: refused after `close`, and for steps while the common model is
shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import UserError
from ..kernels import Array


class ModelAccess:
    """Guards the use of a learner, and shows the ranks' common model in place of a local model.

    Attributes:
        is_closed: True after the learner's `close`.
        is_shown: True while the parameters are the common model.
    """

    def __init__(self) -> None:
        self.is_closed = self.is_shown = False

    @contextmanager
    def shown(self, x: Array, shared: Array) -> Iterator[None]:
        """Let `x` hold the values of `shared` for a `with` block, then restore the values of `x`.
        Local.

        Args:
            x: [n], a rank's local model.
            shared: [n]; the same array as `x` if no copy is needed.
        """
        own = None if shared is x else x.copy()
        if own is not None:
            x[...] = shared
        outer, self.is_shown = self.is_shown, True
        try:
            yield
        finally:
            self.is_shown = outer
            if own is not None:
                x[...] = own

    def require_open(self) -> None:
        """Refuse a call on a closed learner. Local."""
        if self.is_closed:
            raise UserError("this learner is closed: it cannot train after close()")

    def require_own(self, name: str) -> None:
        """Refuse a call that continues training while the common model is shown. Local.

        Args:
            name: of the refused call.
        """
        if self.is_shown:
            raise UserError(
                f"{name} must come after the `with` block of evaluation() or shared_model(): in "
                "the block the model is the common model of all ranks, not this rank's own"
            )
