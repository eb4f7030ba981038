"""Checks of the contract of an algorithm and its state with files, command lines and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args

import numpy as np

from ..command_line.train.options import parser
from ..errors import UserError
from ..state import ReshardRule
from ..training import Learner
from ..training.state.state_tree import capture
from .cases import Case, difference, first_of, starting_point, step, trained
from .registry import check

RESHARD_RULES = get_args(ReshardRule)
OF_NUMBERS = ("most", "share")
OF_ARRAYS = ("mean", "stripe")


@check()
def options(case: Case) -> str | None:
    """An algorithm is a frozen dataclass with keyword-only options. Its repr evaluates to an equal
    algorithm, and its options become options of the command line."""
    algorithm = case.algorithm
    kind = type(algorithm)
    decorated = "__dataclass_fields__" in vars(kind) or not vars(kind).get("__annotations__")
    if not decorated or not getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        return f"{kind.__name__} must be a frozen dataclass: @parallel_sgd.options.options"
    for option in fields(algorithm):
        if not option.kw_only:
            return f"{option.name} must be keyword-only: @parallel_sgd.options.options"
        if option.default is MISSING and option.default_factory is MISSING:
            return f"{option.name} must have a default, for the command line"
    try:
        parser("new", algorithms={"new": kind})
    except UserError as error:
        return str(error)
    text = repr(algorithm)
    if " at 0x" in text:
        return f"ranks compare algorithms by their repr, but it names an address: {text}"
    try:
        made = eval(text, {type(part).__name__: type(part) for part in _dataclasses(algorithm)})
        same = made == algorithm and hash(made) == hash(algorithm)
    except Exception as error:
        return f"its repr must evaluate to an equal algorithm: {text} raises {error!r}"
    return None if same else f"its repr must evaluate to an equal algorithm: {text} makes {made!r}"


@check()
def state(case: Case) -> str | None:
    """A state holds arrays, numbers, dictionaries of arrays and the like, and declares each.

    Every field is `across(...)` or `workspace()`, or is a dataclass of such fields:
    `parallel_sgd.state`.
    """
    learner, problems = case.learner(), []
    name = type(learner.state).__name__
    if not is_dataclass(learner.state):
        return f"init must return a dataclass, not a {name}"
    for parts in case.data():
        problems.append(_capture_problem(learner))
        step(learner, parts)
    problems.append(_capture_problem(learner))
    return first_of(problems)


@check()
def bytes_sent(case: Case) -> str | None:
    """Bytes sent are counted: none on one rank, and an increasing number on several ranks."""
    sent = [0, *case.run().bytes_sent]
    if case.comm.size == 1:
        return f"one rank has sent {sent[-1]} bytes to others" if any(sent) else None
    if sent != sorted(sent):
        return f"they must not shrink: {sent}"
    if not sent[-1]:
        return (
            f"no bytes are counted in {len(sent) - 1} minibatches of 1 to 4 samples a rank: if "
            "blocks are longer, check the algorithm with shorter blocks; if the algorithm sends "
            "messages itself, a Component of its state must count the bytes "
            "(parallel_sgd.state), as in examples/top_k.py"
        )
    return None


@check()
def arrays(case: Case) -> str | None:
    """Updates are in place: the caller's parameters, and views into them, stay the model."""
    learner = case.learner()
    parameters, gradient = learner.parameters, learner.gradient
    flat, view, to_fill = parameters.flat, parameters["b"], gradient.flat
    run = trained(learner, case.data())
    if learner.parameters is not parameters or parameters.flat is not flat:
        return "the parameters' vector has been replaced by a different vector"
    if learner.gradient is not gradient or gradient.flat is not to_fill:
        return "the gradient's vector has been replaced by a different vector"
    if not np.shares_memory(view, flat) or not np.array_equal(view, parameters["b"]):
        return "a view of the parameters no longer shares their memory"
    if flat.dtype != np.float32:
        return f"float32 parameters have become {flat.dtype}"
    if not np.isfinite(flat).all():
        return "the final model is not finite"
    if difference("", run.final, starting_point("float32").flat) is None:
        return "the final model is the initial model"
    return None


def _dataclasses(value: Any) -> Iterator[Any]:
    """Yield a dataclass, and the dataclasses among its options."""
    if is_dataclass(value):
        yield value
        for option in fields(value):
            yield from _dataclasses(getattr(value, option.name))


def _capture_problem(learner: Learner) -> str | None:
    """Describe a problem of saving the state in a checkpoint now, or return None. Local."""
    try:
        capture(learner)
    except UserError as error:
        return str(error)
    return next(_undeclared(type(learner.state).__name__, learner.state), None)


def _undeclared(path: str, value: Any) -> Iterator[str]:
    """Yield the fields of a dataclass with a missing or wrong reshard rule."""
    for field in fields(value):
        name, item = f"{path}.{field.name}", getattr(value, field.name)
        rule = field.metadata.get("across")
        if field.metadata.get("workspace") or item is None:
            continue
        several = item if isinstance(item, dict) else {"": item}
        states = {key: one for key, one in several.items() if is_dataclass(one)}
        if states:
            for key, one in states.items():
                yield from _undeclared(f"{name}.{key}".rstrip("."), one)
        elif rule is None:
            yield f"{name} must be declared by across(...) or workspace(...)"
        elif rule not in RESHARD_RULES:
            yield f"{name}: across({rule!r}) must be one of {', '.join(RESHARD_RULES)}"
        elif rule in OF_NUMBERS and not isinstance(item, int):
            yield f"{name}: across({rule!r}) is for whole numbers, not for {type(item).__name__}"
        elif rule in OF_ARRAYS and isinstance(item, int | float):
            yield f"{name}: across({rule!r}) is for arrays, not for {type(item).__name__}"
        elif rule == "sum" and isinstance(item, float):
            yield f"{name}: across('sum') is for arrays and whole numbers, not for float"
