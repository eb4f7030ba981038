"""Check the JSON documents of a checkpoint, whoever wrote them. Everything here is local."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UserError
from ...plain_values import to_json
from ...validation import integer, shown

FORMAT = 4  #: the format of written checkpoints
READABLE = (2, 3, 4)  #: the formats of checkpoints that can be read

FILE = re.compile(r"[\w-]+\.(json|safetensors)")
END = re.compile(r"[1-9]\d{0,17}")
CHECKSUM = re.compile(r"[0-9a-f]{64}")

BLOCK = {
    "block_samples": "samples",
    "own_samples": "own_samples",
    "block_steps": "steps",
    "sent_samples": "sent_samples",
    "sent_lr": "sent_lr",
}
"""Fields of local updates until format 3, and of a fragment from then on."""

Check = Callable[[str, Any], object]


def parsed(data: bytes) -> Any:
    """Parse a JSON document.

    Raises:
        UserError: the data are not a JSON document.
    """
    try:
        return json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"is not a JSON document: {error}") from None
    except RecursionError:
        raise UserError("is a JSON document that is nested too deep") from None
    except ValueError:  # raised by `int`
        raise UserError("is a JSON document with a number that has too many digits") from None


def check_manifest(manifest: Any) -> None:
    """Check that a manifest of a readable format has all entries, with possible values.

    Raises:
        UserError: names the wrong entry.
    """
    _mapping_of(MANIFEST)("manifest", manifest)
    ranks, files = manifest["ranks"], len(manifest["files"])
    if 2 * ranks > files:
        raise UserError(f"ranks={ranks} need two files each, but there are {files} files")


def check_numbers(numbers: Any) -> None:
    """Check the JSON document of a rank likewise."""
    _mapping_of(NUMBERS)("numbers", numbers)


def converted(numbers: dict[str, Any], version: int) -> dict[str, Any]:
    """Convert a rank's numbers from any readable format to the present format.

    In format 2, `extra` is plain JSON instead of a document of `plain_values`. Of a PyTorch model
    it holds parameters and buffers only, and of a PyTorch optimizer a part of the state. In formats
    2 and 3, local updates have no fragments.

    Args:
        numbers: the content of a rank's JSON file. Changed.
        version: the format of the checkpoint.
    Raises:
        UserError: the present format cannot hold the numbers.
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
    _add_fragments(numbers.get("state"))
    _add_worker(numbers.get("state"))
    return numbers


def _add_correction(state: Any) -> None:
    """Add the fields of gradient projection to states written before projection existed."""
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


def _add_fragments(state: Any) -> None:
    """Convert local updates written before models had fragments, whose blocks were of the whole
    model."""
    own = state.get("algorithm") if isinstance(state, dict) else None
    if not isinstance(own, dict) or not {*BLOCK} <= own.keys():
        return
    block = {name: own.pop(earlier) for earlier, name in BLOCK.items()}
    own["fragments"] = {"0": {**block, "blocks": 0, "is_first": False}}


def _add_worker(state: Any) -> None:
    """Add the number of a worker to states written when every worker was a single rank."""
    own = state.get("algorithm") if isinstance(state, dict) else None
    if isinstance(own, dict) and {"served", "gathered_samples"} <= own.keys():
        own.setdefault("worker", -1)


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
        raise UserError(f"{name}={shown(value)} must be a finite number or null")


def _shape(name: str, value: Any) -> None:
    _is(list, "a list of lengths")(name, value)
    for length in value:
        _whole(0)(name, length)


def _mapping_of(checks: Mapping[str, Check]) -> Check:
    """Make a check for a mapping with at least these entries."""

    def check(name: str, value: Any) -> None:
        _is(dict, "a mapping")(name, value)
        for key, check_value in checks.items():
            if key not in value:
                raise UserError(f"{name} lacks {key!r}")
            check_value(key, value[key])

    return check


def _mapping_from(keys: Check, values: Check) -> Check:
    """Make a check for a mapping with any entries of one kind."""

    def check(name: str, value: Any) -> None:
        _is(dict, "a mapping")(name, value)
        for key, entry in value.items():
            keys(f"a name in {name}", key)
            values(f"{name}[{shown(key)}]", entry)

    return check


def _weight(name: str, value: Any) -> None:
    """Check the weight of a model, or the weights of its parts by their ends."""
    if not isinstance(value, dict):
        _whole(0)(name, value)
        return
    for end, weight in value.items():
        _matching(END, "the end of a part")(f"a name in {name}", end)
        _whole(0)(f"{name}[{shown(end)}]", weight)
    _is(dict, "a mapping")(name, value or None)


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
    "weight": _weight,
    "bytes_sent": _whole(0),
    "extra": _is(object, ""),
}
