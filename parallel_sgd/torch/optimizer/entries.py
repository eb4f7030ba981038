"""Documents of the optimizer states of parameters, rewritten only after a change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch

from .document import Writer
from .tags import ATOMIC
from .vectors import TENSORS


class Entries:
    """The document of each parameter's state, and the arrays named in the documents.

    Documents are needed at every commit, and at every step with a possible skip. A document
    contains the location of a tensor's values instead of the values, and locations rarely change.
    So a document is rewritten only if a tensor of any state is a new object or has new memory, or
    if a number in that parameter's own state has changed.

    Args:
        new_writer: makes an empty `Writer`.

    Local.
    """

    def __init__(self, new_writer: Callable[[], Writer]) -> None:
        self._new_writer = new_writer
        self._writer = new_writer()
        self._documents: dict[str, str] = {}
        self._keys: list[Any] = []
        self._values: dict[str, list[Any]] = {}
        self._places: list[Any] | None = None

    def written(
        self, states: Mapping[str, Any], sources: Mapping[str, str]
    ) -> tuple[dict[str, str], Writer]:
        """Return the documents by parameter, and a writer to continue after these documents.

        Args:
            states: by parameter.
            sources: by parameter, the name of the whole ``state_dict()``, for errors.
        Raises:
            UserError: part of a state has a type unsuited to checkpoints.

        Cost without new tensors: some microseconds per tensor.
        """
        places = _places_in(states)
        keys = [*chain.from_iterable(states.values())] if places is not None else []
        known = places is not None and self._places == places and _same(self._keys, keys)
        known = known and self._values.keys() == states.keys()
        if not known:
            self._writer, self._documents, self._values = self._new_writer(), {}, {}
        self._places = None  # until all documents are written: an error may interrupt
        for name, p_state in states.items():
            values = [*p_state.values()] if places is not None else []
            if not known or not _same(self._values[name], values):
                where, path = f"{sources[name]}['state'][{name!r}]", ("state", name)
                self._documents[name] = self._writer.document(where, p_state, path)
                self._values[name] = values
        self._places, self._keys = places, keys
        writer = self._writer.continued() if known else self._writer.copy()
        return dict(self._documents), writer


def _places_in(states: Mapping[str, Any]) -> list[Any] | None:
    """Return the places of all tensors in the states, in order.

    None if a state contains anything but tensors with memory, numbers and texts. The caller keeps
    the tensors alive, so that their ids stay unique.
    """
    places: list[Any] = []
    for p_state in states.values():
        if type(p_state) is not dict:
            return None
        for value in p_state.values():
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
