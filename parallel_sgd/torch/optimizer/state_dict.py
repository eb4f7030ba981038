"""The ``state_dict()`` of one PyTorch optimizer: its parameters' names, comparison, and loading."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import UserError
from ...validation import line_of, shown
from .document import program_values
from .vectors import optimizers_of

SCHEDULED = ("initial_lr", "base_momentum", "max_momentum", "max_lr", "min_lr")
"""Hyperparameters of a group that PyTorch's schedulers add."""


class StateDict:
    """Reads and loads the ``state_dict()`` of one optimizer.

    Args:
        optimizer: of PyTorch.
        names: of all parameters of the model.
        first: the number of parameters of preceding optimizers.

    Attributes:
        optimizer: as given.
        kind: the name of the optimizer's class.
        source: the name of the ``state_dict()``, for errors.
        members: a checksum of the names of the optimizer's trainable parameters.
        own: texts of the program's values in parameter groups, by path: see `program_values`.

    Local.
    """

    def __init__(self, optimizer: Any, names: Mapping[Any, str], first: int) -> None:
        self.optimizer, self.kind = optimizer, type(optimizer).__name__
        self.source = f"{self.kind}.state_dict()"
        self._names, self._first = names, first
        held = (p for group in optimizer.param_groups for p in group["params"])
        trained = sorted(names[p] for p in held if p.requires_grad)
        self.members = f"{zlib.crc32(repr(trained).encode()):08x}"
        self._nested = [*optimizers_of([optimizer])]
        self.own = program_values(optimizer.state_dict())

    @property
    def parameters(self) -> set[str]:
        """The names of the optimizer's parameters in the model."""
        held = (p for group in self.optimizer.param_groups for p in group["params"])
        return {self._names[p] for p in held if p in self._names}

    @property
    def has_own_form(self) -> bool:
        """True if the ``state_dict()`` is not of PyTorch's form."""
        return not self.names_by_number(self.optimizer.state_dict())

    @property
    def has_stepped(self) -> bool:
        """True if the state has results of earlier steps: a counter above zero, or a momentum."""
        for state in self.optimizer.state.values():
            for key in ("step", "momentum_buffer"):  # those of PyTorch's optimizers
                value = state.get(key) if isinstance(state, dict) else None
                if value is not None and bool(torch.as_tensor(value).any()):
                    return True
        return False

    def parts(self) -> tuple[dict[str, Any], Any]:
        """Return the states by parameter, and the rest of the ``state_dict()``. If the
        ``state_dict()`` has a form of its own, return no states, and the whole.
        """
        packed = self.optimizer.state_dict()
        names = self.names_by_number(packed)
        if not names:
            return {}, packed
        state = packed["state"]
        states = {names[number]: p_state for number, p_state in state.items() if number in names}
        rest = {key: part for key, part in state.items() if key not in names}
        return states, {**packed, "state": rest}

    def whole(self, rest: Any, states: dict[str, Any]) -> Any:
        """Return a ``state_dict()`` from its `parts`.

        Raises:
            UserError: there are states of parameters, but the rest is for another optimizer.
        """
        if not states:
            return rest
        numbers = {name: number for number, name in self.names_by_number(rest).items()}
        if not states.keys() <= numbers.keys():
            raise UserError(f"has other parameter groups than this {self.kind}")
        state = {numbers[name]: p_state for name, p_state in states.items()}
        return {**rest, "state": state | rest["state"]}

    def extended(self, state_dict: Any, names: Collection[str]) -> Any:
        """Return the present ``state_dict()``, with the states of these parameters from another
        ``state_dict()``.
        """
        present, state = self.optimizer.state_dict(), state_dict["state"]
        numbers = self.names_by_number(present)
        added = {n: state[n] for n, name in numbers.items() if name in names and n in state}
        return {**present, "state": {**present["state"], **added}}

    def names_by_number(self, packed: Any) -> dict[int, str]:
        """Return the parameters' names by their numbers in a ``state_dict()`` of PyTorch's form.
        Return an empty dictionary for any further form, or if the lengths of its groups differ from
        the optimizer's.
        """
        if not isinstance(packed, dict) or not isinstance(packed.get("state"), dict):
            return {}
        groups = packed.get("param_groups")
        held = [group["params"] for group in self.optimizer.param_groups]
        if not isinstance(groups, list) or len(groups) != len(held):
            return {}
        numbered: dict[int, str] = {}
        for group, parameters in zip(groups, held, strict=True):
            numbers = group.get("params") if isinstance(group, dict) else None
            if not isinstance(numbers, list) or len(numbers) != len(parameters):
                return {}
            for number, p in zip(numbers, parameters, strict=True):
                if type(number) is not int:
                    return {}
                name = self._names.get(p)
                numbered[number] = name or f"parameter {self._first + number} of the optimizer"
        return numbered

    def require_equal(self, packed: Any) -> None:
        """Check that a checkpoint's ``state_dict()`` fits this optimizer. Hyperparameters may
        differ, as ``load_state_dict()`` allows.
        """
        present = self.optimizer.state_dict()
        if type(packed) is not type(present):
            raise UserError(f"is {shown(packed)}")
        if not self.names_by_number(present):
            return
        if not self.names_by_number(packed):
            raise UserError(f"has other parameter groups than this {self.kind}")
        for i, (saved, own) in enumerate(
            zip(packed["param_groups"], present["param_groups"], strict=True)
        ):
            for odd in sorted(key for key in SCHEDULED if (key in saved) != (key in own)):
                has = "has" if odd in saved else "lacks"
                raise UserError(
                    f"{has} the hyperparameter {i}.{odd}, unlike this {self.kind} (schedulers "
                    "add it: make them before load_checkpoint)"
                )
            for key, value in own.items():
                if key in saved and _is_number(value) and not _may_replace(saved[key]):
                    raise UserError(
                        f"has {shown(saved[key])} for {i}.{key}, which is {shown(value)} in this "
                        f"{self.kind}"
                    )

    def load(self, state_dict: Any, *, keep_dtypes: bool) -> None:
        """Load a ``state_dict()`` into the optimizer.

        Args:
            state_dict: in the optimizer's form.
            keep_dtypes: whether tensors keep their dtypes, too. PyTorch would cast to the
                parameters' dtype.
        """
        for p, p_state in self.call_load_state_dict(state_dict).items():
            owners = (o for o in self._nested if isinstance(vars(o).get("state"), dict))
            states = [o.state[p] for o in owners if p in o.state]
            for key, value in p_state.items() if states else ():
                now = states[0].get(key)
                cast = is_tensor(value) and is_tensor(now) and value.dtype != now.dtype
                if (keep_dtypes and cast) or not _has_tensors(value):
                    states[0][key] = value

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
            for o in self._nested
            if isinstance(groups := vars(o).get("param_groups"), list)
        ]
        given, state_dict = self._split_states(state_dict)
        try:
            self.optimizer.load_state_dict(state_dict)
        except Exception as error:
            raise UserError(
                f"has a state of the optimizer that {self.kind}.load_state_dict() rejects: "
                f"{type(error).__name__}: {line_of(error)}"
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
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
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
