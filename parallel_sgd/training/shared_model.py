"""The model that all ranks have in common, shown for a while in place of a rank's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import UserError
from ..kernels import Array


class SharedModel:
    """Knows which of the two a learner's parameters are at present.

    Attributes:
        is_shown: whether they are the shared one.
    """

    def __init__(self) -> None:
        self.is_shown = False

    @contextmanager
    def shown(self, x: Array, shared: Array) -> Iterator[None]:
        """For a `with` block `x` holds what `shared` does; then again what it held. Local.

        Args:
            x: [n], a rank's own model.
            shared: [n]; the same array where nothing has to be copied.
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

    def require_own(self, name: str) -> None:
        """Refuse what goes on with training, while the shared model is shown. Local.

        Args:
            name: of what was called.
        """
        if self.is_shown:
            raise UserError(
                f"{name} must come after the `with` block of evaluation() or shared_model(): in it "
                "the model is the one that all ranks have in common, and not this rank's own"
            )
