"""The ``state_dict()`` of a PyTorch optimizer: its parameters' names, comparison, and loading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...errors import UserError
from ...validation import line_of, shown
from ..module import FlatModule, plain_name
from .vectors import OptimizerVectors

SCHEDULED = ("initial_lr", "base_momentum", "max_momentum", "max_lr", "min_lr")
"""Hyperparameters of a group that PyTorch's schedulers add."""


class StateDicts:
    """Reads and loads an optimizer's ``state_dict()``.

    Args:
        optimizer: of PyTorch.
        module: of the parameters.
        vectors: with tensors of the optimizer's state.

    Local.
    """

    def __init__(self, optimizer: Any, module: FlatModule, vectors: OptimizerVectors) -> None:
        self._optimizer, self._module, self._vectors = optimizer, module, vectors

    def names_by_number(self, packed: Any) -> dict[int, str]:
        """Return the parameters' names by their numbers in a ``state_dict()`` of PyTorch's form.
        Return an empty dictionary for any further form, or if the lengths of its groups differ from
        the optimizer's.
        """
        if not isinstance(packed, dict) or not isinstance(packed.get("state"), dict):
            return {}
        groups = packed.get("param_groups")
        held = [group["params"] for group in self._optimizer.param_groups]
        if not isinstance(groups, list) or len(groups) != len(held):
            return {}
        names = {p: plain_name(name) for name, p in self._module.module.named_parameters()}
        numbered: dict[int, str] = {}
        for group, parameters in zip(groups, held, strict=True):
            numbers = group.get("params") if isinstance(group, dict) else None
            if not isinstance(numbers, list) or len(numbers) != len(parameters):
                return {}
            for number, p in zip(numbers, parameters, strict=True):
                if type(number) is not int:
                    return {}
                numbered[number] = names.get(p, f"parameter {number} of the optimizer")
        return numbered

    def require_equal(self, packed: Any) -> None:
        """Check that a checkpoint's ``state_dict()`` fits this optimizer. Hyperparameters may
        differ, as ``load_state_dict()`` allows.
        """
        present = self._optimizer.state_dict()
        if type(packed) is not type(present):
            raise UserError(f"is {shown(packed)}")
        if not self.names_by_number(present):
            return
        if not self.names_by_number(packed):
            raise UserError("has other parameter groups than this optimizer")
        for i, (saved, own) in enumerate(
            zip(packed["param_groups"], present["param_groups"], strict=True)
        ):
            for odd in sorted(key for key in SCHEDULED if (key in saved) != (key in own)):
                has = "has" if odd in saved else "lacks"
                raise UserError(
                    f"{has} the hyperparameter {i}.{odd}, unlike this optimizer (schedulers add "
                    "it: make them before load_checkpoint)"
                )
            for key, value in own.items():
                if key in saved and _is_number(value) and not _may_replace(saved[key]):
                    raise UserError(
                        f"has {shown(saved[key])} for {i}.{key}, which is {shown(value)} in this "
                        "optimizer"
                    )

    def load(self, state_dict: Any, *, keep_dtypes: bool) -> None:
        """Load a ``state_dict()`` into the optimizer.

        Args:
            state_dict: in the optimizer's form.
            keep_dtypes: whether tensors keep their dtypes, too. PyTorch would cast to the
                parameters' dtype.
        """
        for p, p_state in self.call_load_state_dict(state_dict).items():
            states = [o.state[p] for o in self._vectors.owners if p in o.state]
            for key, value in p_state.items() if states else ():
                now = states[0].get(key)
                cast = is_tensor(value) and is_tensor(now) and value.dtype != now.dtype
                if (keep_dtypes and cast) or not _has_tensors(value):
                    states[0][key] = value
        self._vectors.move()

    def call_load_state_dict(self, state_dict: Any) -> dict[Any, dict[Any, Any]]:
        """Call ``load_state_dict()``, and keep the dictionaries of parameter groups the same
        objects, since schedulers hold references.

        Returns:
            The states in `state_dict`, by parameter.
        Raises:
            UserError: ``load_state_dict()`` fails.
        """
        held = [
            (o, groups, [*groups])
            for o in self._vectors.optimizers
            if isinstance(groups := vars(o).get("param_groups"), list)
        ]
        given, state_dict = self._split_states(state_dict)
        try:
            self._optimizer.load_state_dict(state_dict)
        except Exception as error:
            raise UserError(
                f"has a state of the optimizer that {type(self._optimizer).__name__}"
                f".load_state_dict() rejects: {type(error).__name__}: {line_of(error)}"
            ) from error
        finally:
            for one, groups, dictionaries in held:
                _restore_group_dicts(one, groups, dictionaries)
        return given

    def _split_states(self, state_dict: Any) -> tuple[dict[Any, dict[Any, Any]], Any]:
        """Return the states by parameter, and the ``state_dict()`` without NumPy arrays in its
        states. ``load_state_dict()`` would take NumPy arrays for containers of tensors.
        """
        numbers = self.names_by_number(state_dict)
        if not numbers:
            return {}, state_dict
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        given = {
            p: state_dict["state"][number]
            for number, p in zip(numbers, held, strict=True)
            if isinstance(state_dict["state"].get(number), dict)
        }
        without = {
            number: {k: v for k, v in p_state.items() if not isinstance(v, np.ndarray)}
            if isinstance(p_state, dict)
            else p_state
            for number, p_state in state_dict["state"].items()
        }
        return given, {**state_dict, "state": without}

    def groups(self) -> list[dict[str, Any]]:
        """Return the dictionaries of all parameter groups, including those of nested optimizers."""
        lists = [vars(one).get("param_groups", []) for one in self._vectors.optimizers]
        if len(lists) == 1:
            return [*lists[0]]
        return [*{id(group): group for groups in lists for group in groups}.values()]


def _restore_group_dicts(
    optimizer: Any, groups: list[dict[str, Any]], dictionaries: Sequence[dict[str, Any]]
) -> None:
    """Move the contents of new parameter groups from ``load_state_dict()`` into the former
    dictionaries, in the former list.
    """
    made = vars(optimizer)["param_groups"]
    if len(made) != len(dictionaries):
        return
    for old, new in zip(dictionaries, made, strict=True):
        if old is not new:
            refill(old, dict(new))
    groups[:] = dictionaries
    optimizer.param_groups = groups


def refill(group: dict[str, Any], values: dict[str, Any]) -> None:
    """Replace a group's values. A tensor is copied in place if possible: a program may hold a
    rate.
    """
    for key, value in values.items():
        had: Any = group.get(key)
        tensors = is_tensor(value) and is_tensor(had)
        if tensors and (had.shape, had.dtype) == (value.shape, value.dtype):
            values[key] = had.copy_(value)
    group.clear()
    group.update(values)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _has_tensors(value: Any) -> bool:
    """Return whether a value is or contains a tensor."""
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_has_tensors, value))
    return is_tensor(value)


def _is_number(value: Any) -> bool:
    plain = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return plain or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _may_replace(value: Any) -> bool:
    """Return whether an optimizer may have a value in place of a number."""
    return value is None or isinstance(value, bool) or _is_number(value)
