"""Check a checkpoint against a learner, before anything of the learner changes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...array_files import StoredArray
from ...errors import UserError
from ...kernels import body
from ...options import all_options, values_of
from ...state import components
from ...validation import LARGEST_INTEGER, shown
from ..learner import Learner
from ..state.reshard import leaves
from ..state.state_tree import Tree, is_array, is_state, state_fields

ANY = "anything"
PLAIN = {"bool": "bool", "int": "int", "float": "float", "str": "str", "None": "None"}


def compatibility_facts(learner: Learner, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that must be equal in a learner and in a checkpoint to load."""
    parameters = learner.parameters
    return {
        "algorithm": _options(learner.algorithm),
        "optimizer": _options(learner.local_step.optimizer),
        "layout": {name: list(shape) for name, shape in parameters.shapes.items()},
        "dtype": str(parameters.dtype),
        "facts": {name: repr(value) for name, value in facts.items()},
    }


def require_equal(learner: Learner, saved: Tree, arrays: Mapping[str, StoredArray]) -> None:
    """Check a saved rank's state against this learner's: names, types, dtypes and shapes.

    Stripes may have other lengths, since the saving run may have had another number of ranks.

    Args:
        saved: the flattened state tree of one rank.
        arrays: the arrays of this saved rank, by name.
    Raises:
        UserError: names the field in which they differ.

    Local.
    """
    comparison = _Comparison(arrays, learner.parameters.flat.size)
    x = learner.parameters.flat
    names = saved["parameters"]
    shape = arrays[names[0]].shape if _names_array(names) and names[0] in arrays else None
    if shape is not None and shape != x.shape:
        raise UserError(f"has {math.prod(shape)} parameters, but this model {x.size}")
    comparison.check(x, "Array", saved["parameters"], "parameters")
    for name, state in learner.states.items():
        if name not in saved:
            raise UserError(f"lacks the state of the {name}, which this program has")
        comparison.check(state, "", saved[name], name)
    unused = sorted(arrays.keys() - comparison.used)
    if unused:
        raise UserError(f"has {unused[0]}, which is not a part of its state")


def require_possible(learner: Learner, tree: Tree, ranks: int) -> None:
    """Check the values of the tree to be restored on this rank.

    Parameters must be finite (unless the learner skips the block that they belong to, at its end),
    counters within their bounds, and stripes of the right length. Each component checks its own
    part.

    Args:
        tree: the state tree with its arrays, resharded for this rank.
        ranks: the number of ranks in the checkpoint.
    Raises:
        UserError: names the impossible value.

    Local.
    """
    x = tree["parameters"]
    skips = learner.skipped.skips and not learner.algorithm.synchronizes_every_step
    if not skips and not math.isfinite(body(x).largest_magnitude(x)):
        raise UserError("has parameters that are not finite")
    for name, state in learner.states.items():
        _require_counts(state, tree[name], name)
    for where, rule, live in leaves(learner.state, "algorithm"):
        if rule == "stripe" and live is not None:
            value = _at(tree, where)
            if np.shape(value) != live.shape:
                raise UserError(f"has {where} of {np.shape(value)}, but this rank {live.shape}")
    for name, state in learner.states.items():
        for place, component in components(state):
            component.check(_at(tree[name], place), ranks)


def _require_counts(live: Any, saved: Tree, where: str) -> None:
    """Check numbers with a declared least value: finite, and not below it."""
    for field in state_fields(live):
        value, name, least = saved[field.name], f"{where}.{field.name}", field.metadata.get("least")
        part = getattr(live, field.name)
        parts = (
            {key: one for key, one in part.items() if is_state(one)} if type(part) is dict else {}
        )
        if is_state(part):
            _require_counts(part, value, name)
        elif parts:
            for key, one in parts.items():
                _require_counts(one, value[key], f"{name}.{key}")
        elif least is not None and isinstance(value, int | float) and not least <= value < math.inf:
            raise UserError(f"{name}={shown(value)} must be a finite number, at least {least}")


class _Comparison:
    """Walk through a live state and a saved state in parallel and compare their structure."""

    def __init__(self, arrays: Mapping[str, StoredArray], size: int) -> None:
        self._arrays, self._size = arrays, size
        self.used: set[str] = set()

    def check(
        self, live: Any, annotation: str, saved: Any, where: str, rule: str | None = None
    ) -> None:
        """Compare a live value with its saved counterpart.

        Args:
            annotation: the type annotation of the field. It may allow more types than the live
                value's.
            rule: the reshard rule of the field.
        """
        if is_state(live):
            self._state(live, saved, where)
        elif isinstance(saved, dict):
            self._dictionary(live, annotation, saved, where, rule)
        elif isinstance(saved, list):
            self._array(live, annotation, saved, where, rule)
        else:
            _require_kind(live, annotation, saved, where)
            if type(saved) is int and abs(saved) > LARGEST_INTEGER:
                raise UserError(f"has {where}={shown(saved)}, which is too large")

    def _state(self, live: Any, saved: Any, where: str) -> None:
        if not isinstance(saved, dict):
            had = "nothing" if saved is None else "another kind of value"
            raise UserError(f"has {had} for {where}, unlike these options")
        live_fields = {field.name: field for field in state_fields(live)}
        for name in sorted(live_fields.keys() ^ saved.keys()):
            has = "lacks" if name in live_fields else "has"
            raise UserError(f"{has} {where}.{name}, unlike this program's {type(live).__name__}")
        for name, field in live_fields.items():
            text = field.type if isinstance(field.type, str) else "Any"
            rule = field.metadata.get("across")
            value = {} if field.metadata.get("open") else getattr(live, name)
            self.check(value, text, saved[name], f"{where}.{name}", rule)

    def _dictionary(
        self, live: Any, annotation: str, saved: Tree, where: str, rule: str | None
    ) -> None:
        _require_kind(live, annotation, saved, where)
        live = live if isinstance(live, dict) else {}
        like = next(iter(live.values()), None)
        if is_state(like) and live.keys() != saved.keys():
            raise UserError(
                f"has {where} {', '.join(saved)}, but this program has {', '.join(live)}"
            )
        for name, value in saved.items():
            kind = "Any" if like is None else ""
            self.check(live.get(name, like), kind, value, f"{where}.{name}", rule)

    def _array(
        self, live: Any, annotation: str, saved: list[Any], where: str, rule: str | None
    ) -> None:
        _require_kind(live, annotation, saved, where)
        if not _names_array(saved) or saved[0].rstrip("'") != where:
            raise UserError(f"has {shown(saved)} for {where}, which is not the name of an array")
        if saved[0] not in self._arrays:
            raise UserError(f"lacks the array {saved[0]}")
        self.used.add(saved[0])
        if live is None or not is_array(live):
            return
        array = self._arrays[saved[0]]
        same_kind = array.dtype == live.dtype and len(array.shape) == live.ndim
        whole = live.size == self._size and rule != "stripe"
        if not same_kind or (whole and array.shape != live.shape):
            raise UserError(
                f"has {where} of {array.dtype} {list(array.shape)}, but this program "
                f"{live.dtype} {list(live.shape)}"
            )


def _require_kind(live: Any, annotation: str, saved: Any, where: str) -> None:
    """Check a saved value's type against the live value and the field's annotation."""
    allowed = {_kind(live)}
    for word in re.split(r"\s*\|\s*", annotation):
        named = "dict" if word.startswith("dict[") else PLAIN.get(word)
        if named is None and re.search("Array|ndarray", word):
            named = "array"
        allowed.add(named or (ANY if word else ""))
    if "float" in allowed:
        allowed.add("int")
    if ANY not in allowed and _kind(saved) not in allowed:
        raise UserError(
            f"has another kind of value for {where}, unlike these options: {shown(saved)}"
        )


def _kind(value: Any) -> str:
    """Name the type of a live value, or of a value of a flattened tree."""
    if value is None:
        return "None"
    if isinstance(value, dict):
        return "dict"
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind.__name__
    return "array"


def _names_array(saved: Any) -> bool:
    return isinstance(saved, list) and len(saved) == 1 and isinstance(saved[0], str)


def _at(tree: Tree, where: str) -> Any:
    """Return the value at a place, named as by `leaves`, or None if there is none."""
    value: Any = tree
    for name in where.split(".") if where else ():
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _options(options: Any) -> dict[str, Any]:
    """Return the class name of a dataclass of options, and the `repr` of each option."""
    values = {name: repr(value) for name, value in values_of(options).items()}
    return {"name": type(options).__name__, "options": values}


def default_options(learner: Learner) -> dict[str, dict[str, str]]:
    """Return the `repr` of each option's default, of the algorithm and the optimizer. A checkpoint
    written before an option existed has its default."""
    chosen = {"algorithm": learner.algorithm, "optimizer": learner.local_step.optimizer}
    return {
        what: {option.name: repr(option.default) for option in all_options(type(options))}
        for what, options in chosen.items()
    }
