"""What a learner is given: of the right kinds, and the same on all ranks."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from ..algorithms import Algorithm
from ..errors import UserError
from ..optimizers import Optimizer
from ..options import all_options, values_of
from ..parameters import Parameters
from ..validation import kind_of


def check_kinds(parameters: Any, optimizer: Any, algorithm: Any) -> None:
    """See that arguments are what they must be, and not in one another's place."""
    for name, value, kind, example in (
        ("parameters", parameters, Parameters, "model.parameters"),
        ("optimizer", optimizer, Optimizer, "SGD(lr=0.1)"),
        ("algorithm", algorithm, Algorithm, "DataParallelSGD()"),
    ):
        if not isinstance(value, kind):
            raise UserError(other_kind(name, value, kind.__name__, example))


def other_kind(name: str, value: Any, kind: str, example: str) -> str:
    """What to say of an argument that is none of a class."""
    return f"{name} must be an instance of {kind}, such as {example}: it is {kind_of(value)}"


def facts_of(name: str, options: Any) -> dict[str, Any]:
    """What must agree of an algorithm or an optimizer: its class, and each of its options."""
    if not is_dataclass(options):
        return {name: options}
    compared = {option.name for option in all_options(type(options)) if option.field.compare}
    values = {key: value for key, value in values_of(options).items() if key in compared}
    return {
        name: type(options).__name__,
        **{f"{option} of the {name}": value for option, value in values.items()},
    }
