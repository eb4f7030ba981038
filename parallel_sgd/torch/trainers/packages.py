"""Errors about packages that only some programs need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import UserError


@contextmanager
def from_extra(name: str, extra: str) -> Iterator[None]:
    """Name the extra to install if an import in the `with` block fails. Local.

    Args:
        name: that needs the import, for the error.
        extra: of this package's.
    Raises:
        UserError: the import has failed.
    """
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"psgd.torch.{name} needs {extra} ({error}): pip install '.[{extra}]' from the checkout"
        ) from error
