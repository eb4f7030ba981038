"""Refusal of assignments to attributes whose new value would have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import UserError

AS_MADE = "it is fixed when the learner is made: close this learner, and make a new one"

_NOTHING = object()


class FixedAttributes:
    """Base class of `Learner`: after setup, refuses to assign certain attributes. Assigning the
    present value again is allowed."""

    fixed: ClassVar[Mapping[str, str]]  #: the correct alternative, by the attribute's name
    _is_made = False  # False during setup and reconfiguration, when attributes may be assigned

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed and self._is_made and value is not getattr(self, name, _NOTHING):
            raise UserError(f"learner.{name} = ... would have no effect: {self.fixed[name]}")
        object.__setattr__(self, name, value)
