"""Documents of the states of an optimizer's parameters, written again only where they changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch

from .document import ATOMIC, Writer
from .vectors import TENSORS

Path = tuple[Any, ...]


class Entries:
    """The document of each parameter's state, and the arrays that the documents name.

    A state is often asked for: at every commit, and at every step that may be left out. What a
    document says of a tensor is where its values are, and that stays as it is from step to step. So
    a document is written anew only if a tensor of any state is another one, or has another memory,
    or if a number in that parameter's own state has changed.

    Args:
        new_writer: makes a `Writer` that has written nothing yet.

    Local.
    """

    def __init__(self, new_writer: Callable[[], Writer]) -> None:
        self._new_writer = new_writer
        self._writer = new_writer()
        self._documents: dict[str, str] = {}
        self._keys: list[Any] = []
        self._values: dict[str, list[Any]] = {}
        self._places: list[Any] | None = None

    def written(self, what: str, states: Mapping[str, Any]) -> tuple[dict[str, str], Writer]:
        """Return the documents by parameter, and a writer that goes on after them.

        Args:
            what: what errors call the whole ``state_dict()``.
            states: by parameter.
        Raises:
            UserError: a part of a state is of a type that no checkpoint can hold.
        Cost where no tensor is another one: some microseconds a tensor.
        """
        places = _places_in(states)
        keys = [*chain.from_iterable(states.values())] if places is not None else []
        known = places is not None and self._places == places and _same(self._keys, keys)
        known = known and self._values.keys() == states.keys()
        if not known:
            self._writer, self._documents, self._values = self._new_writer(), {}, {}
        self._places = None  # until all is written: an error may end it
        for name, of_p in states.items():
            values = [*of_p.values()] if places is not None else []
            if not known or not _same(self._values[name], values):
                where, path = f"{what}['state'][{name!r}]", ("state", name)
                self._documents[name] = self._writer.document(where, of_p, path)
                self._values[name] = values
        self._places, self._keys = places, keys
        writer = self._writer.continued() if known else self._writer.copy()
        return dict(self._documents), writer


def _places_in(states: Mapping[str, Any]) -> list[Any] | None:
    """Where the tensors of the states are, in order; None where a state has more than tensors of
    their own memory, numbers and texts. The tensors are kept, so that no other one can be there."""
    places: list[Any] = []
    for of_p in states.values():
        if type(of_p) is not dict:
            return None
        for value in of_p.values():
            kind = type(value)
            if kind in TENSORS:
                if value.layout is not torch.strided or value.is_meta:
                    return None
                places.append((id(value), value.data_ptr(), value.shape, value.stride()))
            elif kind not in ATOMIC:
                return None
    return places


def _same(these: list[Any], those: list[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))
