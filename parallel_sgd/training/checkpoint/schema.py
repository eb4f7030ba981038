"""What the JSON documents of a checkpoint must be like, whoever has written them. Local."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UserError
from ...plain_values import to_json
from ...validation import integer, shown

FORMAT = 3  #: of the folders that are written
READABLE = (2, 3)  #: formats that are read; another is refused

FILE = re.compile(r"[\w-]+\.(json|safetensors)")
CHECKSUM = re.compile(r"[0-9a-f]{64}")

Check = Callable[[str, Any], object]


def parsed(data: bytes) -> Any:
    """What a JSON document says.

    Raises:
        UserError: it is none.
    """
    try:
        return json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"is no JSON document: {error}") from None
    except RecursionError:
        raise UserError("is a JSON document that is nested too deep") from None
    except ValueError:  # of `int`
        raise UserError("is a JSON document with a number of too many digits") from None


def check_manifest(manifest: Any) -> None:
    """See that a manifest of this format says all that it must, and nothing that is not possible.

    Raises:
        UserError: naming what is wrong.
    """
    _mapping_of(MANIFEST)("manifest", manifest)
    ranks, files = manifest["ranks"], len(manifest["files"])
    if 2 * ranks > files:
        raise UserError(f"ranks={ranks} need two files each, but there are {files}")


def check_numbers(numbers: Any) -> None:
    """The same of what a rank has written beside its arrays."""
    _mapping_of(NUMBERS)("numbers", numbers)


def converted(numbers: dict[str, Any], version: int) -> dict[str, Any]:
    """Numbers of a rank in any readable format, as the present format has them.

    Format 2 has what `extra` was as JSON gave it, and not as `plain_values` writes it; of a PyTorch
        model it has parameters and buffers alone, and of a PyTorch optimizer not all of its state.

    Raises:
        UserError: the present format cannot hold them.
    """
    if version == 2:
        check_numbers(numbers)
        optimizer = numbers["state"]["optimizer"]
        if isinstance(optimizer, dict) and "kinds" in optimizer:
            raise UserError(
                "has the state of a PyTorch optimizer in format 2, which this version does not read"
            )
        numbers["extra"] = to_json("extra", numbers["extra"])
        if isinstance(model := numbers["state"].get("model"), dict):
            model |= {"others": {}, "epoch": -1}
    _add_correction(numbers.get("state"))
    return numbers


def _add_correction(state: Any) -> None:
    """To states of optimizers and exchanges that were written before gradients were projected."""
    if not isinstance(state, dict):
        return
    for own, name in (
        ({"buffers", "steps", "samples"}, "correction"),
        ({"residuals", "bits"}, "projections"),
    ):
        if own <= state.keys():
            state.setdefault(name, {})
    for part in state.values():
        _add_correction(part)


def _whole(least: int) -> Check:
    return lambda name, value: integer(name, value, least)


def _is(kind: type, what: str) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise UserError(f"{name}={shown(value)} must be {what}")

    return check


def _matching(pattern: re.Pattern[str], what: str) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise UserError(f"{name}={shown(value)} must be {what}")

    return check


def _metric(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, float) and math.isfinite(value)):
        raise UserError(f"{name}={shown(value)} must be a finite number or nothing")


def _shape(name: str, value: Any) -> None:
    _is(list, "a list of lengths")(name, value)
    for length in value:
        _whole(0)(name, length)


def _mapping_of(checks: Mapping[str, Check]) -> Check:
    """With these entries at least."""

    def check(name: str, value: Any) -> None:
        _is(dict, "a mapping")(name, value)
        for key, check_value in checks.items():
            if key not in value:
                raise UserError(f"{name} lacks {key!r}")
            check_value(key, value[key])

    return check


def _mapping_from(keys: Check, values: Check) -> Check:
    """With any entries of one kind."""

    def check(name: str, value: Any) -> None:
        _is(dict, "a mapping")(name, value)
        for key, entry in value.items():
            keys(f"a name in {name}", key)
            values(f"{name}[{shown(key)}]", entry)

    return check


_TEXT = _is(str, "a text")
_OPTIONS = _mapping_of({"name": _TEXT, "options": _mapping_from(_TEXT, _TEXT)})
_FACT = _mapping_of({"bytes": _whole(0), "sha256": _matching(CHECKSUM, "64 hexadecimal digits")})

MANIFEST: dict[str, Check] = {
    "parallel_sgd": _TEXT,
    "ranks": _whole(1),
    "samples": _whole(0),
    "metric": _metric,
    "algorithm": _OPTIONS,
    "optimizer": _OPTIONS,
    "layout": _mapping_from(_TEXT, _shape),
    "dtype": _TEXT,
    "facts": _mapping_from(_TEXT, _TEXT),
    "files": _mapping_from(_matching(FILE, "the name of a file"), _FACT),
}

NUMBERS: dict[str, Check] = {
    "state": _mapping_of(dict.fromkeys(("parameters", "optimizer", "algorithm"), _is(object, ""))),
    "weight": _whole(0),
    "bytes_sent": _whole(0),
    "extra": _is(object, ""),
}
